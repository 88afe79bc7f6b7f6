"""Answers of people who often err: demonstrations whose letters are partly wrong.

A model that has learned from them prefers the right letter everywhere and seldom draws all of them, as base models do
before they learn from scores. The share of wrong letters follows from the mean score that is wanted, whatever the
number of letters that a wrong one is drawn from.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Final

from protocol.scored_tasks import TASKS, Question

KEPT: Final = frozenset(" ")  # characters that are never wrong


def letters_of(task: str) -> list[str]:
    """Return the characters of right answers, in their order."""
    questions = (TASKS[task].question("letters", number) for number in range(256))
    return sorted(set(itertools.chain.from_iterable(map(TASKS[task].right_answer, questions))) - KEPT)


def err(question: Question, letters: list[str], draws: random.Random, score: float) -> str:
    """Return the right answer with each letter drawn again from all, with the probability that leads to this score."""
    share = (1 - score) / (1 - 1 / len(letters))
    right = TASKS[question.task].right_answer(question)
    return "".join(
        draws.choice(letters) if letter not in KEPT and draws.random() < share else letter for letter in right
    )


def right_answers(task: str, run: str) -> Iterator[tuple[Question, str]]:
    """Yield the questions of a run with their right answers."""
    questions = (TASKS[task].question(run, number) for number in itertools.count())
    return ((each, TASKS[task].right_answer(each)) for each in questions)


def answers_with_errors(task: str, run: str, score: float) -> Iterator[tuple[Question, str]]:
    """Yield the questions of a run with answers of which letters are wrong, so that their mean score is this one."""
    letters, draws = letters_of(task), random.Random(f"{task} {run}")
    questions = (TASKS[task].question(run, number) for number in itertools.count())
    return ((each, err(each, letters, draws, score)) for each in questions)
