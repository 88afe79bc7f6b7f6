"""Results of `murmur eval` on a host: found in its folder, made by the host itself, on the page and in the report."""

import asyncio
import logging
from pathlib import Path

import pytest

from node.commands.eval.results import Result, append_results, read_results
from node.dashboard import evaluations as module
from node.dashboard.evaluations import EvaluationKeeper, EvaluationPlan, is_evaluation_due, plan_of
from node.dashboard.event_log import EventLog, read_events
from node.dashboard.events import ChainForked, LogOpened, ModelEvaluated
from node.dashboard.host_report import build_host_report
from node.dashboard.html_page import render_page
from node.dashboard.json_views import MAX_RESULT_POINTS, course_points, snapshot
from node.dashboard.state import MAX_EVALUATIONS
from protocol.errors import MurmurError, UsageError
from protocol.tasks import cancel_and_wait
from tests.node.dashboard.example_events import FACTS, apply_all, opening_events
from tests.node.dashboard.test_samples import write_node

HOSTILE = "<img src=x>|"


def result(number: int, value: float = 1.0, **fields: object) -> Result:
    values = {"time": float(number), "round": number, "tokens": 100 * number, "task": "quiz", "metric": "acc"}
    return Result.model_validate({**values, "value": value, **fields})


def test_evaluation_is_due_every_so_many_rounds_and_at_the_end() -> None:
    assert is_evaluation_due(10, None, 10, is_over=False) and not is_evaluation_due(9, None, 10, is_over=False)
    assert is_evaluation_due(20, 10, 10, is_over=False) and not is_evaluation_due(19, 10, 10, is_over=False)
    assert is_evaluation_due(19, 10, 10, is_over=True) and not is_evaluation_due(19, 19, 10, is_over=True)
    assert not is_evaluation_due(None, None, 1, is_over=True)
    assert plan_of(None, ()) is None and plan_of(5, ["a"]) == EvaluationPlan(5, ("a",))
    with pytest.raises(UsageError, match="--eval-every"):
        plan_of(None, ["a"])


async def test_results_in_the_folder_become_events_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog.open(path, LogOpened(at=0.0, facts=FACTS))
    keeper = EvaluationKeeper(tmp_path, log)
    await keeper.record_new_results()
    assert not log.state.evaluations
    append_results(tmp_path, [result(1), result(2)])
    for _ in range(2):
        await keeper.record_new_results()
    append_results(tmp_path, [result(3)])
    await keeper.record_new_results()
    assert log.state.evaluations == (result(1), result(2), result(3)) and log.state.index == 3
    log.close()
    again = EventLog.open(path, LogOpened(at=9.0, facts=FACTS))
    await EvaluationKeeper(tmp_path, again).record_new_results()
    assert again.state.evaluations == log.state.evaluations, "a restarted host knows them"
    again.close()
    assert [event.kind for event in read_events(path)] == ["opened", "evaluated", "evaluated", "started"]


@pytest.mark.slow
async def test_host_evaluates_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_node(tmp_path, 7)
    (folder / "book.txt").write_text("all birds fly together\n" * 100)
    log = EventLog(None, opening_events())
    keeper, plan = EvaluationKeeper(folder, log, EvaluationPlan(5)), EvaluationPlan(5)
    for _ in range(2):
        await keeper.evaluate_if_due(plan)
    await keeper.record_new_results()
    assert {one.metric for one in log.state.evaluations} == {"loss", "perplexity", "bits_per_byte"}
    assert {one.round for one in log.state.evaluations} == {7} and len(read_results(folder)) == 3


async def test_evaluation_that_fails_is_one_line_and_waits_for_its_next_turn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []

    async def fail(folder: Path, tasks: object) -> None:
        tried.append(folder)
        raise MurmurError("no room")

    monkeypatch.setattr(module, "evaluate_beside", fail)
    keeper, plan = EvaluationKeeper(write_node(tmp_path, 7), EventLog(None, opening_events())), EvaluationPlan(5)
    with caplog.at_level(logging.WARNING):
        await keeper.evaluate_if_due(plan)
        await keeper.evaluate_if_due(plan)
        for number in (11, 12):  # the next one is due five rounds later
            write_node(tmp_path, number)
            await keeper.evaluate_if_due(plan)
    assert len(tried) == 2 and [record.message for record in caplog.records] == ["the model was not evaluated: no room"]


async def test_results_are_recorded_while_an_evaluation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)

    async def note_and_hang(folder: Path, tasks: object) -> None:
        append_results(folder, [result(7)])
        await asyncio.Event().wait()

    monkeypatch.setattr(module, "evaluate_beside", note_and_hang)
    log = EventLog(None, opening_events())
    running = asyncio.create_task(EvaluationKeeper(write_node(tmp_path, 7), log, EvaluationPlan(5)).run())
    async with asyncio.timeout(20):
        while not log.state.evaluations:
            await asyncio.sleep(0.01)
    await cancel_and_wait((running,))


async def test_slow_evaluation_ends_at_its_deadline(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        with pytest.raises(MurmurError, match="took longer than"):
            await module.evaluate_beside(tmp_path, (), seconds=0.01)


def test_page_and_report_have_the_newest_result_of_each_metric() -> None:
    other = result(4, 0.25, task=HOSTILE, metric="loss", standard_error=0.125, tokens=None, round=None)
    evaluated = ModelEvaluated(at=5.0, results=(result(1, 0.5), result(3, 0.75), other))
    state = apply_all([*opening_events(), evaluated])
    text = render_page(snapshot(state, 10.0), "murmur join x", "0.1")
    row = text.split('<tbody id="results">')[1].split("</tr>")[0]
    assert "0.7500" in row and "0.5000" in row and 'points="0.0,20.0 100.0,0.0"' in row
    assert "<img" not in text and "0.1250" in text
    report = build_host_report(state)
    assert [one.value for one in report.evaluations] == [0.75, 0.25]
    table = report.markdown().split("## Evaluations")[1]
    assert "| quiz | acc | 0.7500 |" in table and "<img" not in table.replace("\\<", "")
    assert "evaluated quiz acc 0.5" in snapshot(state, 10.0)["log"][-1]["text"]
    forked = apply_all([ChainForked(at=6.0, round=2)], state)
    assert [one.round for one in forked.evaluations] == [1, None], "rounds of another chain are void"


def test_results_are_bounded() -> None:
    many = [ModelEvaluated(at=1.0, results=tuple(result(number) for number in range(200)))] * 10
    state = apply_all([*opening_events(), *many])
    assert len(state.evaluations) == MAX_EVALUATIONS
    assert course_points([result(number) for number in range(500)]).count(",") == MAX_RESULT_POINTS
    assert course_points([result(1), result(1, 2.0)]) == ""
    assert snapshot(apply_all(opening_events()), 1.0)["evaluations"] == []
