"""The page of a run whose model is cut: stages by the peers' records, rounds by the chain of the last stage."""

from collections.abc import Mapping
from typing import Any

import pytest

from node.dashboard.chain_follower import ChainFollower
from node.dashboard.event_log import EventLog
from node.dashboard.events import PeersUpdated
from node.dashboard.html_page import render_page
from node.dashboard.json_views import history, run_status, snapshot
from node.dashboard.state import RunState
from node.dashboard.swarm_watcher import build_peer_report
from protocol.consensus.chain import ChainHead
from protocol.membership.record_fields import ServedStage, encode_served_stages
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.stage import stage_run_id
from tests.node.dashboard.example_events import FACTS, NAMES, OPENED, apply_all, committed, joined, peer_report
from tests.node.dashboard.test_swarm_watcher import FakeDirectory, FakeNodeHandle, watcher_of
from tests.node.small_run import MANIFEST

CUT = OPENED.model_copy(update={"facts": FACTS.model_copy(update={"stages": 3})})


def run(*stages: int | None, opened: Any = CUT) -> RunState:
    """Return a run with a peer at each of the stages."""
    peers = [
        joined(name, stage=stage, stage_rate=2.0, round=7, tokens=100, loss=3.0, microbatches={"done": 500, "lost": 1})
        for name, stage in zip(NAMES, stages, strict=False)
    ]
    return apply_all([opened, *peers])


def test_page_shows_the_stages_with_peers_rate_round_and_bar() -> None:
    state = run(0, 0, 1, 2)
    values = snapshot(state, 1100.0)
    assert [(stage["peers"], stage["rate"], stage["share"]) for stage in values["stages"]] == [
        (2, 4.0, 1.0), (1, 2.0, 0.5), (1, 2.0, 0.5),
    ]  # fmt: skip
    assert values["tokens_per_second"] == 50.0
    text = render_page(values, None, "0.1")
    assert "Microbatches: done 2,000, lost 4" in text
    assert 'data-cut="yes"' in text and "2 peers · 4.0 microbatches/s · round 7" in text
    assert 'width="50.00%"' in text


def test_rounds_loss_and_tokens_are_those_of_the_last_stage() -> None:
    """The peers of other stages have no share, because their own stages count their work."""
    last = [committed(number, NAMES[3:], loss=4.0 - number) for number in range(3)]
    state = apply_all(last, run(0, 0, 1, 2))
    values = snapshot(state, 1100.0)
    assert (values["round"], values["status"], values["progress"]) == (3, "training", 0.03)
    assert (values["tokens"], values["loss"], values["round_seconds"]) == (300, 2.0, 2.0)
    assert history(state, 10)["loss"] == [4.0, 3.0, 2.0] and history(state, 10)["tokens"] == [100, 200, 300]
    assert [peer["share"] for peer in values["peers"]] == [None, None, None, 1.0]
    assert [peer["given_tokens"] for peer in values["peers"]] == [None, None, None, 300]
    assert "1 of 1 in time at the last stage" in render_page(values, None, "0.1")
    over = apply_all([committed(number, NAMES[3:]) for number in range(3, FACTS.target_rounds or 0)], state)
    assert run_status(over)[0] == "done" and run_status(state)[0] == "training"


def test_empty_stage_is_named() -> None:
    state = apply_all([committed(0, NAMES[1:2])], run(0, 2))
    assert run_status(state) == ("waiting", "warn", "nobody serves stage 1")
    assert "nobody serves it" in render_page(snapshot(state, 1100.0), None, "0.1")


def test_one_of_three_peers_cannot_claim_a_round() -> None:
    state = apply_all(
        [PeersUpdated(at=1.0, peers=(peer_report(NAMES[0], stage=0, round=2**53),))], run(0, 0, 0, opened=CUT)
    )
    assert snapshot(state, 1100.0)["stages"][0]["round"] == 7


def test_run_that_is_not_cut_shows_no_stages_whatever_a_peer_claims() -> None:
    values, plain = snapshot(run(0, 1, opened=OPENED), 1100.0), snapshot(run(None, None, opened=OPENED), 1100.0)
    assert values == plain and values["stages"] == [] and values["round"] == 0
    assert '<section id="stages" hidden>' in render_page(values, None, "0.1")


def test_report_of_a_peer_has_its_stage_only_if_it_serves_one() -> None:
    record = PeerRecord(role="trainer", stage=2, stage_rate=1e300, stage_life=5, microbatches_done=2**64 - 1)
    report = build_peer_report("peer", record, (0.0, 0.0), 1.0)
    assert (report.stage, report.stage_rate, report.microbatches["done"]) == (1, 1e9, 2**53)
    record.stage_life = 0
    assert build_peer_report("peer", record, (0.0, 0.0), 1.0).stage is None


@pytest.mark.parametrize("is_cut", [True, False])
async def test_host_follows_the_chain_of_the_last_stage(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: in a run that is not cut it follows the chain of the run, and asks all trainers."""
    asked: list[tuple[str, dict[str, int]]] = []

    def find(self: ChainFollower, known: ChainHead, trainers: Mapping[str, PeerRecord], now: float) -> None:
        asked.append((self._run_id, {peer: record.round for peer, record in trainers.items()}))

    monkeypatch.setattr(ChainFollower, "find_trusted_head", find)
    model = MANIFEST.model.model_copy(update={"layers": 2, "tied": False})
    table = MANIFEST.pipeline.model_copy(update={"stages": 2, "microbatch": 1})
    cut = MANIFEST.model_copy(update={"model": model, "pipeline": table})
    replica = encode_served_stages([ServedStage(1, 5, 1.0, 3, b"d" * 32, 9)])
    records = {
        NAMES[0]: PeerRecord(role="trainer", stage=1, stage_life=5, round=4),
        NAMES[1]: PeerRecord(role="trainer", stage=2, stage_life=5, round=5),
        NAMES[2]: PeerRecord(role="trainer", stage=1, stage_life=5, round=6, more_stages=replica),
    }
    watcher = watcher_of(
        FakeNodeHandle(FakeDirectory(records), manifest=cut if is_cut else MANIFEST), EventLog(None, [CUT])
    )
    watcher.poll(1.0)
    await watcher._follow_chain()
    whole = MANIFEST.run_id, {NAMES[0]: 4, NAMES[1]: 5, NAMES[2]: 6}
    assert asked == [(stage_run_id(cut.run_id, 2, 1), {NAMES[1]: 5, NAMES[2]: 3}) if is_cut else whole]
