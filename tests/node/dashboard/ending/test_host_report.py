"""The report of a finished run as its host saw it, and the files that hold it."""

import asyncio
import json
from pathlib import Path

import pytest

from node.dashboard import host_report as module
from node.dashboard.event_log import EventLog
from node.dashboard.events import ChainForked, PeerDeparted, RevisionReport, RunSteered
from node.dashboard.host_report import ReportWriter, build_host_report, end_lines
from node.dashboard.json_views import run_status, snapshot
from node.dashboard.run_report import RunReport, render_end
from node.dashboard.state import MAX_GONE_PEERS
from protocol.identity import Identity
from tests.node.daemon.receipts.example_commits import MARY, THREE_PEERS, chain, extend, log_in
from tests.node.dashboard.ending.example_end import ROUNDS, SAMPLE, finished_run, first_rounds, last_events
from tests.node.dashboard.example_events import OPENED, apply_all, joined


def test_report_has_the_start_the_end_and_everybody() -> None:
    report = build_host_report(apply_all(finished_run()))
    assert (report.outcome, report.tokens, report.rounds, report.seconds) == ("done", 900, ROUNDS, 300.0)
    assert report.initial_validation_loss == 5.162 and report.validation_loss == pytest.approx(1.562)
    assert (report.initial_loss, report.loss) == (5.5, 1.5)
    assert report.sample == "def h" + SAMPLE
    assert [(one.name, one.tokens, one.rounds) for one in report.contributors][0] == ("mary", 411, 4)
    assert sum(one.tokens for one in report.contributors) == report.tokens


def test_report_and_receipts_count_the_same(tmp_path: Path) -> None:
    """One comes from the host's events, the other from the signed commits."""
    log = log_in(tmp_path)
    extend(log, chain(THREE_PEERS))
    report = build_host_report(apply_all(finished_run()))
    counted = {peer: (account.tokens, account.rounds) for peer, account in log.ledger.accounts.items()}
    assert {one.peer: (one.tokens, one.rounds) for one in report.contributors} == counted


def test_run_that_goes_on_is_not_over() -> None:
    report = build_host_report(apply_all(first_rounds(3, target=ROUNDS)))
    assert (report.outcome, report.rounds) == ("running", 3)
    assert build_host_report(apply_all([])).rounds == 0


def test_nothing_is_lost_after_the_end() -> None:
    """Control: the same departures before the end are warnings."""
    state = apply_all(finished_run())
    values = snapshot(state, 1400.0)
    assert run_status(state)[:2] == ("done", "ok")
    assert {peer["state"] for peer in values["peers"]} == {"left"}
    assert not {line["tone"] for line in values["log"]} & {"bad", "warn"}
    staying = snapshot(apply_all(first_rounds(ROUNDS)), 1400.0)
    assert {peer["state"] for peer in staying["peers"]} == {"done"}, "before they leave"
    before = snapshot(apply_all([*first_rounds(3), *last_events()[1:]]), 1400.0)
    assert {peer["state"] for peer in before["peers"]} == {"left", "gone"}
    assert "warn" in {line["tone"] for line in before["log"]}


def test_run_that_leaves_its_last_round_goes_on() -> None:
    state = apply_all([*finished_run(), ChainForked(at=1400.0, round=ROUNDS - 1)])
    assert not state.is_over and snapshot(state, 1400.0)["end_version"] == ""


async def test_files_follow_the_end_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_SECONDS", 0.01)
    event_log = EventLog(None, first_rounds(ROUNDS - 1))
    writer = asyncio.create_task(ReportWriter(tmp_path, event_log).run())

    async def until_written(sample: str) -> None:
        async with asyncio.timeout(10):
            while not (path.exists() and RunReport.model_validate_json(path.read_text()).sample == sample):
                await asyncio.sleep(0.01)

    path = tmp_path / "report.json"
    for event in first_rounds(ROUNDS)[-2:]:
        assert not path.exists()
        event_log.record(event)
    await until_written("")
    event_log.record(last_events()[0])
    await until_written("def h" + SAMPLE)
    assert "| mary | 411 |" in (tmp_path / "report.md").read_text()
    writer.cancel()


def test_end_waits_for_the_loss_of_the_final_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    save_node_info(tmp_path, MARY.peer_id)
    report, writer = build_host_report(apply_all(finished_run())), ReportWriter(tmp_path, EventLog(None, []))
    assert report.validation_round == report.rounds
    before = report.model_copy(update={"validation_round": report.rounds - 1, "validation_loss": 1.75})
    writer.announce_end(before.model_copy(update={"outcome": "running"}), 0.0)
    writer.announce_end(before, 1.0)
    assert not caplog.messages
    writer.announce_end(report, 3.0)
    writer.announce_end(report, 99.0)
    assert caplog.messages == end_lines(report, tmp_path)
    assert caplog.messages[0].endswith(f"validation loss {report.validation_loss:.3f}")
    assert any(line.startswith("your part: 411 tokens in 4 rounds") for line in caplog.messages)
    late = ReportWriter(tmp_path, EventLog(None, []))
    late.announce_end(before, 1.0)
    late.announce_end(before, 1.0 + module.MEASURED_SECONDS)
    assert f"validation loss 1.750 after round {report.rounds - 1}" in caplog.messages[-5]


def save_node_info(folder: Path, peer: str) -> None:
    """Make `folder` one of the node with this peer id."""
    (folder / "node.json").write_text(json.dumps({"peer_id": peer, "addresses": [], "metrics_port": 1}))


def test_stopped_host_writes_the_figures_so_far(tmp_path: Path) -> None:
    ReportWriter(tmp_path, EventLog(None, first_rounds(2))).write()
    assert "under way" in (tmp_path / "report.md").read_text()
    ReportWriter(tmp_path / "none", EventLog(None, first_rounds(0))).write()
    assert not (tmp_path / "none").exists()


def test_contributors_that_left_long_ago_keep_their_names() -> None:
    """Control: a peer that never gave anything is forgotten, because names cost nothing to make."""
    state = apply_all([*first_rounds(1), PeerDeparted(at=1100.0, peer=MARY.peer_id, reason="left")])
    strangers = [Identity.create().peer_id for _ in range(MAX_GONE_PEERS + 10)]
    for peer in strangers:
        state = apply_all([joined(peer, name="x"), PeerDeparted(at=1200.0, peer=peer, reason="left")], state)
    assert MARY.peer_id not in state.peers and strangers[0] not in state.peers
    assert build_host_report(state).contributors[0].name == "mary"
    assert state.name_of(strangers[0]) == "" and set(state.past_names) == {MARY.peer_id}


def steered(number: int, target: int | None, from_round: int, holds_from: int | None, facts_target: int) -> RunSteered:
    report = RevisionReport(
        number=number, from_round=from_round, changes={"target.rounds": target}, time=1.0, holds_from=holds_from
    )
    facts = OPENED.facts.model_copy(update={"target_rounds": facts_target, "target_tokens": None})
    return RunSteered(at=1400.0, facts=facts, revisions=(report,))


def test_run_that_its_organiser_stopped_has_an_end_screen_and_can_go_on() -> None:
    before = first_rounds(3, target=100)
    stop = steered(1, 3, from_round=3, holds_from=3, facts_target=3)
    state = apply_all([*before, stop])
    report = build_host_report(state)
    assert report.outcome == "stopped" and "organiser has stopped" in run_status(state)[2]
    assert "The organiser has stopped the run." in report.markdown()
    assert "has ended" in render_end(report, snapshot(state, 1.0), has_receipts=False)
    extended = apply_all([steered(2, 200, from_round=3, holds_from=3, facts_target=200)], state)
    assert not extended.is_over and build_host_report(extended).outcome == "running"
    shortened = apply_all([*before, steered(1, 3, from_round=1, holds_from=1, facts_target=3)])
    assert build_host_report(shortened).outcome == "done", "a target that is set ahead of time is a target"
    waiting = apply_all([*before, steered(1, 3, from_round=3, holds_from=None, facts_target=100)])
    assert build_host_report(waiting).outcome == "running"
