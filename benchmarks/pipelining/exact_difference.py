"""Explain why the weights of an exact run differ from those of one process: which sum of which step is wrong first.

The commits on the nodes' disks name the digest and the microbatches of every sum. One process makes each step again,
and each of its sums from these microbatches alone.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.pipelining.exact_reference import SingleProcess
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME, Start, read_header, read_records
from node.daemon.receipts.ledger import commit_reader
from node.run_dir import RunDir
from optim.exact import Doubles, Float64Sum
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.manifest.reading import load_manifest
from protocol.pipeline.ledger import StepLedger, covers_step

Commits = dict[int, dict[int, Commit]]  # by round and stage


def explain_difference(folder: Path) -> str:
    """Return the first step with a wrong sum, and what is wrong with it, of the run of the nodes in a folder."""
    whole = SingleProcess(load_manifest(folder / "run.toml"), folder)
    step = 0
    for number, commits in sorted(_read_commits(folder).items()):
        ledgers = [[entry.body.ledger for entry in commit.contributions] for commit in commits.values()]
        if len(commits) < len(whole.stages) or not all(covers_step(each, whole.count) for each in ledgers):
            continue  # it was void
        wrong = [
            f"stage {stage}: {line}"
            for stage, commit in sorted(commits.items())
            for entry in commit.contributions
            for line in check_sum(whole, folder, step, stage, entry.body)
        ]
        if wrong:
            return "\n".join([f"the first wrong step is {step}, of round {number}", *wrong])
        whole.run(1)
        step += 1
    return f"all sums of {step} steps are right, so the steps that the daemons made with them differ"


def _read_commits(folder: Path) -> Commits:
    found: Commits = defaultdict(dict)
    for path in folder.glob(f"*/{COMMIT_FILE_NAME}"):
        stage = RunDir(path.parent).read_stage()
        assert stage is not None
        with path.open("rb") as file:
            header = read_header(file, path)
            open_commit = commit_reader(header)
            for record in read_records(file, header.rule):
                if not isinstance(record.content, Start):
                    commit = open_commit(record.content).body
                    found[commit.round][stage] = commit
    return found


def check_sum(whole: SingleProcess, folder: Path, step: int, stage: int, body: Contribution) -> Iterator[str]:
    """Yield a line about a sum that is not that of its microbatches."""
    ledger = StepLedger.from_bytes(body.ledger, whole.count)
    right = whole.sums(step, list(ledger))[stage]
    codec = Float64Sum()
    payload = codec.encode_sum(right) if len(ledger) else codec.encode_nothing()
    if Blob.of(payload).digest == body.parts[0].digest:
        return
    cause = next(
        (_explain(whole, step, stage, path, right) for path in folder.glob(f"*/blobs/{body.parts[0].name}")), ""
    )
    yield f"a sum of the microbatches {list(ledger)} has other bytes{cause}"


def _explain(whole: SingleProcess, step: int, stage: int, path: Path, right: Doubles) -> str:
    """Return by which microbatch a sum differs, if by one."""
    found = Float64Sum().decode_sum(path.read_bytes(), right.size)
    difference = -right if found is None else found - right
    for number in range(whole.count):
        gradient = whole.sums(step, [number])[stage]
        for sign, words in ((1, "is counted once too often"), (-1, "is missing")):
            if np.allclose(difference, sign * gradient, rtol=0, atol=1e-12 * float(np.abs(right).max())):
                return f": microbatch {number} {words}"
    return f": it differs by up to {float(np.abs(difference).max()):g}, by no single microbatch"
