"""Tasks whose answers pure functions score, for reinforcement learning.

A task makes a question of a seed, equal on all machines, and scores an answer from 0 to 1. Trainers score answers of
strangers, so nothing that a model wrote is executed: expressions are parsed by `ast`, and exact fractions compute them.
An answer is the last line of a text, of at most `MAX_ANSWER` characters, and every score takes
bounded time, whatever the text is.

    reverse       the letters of a word in reverse order; the score is the share of letters in their places
    brackets      the brackets that close those of a line; the score is the share of brackets in their places
    sort          numbers in ascending order; the score is the share of numbers in their places
    arithmetic    a sum, a difference or a product of two numbers; 1 or 0
    countdown     an expression that makes a target of given numbers, each used once; 1, or 0.1 if the value differs
"""

import ast
import hashlib
import inspect
import itertools
import re
import string
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType, ModuleType
from typing import ClassVar, Final

MAX_ANSWER: Final = 200  # characters; a longer answer is wrong
MAX_DEPTH: Final = 20  # of an expression
MAX_DIGITS: Final = 9  # of a number
NUMBER: Final = re.compile(r"-?[0-9]{1,9}")
EXPRESSION: Final = re.compile(r"[0-9+\-*/() ]+")
NEARLY: Final = 0.1  # for a well-formed expression with another value


class Draws:
    """Numbers that follow from a text, on every machine and in every version of Python."""

    def __init__(self, text: str) -> None:
        self._text, self._count = text, 0

    def between(self, least: int, most: int) -> int:
        """Draw one of the numbers from `least` to `most`; a bias below 2^-50 does not matter."""
        self._count += 1
        digest = hashlib.sha256(f"{self._text}\0{self._count}".encode()).digest()
        return least + int.from_bytes(digest[:8], "big") % (most - least + 1)


@dataclass(frozen=True)
class Question:
    """A question, and the words that decide whether an answer is right."""

    task: str
    prompt: str
    solution: tuple[str, ...]


class ScoredTask(ABC):
    """A kind of question. `version` changes with every change of its questions or scores.

    A task of one's own may replace `score` too, to see the whole text; `node.own_tasks` computes it in a process apart.
    """

    name: str
    version: int = 1

    def question(self, run: str, number: int) -> Question:
        """Make the question number `number` of a run."""
        words = f"murmur task {self.name} {self.version}\0{run}\0{number}"
        return self.make(Draws(words))

    @abstractmethod
    def make(self, draws: Draws) -> Question:
        """Make a question from draws."""

    def score(self, question: Question, text: str) -> float:
        """Score the last line of a text, from 0 to 1."""
        answer = last_line(text)
        return self.score_answer(question, answer) if answer and len(answer) <= MAX_ANSWER else 0.0

    def right_answer(self, question: Question) -> str:
        """Return an answer with the score 1."""
        return "".join(question.solution)

    @abstractmethod
    def score_answer(self, question: Question, answer: str) -> float:
        """Score an answer of at most `MAX_ANSWER` characters."""


def last_line(text: str) -> str:
    """Find the last line that is not empty; of one that is longer than an answer only the end is left."""
    text = text.rstrip()
    start = max(text.rfind("\n") + 1, len(text) - MAX_ANSWER - 1)
    return text[start:].strip()


class Reverse(ScoredTask):
    """Write a word backwards."""

    name = "reverse"

    def make(self, draws: Draws) -> Question:
        word = "".join(string.ascii_lowercase[draws.between(0, 25)] for _ in range(draws.between(4, 6)))
        return Question(self.name, f"reverse {word}\n", (word[::-1],))

    def score_answer(self, question: Question, answer: str) -> float:
        return share_in_place(tuple(question.solution[0]), tuple(answer))


class Brackets(ScoredTask):
    """Close open brackets, the last one first."""

    name = "brackets"
    pairs: ClassVar[Mapping[str, str]] = MappingProxyType({"(": ")", "[": "]", "{": "}", "<": ">"})

    def make(self, draws: Draws) -> Question:
        opened = "".join("([{<"[draws.between(0, 3)] for _ in range(draws.between(5, 8)))
        closed = "".join(self.pairs[each] for each in reversed(opened))
        return Question(self.name, f"close {opened}\n", (closed,))

    def score_answer(self, question: Question, answer: str) -> float:
        return share_in_place(tuple(question.solution[0]), tuple(answer))


class Sort(ScoredTask):
    """Write numbers in ascending order."""

    name = "sort"

    def make(self, draws: Draws) -> Question:
        numbers = [draws.between(0, 99) for _ in range(draws.between(3, 5))]
        return Question(self.name, f"sort {' '.join(map(str, numbers))}\n", tuple(map(str, sorted(numbers))))

    def right_answer(self, question: Question) -> str:
        return " ".join(question.solution)

    def score_answer(self, question: Question, answer: str) -> float:
        return share_in_place(question.solution, tuple(answer.split(" ")))


class Arithmetic(ScoredTask):
    """Compute a sum, a difference or a product."""

    name = "arithmetic"

    def make(self, draws: Draws) -> Question:
        sign = "+-*"[draws.between(0, 2)]
        largest = 12 if sign == "*" else 99
        first, second = draws.between(0, largest), draws.between(0, largest)
        value = {"+": first + second, "-": first - second, "*": first * second}[sign]
        return Question(self.name, f"{first} {sign} {second} =\n", (str(value),))

    def score_answer(self, question: Question, answer: str) -> float:
        return float(NUMBER.fullmatch(answer) is not None and int(answer) == int(question.solution[0]))


class Countdown(ScoredTask):
    """Make a number of others by the four operations."""

    name = "countdown"

    def make(self, draws: Draws) -> Question:
        numbers = [draws.between(1, 20) for _ in range(3)]
        target = numbers[0]
        for number in numbers[1:]:
            target = (target + number, abs(target - number), target * number)[draws.between(0, 2)]
        return Question(
            self.name, f"make {target} of {' '.join(map(str, numbers))}\n", (str(target), *map(str, numbers))
        )

    def right_answer(self, question: Question) -> str:
        for numbers in itertools.permutations(question.solution[1:]):
            for signs in itertools.product("+-*", repeat=2):
                first, second, third = numbers
                for text in (
                    f"({first} {signs[0]} {second}) {signs[1]} {third}",
                    f"{third} {signs[1]} ({first} {signs[0]} {second})",
                ):
                    if self.score_answer(question, text) == 1.0:
                        return text
        raise ValueError("a question without an answer")

    def score_answer(self, question: Question, answer: str) -> float:
        found = evaluate(answer)
        if found is None:
            return 0.0
        value, used = found
        if Counter(used) != Counter(map(int, question.solution[1:])):
            return 0.0
        return 1.0 if value == int(question.solution[0]) else NEARLY


def share_in_place(expected: tuple[str, ...], given: tuple[str, ...]) -> float:
    """Compute the share of parts that are where they belong; a longer answer has a smaller share."""
    right = sum(one == other for one, other in zip(expected, given, strict=False))
    return right / max(len(expected), len(given))


def evaluate(text: str) -> tuple[Fraction, list[int]] | None:
    """Compute an expression of whole numbers and + - * / ( ); returns its value and its numbers, None if it is none."""
    if not EXPRESSION.fullmatch(text) or "**" in text or "//" in text or len(text) > MAX_ANSWER:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
        used = list[int]()
        return _value(tree.body, used, MAX_DEPTH), used
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, OverflowError):
        return None


def _value(node: ast.expr, used: list[int], depth: int) -> Fraction:
    match node:
        case ast.Constant(value=int(value)) if depth and abs(value) < 10**MAX_DIGITS:
            used.append(value)
            return Fraction(value)
        case ast.BinOp(left=left, op=sign, right=right) if depth:
            first, second = _value(left, used, depth - 1), _value(right, used, depth - 1)
            return _apply(sign, first, second)
        case _:
            raise ValueError("not an expression of the four operations")


def _apply(sign: ast.operator, first: Fraction, second: Fraction) -> Fraction:
    match sign:
        case ast.Add():
            return first + second
        case ast.Sub():
            return first - second
        case ast.Mult():
            return first * second
        case ast.Div():
            return first / second
        case _:
            raise ValueError("another operation")


ALL: Final[tuple[ScoredTask, ...]] = (Reverse(), Sort(), Arithmetic(), Countdown(), Brackets())
TASKS: Final[dict[str, ScoredTask]] = {task.name: task for task in ALL}


def tasks_in(module: ModuleType) -> Iterator[type[ScoredTask]]:
    """Yield each complete task with a name that a module defines."""
    for value in vars(module).values():
        if not inspect.isclass(value) or not issubclass(value, ScoredTask) or inspect.isabstract(value):
            continue
        if value.__module__ == module.__name__ and "name" in vars(value):
            yield value
