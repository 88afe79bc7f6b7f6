"""The final report of a local swarm: losses before and after, bytes sent, the exported model and a text sample.

The baseline is per-step data-parallel training on the same tokens, in which each peer sends a ring all-reduce of the
fp32 gradient at each step:
    2 (N - 1) / N * 4 bytes * parameters * steps,   steps = tokens / (N * tokens of one step on one peer)
"""

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from node.commands.eval.results import Result
from node.commands.up.swarm_summary import PeerTotals, compute_share
from node.daemon.checkpoints.trained_weights import load_trained_weights
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.ledger import commit_reader, read_ledger
from node.dashboard.run_report import REPORT_JSON, ContributorReport, Figure, RunReport, write_report
from node.data import open_corpus, validation_sets
from node.data.batches import VALIDATION_TOKENS
from node.model import build_model
from node.model.export import export
from node.model.generate import generate
from node.model.weight_files import read_frozen, start_weights
from node.paths import find_newest_checkpoint, find_trained_dir
from node.run_dir import read_json_if_whole
from node.trainer.inner_step import validate
from node.units import format_bytes
from protocol.manifest.run import Manifest

SAMPLE_TOKENS = 200
SAMPLE_CHARACTERS = 240
PROMPTS = {"python-stdlib": "def "}
DEFAULT_PROMPT = "The "


class FinalReport(RunReport):
    """The report of a local swarm; bytes and seconds are those since this start."""

    peers: int
    bytes_sent_per_peer: int  # of the peer that sent the most
    bytes_sent_mean: int
    bytes_all_reduce_per_peer: int
    byte_ratio: float | None  # all-reduce over sent; null when nothing was sent
    compute_share: float | None
    digests: dict[str, str]  # peer id to chain digest
    stages: dict[str, int] = {}  # peer id to stage; empty if the run is not cut
    agreed: bool
    peers_lost: int
    peers_rejoined: int
    checkpoint: str
    export: str

    def figures(self) -> list[Figure]:
        """Return the figures that are known."""
        share = "-" if self.compute_share is None else f"{self.compute_share:.0%}"
        return [
            *super().figures(),
            Figure("sent per peer", self._sent_line()),
            Figure("computing", f"{share} of the time"),
            Figure("peers", f"{self.peers}, lost {self.peers_lost}, rejoined {self.peers_rejoined}"),
            Figure("digests", self._digest_line()),
            Figure("checkpoint", self.checkpoint),
            Figure("export", self.export),
        ]

    def _sent_line(self) -> str:
        sent = format_bytes(self.bytes_sent_per_peer)
        if self.stages:
            return f"{sent}, with the activations of microbatches"
        ratio = f"{self.byte_ratio:.0f} times fewer" if self.byte_ratio else "nothing was sent"
        return f"{sent}; per-step all-reduce would have sent {format_bytes(self.bytes_all_reduce_per_peer)}: {ratio}"

    def _digest_line(self) -> str:
        if self.agreed and self.stages:
            return f"all {len(self.digests)} peers agree, at each of {len(set(self.stages.values()))} stages"
        if self.agreed:
            whose = f"all {len(self.digests)} peers agree" if len(self.digests) > 1 else "one peer"
            return f"{whose}: {next(iter(self.digests.values()))[:16]}"
        return "DIFFER: " + ", ".join(f"{peer[-6:]} {digest[:8] or 'none'}" for peer, digest in self.digests.items())


@dataclass(frozen=True)
class SwarmResult:
    """The swarm's own counts after its peers have ended; `tokens_before` were committed before this start.

    `stages` has the stage of each peer by its id; of a run that is not cut it is empty.
    """

    peer_totals: Sequence[PeerTotals]
    tokens: int
    digests: Mapping[str, str]
    stages: Mapping[str, int]
    tokens_before: int
    peers_lost: int
    peers_rejoined: int
    seconds: float


@dataclass(frozen=True)
class ModelEvaluation:
    """The evaluation of the newest checkpoint."""

    checkpoint: Path
    export: Path
    rounds: int
    parameters: int
    initial_validation_loss: float
    validation_loss: float
    sample: str


def ring_all_reduce_bytes(peers: int, parameters: int, tokens: int, batch_tokens: int) -> int:
    """Return the bytes that each of `peers` would have sent for the same tokens with an all-reduce at each step."""
    steps = tokens / (peers * batch_tokens)
    return round(2 * (peers - 1) / peers * 4 * parameters * steps)


def do_digests_agree(digests: Mapping[str, str], peers: int, stages: Mapping[str, int] | None = None) -> bool:
    """Return whether every peer reported a digest and all are equal, of a run that is cut those of each stage."""
    if len(digests) != peers or not all(digests.values()):
        return False
    by_stage = {(stages or {}).get(peer): set[str]() for peer in digests}
    for peer, digest in digests.items():
        by_stage[(stages or {}).get(peer)].add(digest)
    return all(len(found) == 1 for found in by_stage.values())


def count_contributors(node_dirs: Sequence[Path], result: SwarmResult) -> tuple[ContributorReport, ...]:
    """Return the counted work of each peer, by the longest of the peers' commit logs, of each stage."""
    files = [folder / COMMIT_FILE_NAME for folder in node_dirs]
    ledgers = [read_ledger(file, commit_reader) for file in files if file.exists()]
    if not ledgers:
        return ()
    longest = {}
    for ledger in sorted(ledgers, key=lambda one: (one.tokens, one.head.tokens)):
        longest[ledger.header.run_id] = ledger  # each stage of a pipeline is a run of its own
    totals = {totals.peer_id: totals for totals in result.peer_totals}
    tokens = sum(ledger.head.tokens for ledger in longest.values())
    accounts = [item for ledger in longest.values() for item in ledger.accounts.items()]
    accounts.sort(key=lambda item: (-item[1].tokens, item[0]))
    return tuple(
        ContributorReport(
            peer=peer,
            name=totals[peer].name if peer in totals else "",
            tokens=account.tokens,
            share=account.tokens / max(1, tokens),
            rounds=account.rounds,
            seconds=round(sum(totals[peer].newest_seconds().values()), 1) if peer in totals else 0.0,
            size=account.size,
            groups=account.groups,
        )
        for peer, account in accounts
    )


def build_report(
    manifest: Manifest,
    result: SwarmResult,
    evaluation: ModelEvaluation,
    contributors: tuple[ContributorReport, ...] = (),
) -> FinalReport:
    """Combine the swarm's result, the evaluation of its model, and the work of each peer."""
    sent = [totals.bytes_sent for totals in result.peer_totals]
    tokens_now = max(0, result.tokens - result.tokens_before)
    all_reduce = ring_all_reduce_bytes(len(sent), evaluation.parameters, tokens_now, manifest.train.batch_tokens)
    return FinalReport(
        run=manifest.run.name,
        run_id=manifest.run_id,
        recipe=manifest.method.recipe,
        peers=len(sent),
        validation_loss=evaluation.validation_loss,
        initial_validation_loss=evaluation.initial_validation_loss,
        tokens=result.tokens,
        rounds=evaluation.rounds,
        parameters=evaluation.parameters,
        bytes_sent_per_peer=max(sent),
        bytes_sent_mean=round(sum(sent) / len(sent)),
        bytes_all_reduce_per_peer=all_reduce,
        byte_ratio=all_reduce / max(sent) if max(sent) else None,
        compute_share=compute_share(result.peer_totals),
        seconds=round(result.seconds, 1),
        digests=dict(result.digests),
        stages=dict(result.stages),
        agreed=do_digests_agree(result.digests, len(sent), result.stages),
        peers_lost=result.peers_lost,
        peers_rejoined=result.peers_rejoined,
        checkpoint=str(evaluation.checkpoint),
        export=str(evaluation.export),
        sample=evaluation.sample,
        contributors=contributors,
    )


def evaluate_model(manifest: Manifest, swarm_dir: Path) -> ModelEvaluation:
    """Evaluate the newest checkpoint in `swarm_dir` and replace its folder `export`. Raises MurmurError."""
    node = find_trained_dir(swarm_dir)
    trained = load_trained_weights(node)
    initial = start_weights(manifest, swarm_dir)
    assert initial is not None, "the manifest of a swarm names the folder of its weights"
    before, after = validation_losses(manifest, swarm_dir, initial, trained.anchor)
    exported = swarm_dir / "export"
    shutil.rmtree(exported, ignore_errors=True)
    export(node, exported)
    return ModelEvaluation(
        checkpoint=find_newest_checkpoint(node) or node,
        export=exported,
        rounds=trained.round,
        parameters=trained.anchor.numel(),
        initial_validation_loss=before,
        validation_loss=after,
        sample=sample_text(manifest, node),
    )


def validation_losses(manifest: Manifest, base: Path, *weights: Tensor) -> list[float]:
    """Return the mean loss over the held-out text, in nats per token, for each flat vector of weights."""
    held_out = validation_sets(
        open_corpus(manifest.data, base, manifest.method.modules), manifest.model.context, VALIDATION_TOKENS
    )
    model = build_model(manifest.model, frozen=read_frozen(manifest.model, base))
    return [validate(model, flat, held_out).loss for flat in weights]


def sample_text(manifest: Manifest, node_dir: Path) -> str:
    """Return the beginning of the model's continuation of a standard prompt, including the prompt."""
    prompt = PROMPTS.get(manifest.data.mixture[0].source, DEFAULT_PROMPT)
    pieces = generate(node_dir, prompt, tokens=SAMPLE_TOKENS, temperature=0.7, top_k=40, seed=manifest.run.seed)
    return "".join(itertools.chain((prompt,), pieces))[:SAMPLE_CHARACTERS]


def update_report(folder: Path, evaluations: Sequence[Result]) -> None:
    """Write the report of a finished run again, with these results; a folder without one is left as it is."""
    values = read_json_if_whole(folder / REPORT_JSON)
    report = _parse(values | {"evaluations": [result.model_dump() for result in evaluations]}) if values else None
    if report is not None:
        write_report(folder, report)


def _parse(values: dict[str, object]) -> RunReport | None:
    for kind in (FinalReport, RunReport):  # of `murmur up`, and of a host
        try:
            return kind.model_validate(values)
        except ValidationError:
            continue
    return None  # of another version
