"""Faults that a test injects into a real node, by the environment variable MURMUR_FAULTS.

    MURMUR_FAULTS="kill=trainer:added:3,slow=4" murmur join test.toml

The variable is refused unless the run is named `test`. A part is `name=value`; several are separated by commas:

- `kill=VICTIM:POINT:N`: SIGKILL at the N-th computation that reaches a point. VICTIM is `trainer` (only its first
  process) or `node` (the daemon, and with it its trainer); POINT is `forward`, `backward` (before the gradient is
  added), `added` (before the daemon learns of it), or, for a node, `told` (after the owner has learned the outcome).
- `answers=drop:N`, `answers=late:N`: each N-th answer to a task of this node's is lost, or comes after its deadline.
- `outcomes=drop:N`: each N-th outcome of this node's work is not told.
- `tasks=copy:N`: of each N-th task of this node's a copy is sent once more, after its microbatch has ended.
- `slow=FACTOR`: the trainer takes FACTOR times as long.
- `adds=always`: the trainer adds the gradient of every backward pass of an exact step, also of one that is made again
  because it counts already, as a server without a ledger does.
- `wrong=WHAT:N`: the N-th one is wrong. WHAT is `task size`, `task stage`, `task input` (one is missing), `token` (an
  id that the vocabulary does not have), `result size`, `result stage`, `nan` or `inf` (in a result).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from protocol.errors import UsageError
from protocol.fault_words import describe_faults

VARIABLE = "MURMUR_FAULTS"
TEST_RUN = "test"

Victim = Literal["trainer", "node"]
Point = Literal["forward", "backward", "added", "told"]
Wrong = Literal["task size", "task stage", "task input", "token", "result size", "result stage", "nan", "inf"]

# The fields that the words of a part fill, by the part's name and its first word ("": the first word is of any kind).
_FIELDS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("kill", ""): ("victim", "point", "killed_at"),
    ("answers", "drop"): ("dropped_answers",),
    ("answers", "late"): ("late_answers",),
    ("outcomes", "drop"): ("dropped_outcomes",),
    ("tasks", "copy"): ("copied_tasks",),
    ("slow", ""): ("slow",),
    ("adds", ""): ("adds",),
    ("wrong", ""): ("wrong", "wrong_at"),
}


class Faults(BaseModel):
    """All faults of a node. Numbers count the computations or calls that reach a place; 0 means never."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    victim: Victim | None = None
    point: Point | None = None
    killed_at: PositiveInt = 1
    dropped_answers: NonNegativeInt = 0
    late_answers: NonNegativeInt = 0
    dropped_outcomes: NonNegativeInt = 0
    copied_tasks: NonNegativeInt = 0
    adds: Literal["always"] | None = None
    slow: float = Field(default=1.0, ge=1, le=1000)
    wrong: Wrong | None = None
    wrong_at: PositiveInt = 1

    @model_validator(mode="after")
    def _check_victim(self) -> "Faults":
        if self.victim == "trainer" and self.point == "told":
            raise ValueError("a trainer tells no owner; write kill=node:told")
        return self


@dataclass
class PlaceCounter:
    """Counts how often places of the code were reached."""

    counts: dict[str, int] = field(default_factory=dict)

    def is_nth(self, place: str, number: int) -> bool:
        """Count a place; return whether it was reached for exactly the `number`-th time."""
        return self._count(place) == number

    def is_each(self, place: str, number: int) -> bool:
        """Count a place; return whether this is one of each `number` times. 0 means never."""
        return number > 0 and self._count(place) % number == 0

    def _count(self, place: str) -> int:
        self.counts[place] = self.counts.get(place, 0) + 1
        return self.counts[place]


def injected_faults(environment: Mapping[str, str], run_name: str) -> Faults | None:
    """Return the faults that the environment asks for; None usually. Raises UsageError."""
    text = environment.get(VARIABLE)
    if text is None:
        return None
    if run_name != TEST_RUN:
        raise UsageError(f'{VARIABLE} is for runs named "{TEST_RUN}", not "{run_name}"; unset it')
    return parse_faults(text)


def parse_faults(text: str) -> Faults:
    """Parse the value of the variable. Raises UsageError."""
    values: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        values |= _read_part(name, value.split(":"))
    try:
        return Faults.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{VARIABLE}: {describe_faults(error)}") from error


def _read_part(name: str, words: list[str]) -> dict[str, str]:
    fields = _FIELDS.get((name, ""))
    if fields is None:
        fields, words = _FIELDS.get((name, words[0]), ()), words[1:]
    if not fields or len(words) != len(fields):
        known = ", ".join(sorted({name for name, _ in _FIELDS}))
        raise UsageError(
            f"{VARIABLE}: {name!r} is not one of {known}, or has other words than node.injected_faults says"
        )
    return dict(zip(fields, words, strict=True))
