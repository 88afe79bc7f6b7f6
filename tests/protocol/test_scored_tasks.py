"""Scored tasks: questions by seed, and scores that no answer can stretch or execute."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.scored_tasks import MAX_ANSWER, NEARLY, TASKS, Question, evaluate, last_line

every_task = pytest.mark.parametrize("name", TASKS)


def solve(question: Question) -> str:
    """Answer a question of any task but countdown."""
    return (" " if question.task == "sort" else "").join(question.solution)


@every_task
def test_questions_follow_from_run_and_number(name: str) -> None:
    first = [TASKS[name].question("run", number) for number in range(50)]
    assert first == [TASKS[name].question("run", number) for number in range(50)]
    assert first != [TASKS[name].question("other run", number) for number in range(50)]
    assert len({question.prompt for question in first}) > 30


def test_questions_are_equal_on_all_machines() -> None:
    assert [TASKS[name].question("run", 0).prompt for name in TASKS] == GOLDEN


GOLDEN = ["reverse inqa\n", "sort 43 47 12\n", "93 - 41 =\n", "make 15 of 14 6 5\n", "close {(([([<\n"]


@pytest.mark.parametrize("name", ["reverse", "sort", "arithmetic", "brackets"])
def test_solution_scores_one_and_another_less(name: str) -> None:
    task = TASKS[name]
    for number in range(20):
        question = task.question("run", number)
        assert task.score(question, solve(question)) == 1.0
        assert task.score(question, f"I think...\n  {solve(question)} \n\n") == 1.0, "the last line counts"
        for wrong in (solve(question) + "1", "", "zzz", solve(task.question("run", number + 100)) + " x"):
            assert task.score(question, wrong) < 1.0


def test_parts_in_place_count() -> None:
    question = Question("reverse", "reverse abcd\n", ("dcba",))
    assert TASKS["reverse"].score(question, "dcxx") == 0.5
    assert TASKS["reverse"].score(question, "dcbadcba") == 0.5, "more letters are not more right"


def test_countdown_wants_each_number_once_and_the_value() -> None:
    task, question = TASKS["countdown"], Question("countdown", "make 24 of 2 4 3\n", ("24", "2", "4", "3"))
    assert task.score(question, "2*4*3") == 1.0
    assert task.score(question, "(2 * 4) * 3") == 1.0
    assert task.score(question, "2 + 4 + 3") == NEARLY
    for wrong in ("24", "2*4*3*1", "2*4*3+4-4", "4*3*2 = 24", "8*3", "2*4/0*3", "2*4*(3"):
        assert task.score(question, wrong) == 0.0


def test_countdown_questions_have_an_answer() -> None:
    """Search all expressions of three numbers."""
    for number in range(20):
        question = TASKS["countdown"].question("run", number)
        target, first, second, third = question.solution
        signs = "+-*"
        texts = (
            form.format(a=a, b=b, c=c, s=s, t=t)
            for a, b, c in ((first, second, third), (second, first, third))
            for s in signs
            for t in signs
            for form in ("({a}{s}{b}){t}{c}", "{c}{t}({a}{s}{b})")
        )
        assert any(TASKS["countdown"].score(question, text) == 1.0 for text in texts), question


HOSTILE: dict[str, Callable[[], str]] = {
    "code": lambda: "__import__('os').system('touch hacked')",
    "attribute": lambda: "(1).__class__",
    "call": lambda: "open('hacked','w')",
    "deep": lambda: "(" * 90 + "1" + ")" * 90,
    "deeper": lambda: "(" * 500_000 + "1" + ")" * 500_000,
    "signs": lambda: "-" * 190 + "1",
    "power": lambda: "9**9**9**9",
    "spaced power": lambda: "9* *9",
    "huge number": lambda: "9" * 190,
    "huger number": lambda: "9" * 1_000_000,
    "long product": lambda: "*".join(["999999999"] * 20),
    "long quotient": lambda: "/".join(["999999999"] * 20),
    "zero": lambda: "1/0",
    "unicode digits": lambda: "٣*٤*٢",
    "superscript": lambda: "2²",
    "full width": lambda: "２*４*３",
    "underscore": lambda: "1_0*2",
    "complex": lambda: "2j*3",
    "float": lambda: "24.0",
    "nan": lambda: "nan",
    "null": lambda: "2*4*3\0",
    "surrogate": lambda: "\ud800",
    "lines": lambda: "\n" * 1_000_000,
    "spaces": lambda: " " * 1_000_000,
    "megabyte": lambda: "2*4*3 " * 170_000,
    "megabyte of words": lambda: "a b " * 250_000,
    "megabyte before an answer": lambda: "x" * 1_000_000 + "\n2*4*3 if 1 else 2",
}


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_score_nothing_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = HOSTILE[answer]()
    questions = {"countdown": Question("countdown", "", ("24", "2", "4", "3"))}
    for name, task in TASKS.items():
        question, start = questions.get(name) or task.question("run", 0), time.process_time()
        assert task.score(question, text) < 0.5
        assert time.process_time() - start < 0.2
    assert not os.listdir(tmp_path)


def test_expressions_are_exact() -> None:
    found = evaluate("1/3*3 - 2*(4-1)")
    assert found is not None and found[0] == -5 and found[1] == [1, 3, 3, 2, 4, 1]
    assert evaluate("+".join(["1"] * 19)) is not None
    assert evaluate("+".join(["1"] * 60)) is None, "deeper than any answer needs to be"


def test_last_line_is_cut() -> None:
    assert last_line("a\n b \n\n") == "b" and last_line("") == last_line(" \n ") == ""
    assert len(last_line("x" * 10_000)) == MAX_ANSWER + 1
