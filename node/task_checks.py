"""Check the promises of a task of one's own, also against answers that are out of the ordinary."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from node.own_modules import VARIABLE, ModuleSource
from node.own_tasks import TaskScorer, declaration_fault
from protocol.errors import MurmurError
from protocol.scored_tasks import TASKS, Question, ScoredTask

QUESTIONS: Final = 32
QUESTION_SECONDS: Final = 0.1  # of the CPU, on average
HOSTILE: Final = {
    "an empty answer": "",
    "a megabyte": "x" * 1_000_000,
    "a megabyte of lines": "\n" * 1_000_000,
    "deep brackets": "(" * 95 + "1" + ")" * 95,
    "deeper brackets": "(" * 100_000 + ")" * 100_000,
    "code": "__import__('os').getcwd()",
    "a sum": "1+1",
    "a long power": "9**9**9**9",
    "many digits": "9" * 190,
    "a pattern's worst case": "a" * 40 + "!",
    "nan": "nan",
    "inf": "-inf",
    "other scripts": "\u0663*\u0664 \u202e2\u00b2 \U0001f600",
    "a surrogate": "\ud800",
    "NUL": "1\0002",
    "spaces": " " * 1000,
}


def check_task(task: ScoredTask | type[ScoredTask], context: int | None = None) -> list[str]:
    """Return a line for each promise that a task breaks; an empty list if there is none.

    Args:
        context: of the model; questions and right answers must fit into it as bytes.
    """
    kind = task if isinstance(task, type) else type(task)
    if fault := declaration_fault(kind):
        return [fault]
    if kind.name in TASKS:
        return [f"there is a task {kind.name!r} already; rename yours"]
    checked = kind()
    try:
        questions = _read_questions(checked)
    except Exception as error:
        return [f"question: raises {type(error).__name__}: {' '.join(str(error).split())}"]
    try:
        with closing(_scorer_of(checked)) as scorer:
            faults = [
                *_question_faults(checked, questions, scorer, context),
                *_score_faults(checked, questions, scorer),
            ]
    except MurmurError as error:
        return [str(error)]
    return list(dict.fromkeys(faults))


def _read_questions(task: ScoredTask) -> list[Question]:
    return [task.question("check", number) for number in range(QUESTIONS)]


def _scorer_of(task: ScoredTask) -> TaskScorer:
    """Return a process that imports the module of the task, also one that no user has allowed yet."""
    name = type(task).__module__
    path = Path(sys.modules[name].__file__ or "").resolve()
    source = ModuleSource(name, path)
    if "." in name or path.name == "__init__.py":  # of a package, which is installed
        source = ModuleSource(name, path.parent if path.name == "__init__.py" else path)
    word = str(path) if path.stem == name else name
    allowed = os.pathsep.join(filter(None, (word, os.environ.get(VARIABLE, ""))))
    return TaskScorer(source.line, task.name, {VARIABLE: allowed, "PYTHONHASHSEED": "12345"})


def _question_faults(
    task: ScoredTask, questions: list[Question], scorer: TaskScorer, context: int | None
) -> Iterator[str]:
    began = time.process_time()
    is_same = _read_questions(task) == questions
    if time.process_time() - began > QUESTION_SECONDS * QUESTIONS:
        yield f"question: takes more than {QUESTION_SECONDS:g} s"
    if not is_same or [scorer.question("check", number) for number in range(QUESTIONS)] != questions:
        yield "question: differs from time to time or from process to process; use only the draws that `make` gets"
    if len({each.prompt for each in questions}) == 1:
        yield "question: all are equal"
    if any(not each.prompt.strip() or not all(isinstance(word, str) for word in each.solution) for each in questions):
        yield "question: the prompt is empty, or a word of the solution has another type than text"
    if context is not None:
        longest = max(len(f"{each.prompt}{task.right_answer(each)}\n".encode()) for each in questions)
        if longest > context:
            yield f"question: with its right answer it has {longest} bytes, above the context of {context}"


def _score_faults(task: ScoredTask, questions: list[Question], scorer: TaskScorer) -> Iterator[str]:
    found = list[float]()
    for question in questions[:8]:
        right, fault = scorer.score(question, task.right_answer(question))
        if fault:
            yield f"score: {fault}"
            return
        if right != 1.0:
            yield f"score: a right answer has {right:g}, not 1; write `right_answer`"
    for name, text in HOSTILE.items():
        for _ in range(2):
            score, fault = scorer.score(questions[0], text)
            found.append(score)
            if fault:
                yield f"score: of {name}: {fault}"
                break
    if min(found) == 1.0:
        yield "score: every answer has 1"
    if any(one != other for one, other in zip(found[::2], found[1::2], strict=False)) and len(found) == 2 * len(
        HOSTILE
    ):
        yield "score: differs from time to time"
