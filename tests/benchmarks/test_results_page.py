"""The page of questions shows the figures that are recorded."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks import results_page as page

# Scripts of these record point by point, so the page may be older than the file.
LATE = ("grid.json", "goodput.json")
OFTEN_RECORDED = (*LATE, "rl.json")  # by hand, seed by seed
ROWS = {
    "grid.json": [{"steps": 128, "mbit": 50, "computing": 0.97, "theirs": 0.1155, "date": "2026-11-28"}],
    "goodput.json": {
        "0.3": {
            "share": 0.3,
            "of_living": 0.96,
            "longest_wait": 8.0,
            "models": {"elastic": {"of_all": 0.5}},
            "date": "2026-11-28",
        }
    },
}


def is_late(line: str) -> bool:
    return any(f"<!-- {name} " in line for name in OFTEN_RECORDED)


def test_page_shows_what_is_recorded() -> None:
    shown, made = page.PAGE.read_text().splitlines(), page.make_page().splitlines()
    assert [line for line in shown if not is_late(line)] == [line for line in made if not is_late(line)], (
        "python -m benchmarks.results_page"
    )
    current = {mark for line in made for mark in re.findall(r"<!-- .+ -->", line)}
    for line in filter(is_late, shown):
        mark = re.findall(r"<!-- .+ -->", line)[0]
        assert mark not in current or line in made, "python -m benchmarks.results_page"


def test_question_appears_with_its_file(tmp_path: Path) -> None:
    for question in page.QUESTIONS:
        if Path(question.file).name not in LATE:
            (tmp_path / question.file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(page.ROOT / question.file, tmp_path / question.file)
    before = page.make_page(tmp_path).splitlines()
    for name in LATE:
        (tmp_path / "docs" / "results" / name).write_text(json.dumps(ROWS[name]))
    new = [line for line in page.make_page(tmp_path).splitlines() if line not in before]
    assert len(new) == 2 and "H 128 at 50 Mbit/s 97.0% (11.6%)" in new[0] and "2026-11-28" in new[0]
    assert "30% die in a round: 96.0%" in new[1]


def test_figure_follows_the_file(tmp_path: Path) -> None:
    """Control: the row of another loss is another one."""
    question = next(each for each in page.QUESTIONS if each.answer is page.answer_thousandth)
    data = json.loads((page.ROOT / question.file).read_text())
    before = question.answer(data)
    for run in data["runs"].values():
        if run["name"] == "frugal" and run["setting"] == "scratch":
            run["outcome"]["validation_loss"] *= 1.1
    assert question.answer(data) != before


@pytest.mark.parametrize("question", page.QUESTIONS, ids=lambda question: question.text[:30])
def test_command_of_each_question_is_a_script(question: page.Question) -> None:
    script = question.command.removeprefix("python ").removeprefix("-m ").split()[0]
    named = script.replace(".py", "").replace(".", "/")
    path = page.ROOT / f"{named}.py"
    assert path.exists() or Path(question.file).name in LATE


def test_questions_without_a_record_say_what_is_missing(tmp_path: Path) -> None:
    made = page.make_page(tmp_path)
    assert made.count("| ") and all(f"| {question} | {state} |" in made for question, state in page.OPEN)
    recorded = {question.text for question in page.QUESTIONS}
    assert not recorded & {question for question, _ in page.OPEN}


def test_merge_is_compared_with_the_averager_of_its_own_run() -> None:
    costs = {"cpu_seconds": 3.0, "bytes": 60.0}, {"cpu_seconds": 4.0, "bytes": 40.0}
    found = page.answer_merge({"costs": {"ours_dense": costs[0], "hivemind_8bit": costs[1]}})
    assert found == "strangers: 0.75 of its CPU-seconds, 1.50 of its bytes"


def test_losses_of_the_advice_are_those_that_are_recorded() -> None:
    made = recipes.losses_for_advice(recipes.Ledger(recipes.RESULTS))
    assert json.loads(recipes.ADVICE.read_text()) == made, "python benchmarks/recipes.py --report"


def test_date_is_that_of_the_newest_run_that_is_shown() -> None:
    shown, search = {"setting": "warm", "date": "2026-11-28"}, {"setting": "grid", "date": "2026-11-30"}
    assert page.newest_date({"runs": {"a": shown, "b": search, "c": {"setting": "scratch"}}}) == "2026-11-28"
