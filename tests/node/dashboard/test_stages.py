"""The page of a run whose model is cut into stages: the figures are those of the peers' records."""

import asyncio
from typing import Any

import pytest

from node.dashboard.chain_follower import ChainFollower
from node.dashboard.event_log import EventLog
from node.dashboard.events import PeerDeparted, PeersUpdated
from node.dashboard.html_page import render_page
from node.dashboard.json_views import run_status, snapshot
from node.dashboard.state import RunState
from node.dashboard.swarm_watcher import build_peer_report
from protocol.murmur_pb2 import PeerRecord
from tests.node.dashboard.example_events import FACTS, NAMES, OPENED, apply_all, joined, peer_report
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
    assert (values["round"], values["status"], values["progress"]) == (7, "training", 0.07)
    assert (values["tokens"], values["loss"], values["tokens_per_second"]) == (100, 3.0, 50.0)
    text = render_page(values, None, "0.1")
    assert "Microbatches: done 2,000, lost 4" in text
    assert 'data-cut="yes"' in text and "2 peers · 4.0 microbatches/s · round 7" in text
    assert "no round yet" not in text and 'width="50.00%"' in text


def test_empty_stage_is_named() -> None:
    state = run(0, 2)
    assert run_status(state) == ("waiting", "warn", "nobody serves stage 1")
    assert "nobody serves it" in render_page(snapshot(state, 1100.0), None, "0.1")


def test_round_is_that_of_the_stage_behind_and_stays_when_its_peers_leave() -> None:
    state = apply_all([PeersUpdated(at=1.0, peers=(peer_report(NAMES[1], stage=1, round=6),))], run(0, 1, 2))
    assert state.round == 6
    gone = apply_all([PeerDeparted(at=2.0, peer=name, reason="expired") for name in NAMES[:3]], state)
    assert gone.round == 6 and run_status(gone)[0] == "looking"


def test_pipeline_is_done_once_all_stages_have_reached_the_target() -> None:
    """Control: with one stage at the target it is not, and all left is not the end."""
    target = FACTS.target_rounds or 0
    for behind, status in ((0, "done"), (1, "empty")):
        ended = tuple(
            peer_report(name, stage=stage, round=target - behind * (stage == 1)) for stage, name in enumerate(NAMES[:3])
        )
        state = apply_all([PeersUpdated(at=1.0, peers=ended)], run(0, 1, 2))
        gone = apply_all([PeerDeparted(at=2.0, peer=name, reason="left") for name in NAMES[:3]], state)
        assert run_status(gone)[0] == status


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
async def test_host_asks_nobody_for_a_chain_that_a_pipeline_does_not_have(
    is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(ChainFollower, "find_trusted_head", lambda *arguments: asked.append(arguments))
    cut = MANIFEST.pipeline.model_copy(update={"stages": 2})
    manifest = MANIFEST.model_copy(update={"pipeline": cut}) if is_cut else MANIFEST
    records = {name: PeerRecord(role="trainer", round=1, digest=b"d" * 32, chain_tokens=9) for name in NAMES}
    log = EventLog(None, [OPENED])
    watching = asyncio.create_task(watcher_of(FakeNodeHandle(FakeDirectory(records), manifest=manifest), log).run())
    async with asyncio.timeout(10):
        while len(log.state.peers) < len(NAMES):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
    watching.cancel()
    assert bool(asked) is not is_cut
