"""Whole nodes: a peer dies while its sum travels, two own the same microbatches, and one moves to another stage."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pipelining.exact_reference import SingleProcess, read_stages
from node.commands.up.peer_process import PeerProcess
from node.injected_faults import VARIABLE
from node.run_dir import RunDir
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from tests.pipelines.patched_node import MOVE
from tests.slices import nightly
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, running_swarm
from tests.swarm.stages.test_pipeline import final_status

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

RUN = Path(__file__).parents[1] / "swarm" / "stages" / "exact.toml"
LOCAL_RUN = RUN.with_name("pipeline.toml")
STAGES = (0, 0, 0, 1)  # of the peers; with three at a stage, two go on at once where one dies
ROUNDS = 3
SLOW = "slow=25"  # trainers that sleep, so that the stages limit the pace more than the processor does
MEASURED = 25  # microbatches


@dataclass(frozen=True)
class Outcome:
    """`steps`: that counted; `differing`: values of all finished peers that differ from one process."""

    steps: int
    differing: int
    statuses: tuple[dict[str, Any], ...]

    def total(self, name: str) -> int:
        return sum(status["microbatches"][name] for status in self.statuses)


def run_nodes(folder: Path, *words: str) -> Outcome:
    """Run nodes with these patches to the end; the first one may die."""
    with running_swarm(folder, _manifest(RUN, {"target": {"rounds": ROUNDS}}), 0) as swarm:
        _start(swarm, words)
        swarm.wait_until(lambda: not any(peer.is_running for peer in swarm.peers), "the run ends")
        assert all(peer.returncode == 0 for peer in swarm.peers[1:]), swarm.describe()
        ended = [peer for peer in swarm.peers if peer.returncode == 0]
        return _compare(folder, ended)


def _manifest(run: Path, changes: Mapping[str, Mapping[str, Any]]) -> Manifest:
    """Return the manifest of a short run that begins with one peer at each stage."""
    values = load_manifest(run).model_dump(mode="json", exclude_none=True)
    values["data"] = {"source": "text", "path": "corpus.txt"}
    values["run"]["min_peers"] = 2
    return Manifest.model_validate_json(json.dumps({**values, **changes}))


def _start(swarm: ProcessSwarm, words: Sequence[str]) -> None:
    """Start a patched node for each of STAGES; its folder names its stage, so it may move."""
    for rank, (stage, patches) in enumerate(zip(STAGES, words, strict=True)):
        made = swarm._make_peer(rank)
        command = [sys.executable, "-m", "tests.pipelines.patched_node", patches, *made._command[3:]]
        swarm.peers.append(PeerProcess(made.name, made.folder, command))
        made.folder.mkdir()
        RunDir(made.folder).write_stage(stage, max(STAGES) + 1)
    swarm.start()


def _compare(folder: Path, ended: Sequence[PeerProcess]) -> Outcome:
    stages = read_stages(folder)
    steps = max(stage.steps for stage in stages)
    weights = SingleProcess(load_manifest(folder / "run.toml"), folder).run(steps)
    finished = [stage for stage in stages if stage.steps == steps]
    assert len(finished) >= len(ended)
    differing = sum(int((stage.anchor != weights[stage.stage]).sum()) for stage in finished)
    return Outcome(steps, differing, tuple(final_status(peer.folder) for peer in ended))


@pytest.mark.parametrize("naive", [False, *nightly([True])])
def test_all_or_none_apply_a_sum_whose_peer_dies_while_it_travels(naive: bool, tmp_path: Path) -> None:
    """The control: nodes that apply a round whose sums lack microbatches."""
    word = "counts incomplete steps" if naive else ""
    outcome = run_nodes(tmp_path, f"dies while its sum travels,{word}", word, word, word)
    digests = {(status["stage"], status["state_digest"]) for status in outcome.statuses}
    assert len(outcome.statuses) == len(STAGES) - 1 and len(digests) == 2, "one state at each stage"
    assert outcome.steps == (ROUNDS if naive else ROUNDS - 1), "without that sum the round is void"
    assert (outcome.differing > 0) == naive


@pytest.mark.parametrize("naive", nightly([False, True]))  # the seeds of exact steps try it with virtual nodes
def test_microbatches_with_two_owners_count_once(naive: bool, tmp_path: Path) -> None:
    """The control: trainers that add every gradient that they compute."""
    word = "adds always" if naive else ""
    outcome = run_nodes(tmp_path, *(f"owns every microbatch,{word}" for _ in STAGES))
    assert outcome.total("served: subtracted") + outcome.total("replayed") > 0, "gradients are computed twice"
    assert (outcome.differing > 0) == naive


@pytest.mark.nightly  # it takes minutes, and other programs on the processor make all stages equally weak
@pytest.mark.parametrize("naive", [False, True])
def test_one_peer_moves_to_the_weakest_stage(naive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: peers that decide alone leave the strong stage together."""
    monkeypatch.setenv(VARIABLE, SLOW)
    schedule = {"recipe": "frugal", "schedule": {"inner_steps": 2}}
    manifest = _manifest(LOCAL_RUN, {"target": {"rounds": ENDLESS}, "method": schedule})
    with running_swarm(tmp_path, manifest, 0) as swarm:
        _start(swarm, ["chooses alone" if naive else "moves once told"] * len(STAGES))
        swarm.wait_until(lambda: _is_uneven(swarm), "the records of all rates say that stage 1 is the weakest")
        before = _pace(swarm)
        (tmp_path / MOVE).touch()
        if naive:
            swarm.wait_until(lambda: _moves(swarm) > 1, "several peers move at once")
            return
        swarm.wait_until(lambda: _peers_by_stage(swarm) == {0: 2, 1: 2}, "two peers are at each stage")
        after = _pace(swarm)
        print(f"{before:.2f} microbatches/s before the move, {after:.2f} after it")
        assert _moves(swarm) == 1, swarm.describe()


def _pace(swarm: ProcessSwarm) -> float:
    """Return the microbatches a second that come back to their owners."""
    first = _done(swarm)
    return MEASURED / swarm.wait_until(lambda: _done(swarm) >= first + MEASURED, "microbatches come back")


def _done(swarm: ProcessSwarm) -> int:
    return sum(status.microbatches.get("done", 0) for status in swarm.poll())


def _is_uneven(swarm: ProcessSwarm) -> bool:
    """Return whether the rate of stage 1 is less than half of that of stage 0; the first rates are of no use."""
    rates = [[entry.rate for entry in status.stages] for status in swarm.poll()]
    return len(rates) == len(STAGES) and all(each and 0 < each[1] < each[0] / 2 for each in rates)


def _moves(swarm: ProcessSwarm) -> int:
    """Return how many times a node has said that it moves."""
    return sum(swarm.log(peer).count("moving from stage") for peer in swarm.peers)


def _peers_by_stage(swarm: ProcessSwarm) -> dict[int, int]:
    """Return the ready peers of each stage as the last peer, which does not move, sees them."""
    statuses = swarm.poll(swarm.peers[-1])
    return {entry.stage: entry.peers for status in statuses for entry in status.stages}
