"""Options whose value changes over the rounds of a run.

A manifest gives such an option as a curve, or as a list of phases:

    { start = 0.5, end = 0.9, rounds = 20 }
        Rise linearly from 0.5 in round 0 to 0.9 in round 20, then stay there.
    { start = 10, end = 100, rounds = 40, curve = "exponential" }
        Change by equal factors. Both ends are above zero.
    { start = 1.0, end = 0.1, rounds = 500, curve = "cosine" }
        Follow half a cosine.
    [{ value = 1, rounds = 50 }, { start = 10, end = 60, rounds = 30, curve = "exponential" }]
        Use 1 for 50 rounds, then follow the curve. Each phase counts its rounds from its own beginning.
    [{ value = "none", rounds = 50 }, "sign"]
        Use one codec kind for 50 rounds, then another.

Every phase but the last lasts for its `rounds`. The last phase is a plain value, or a curve that stays at its end.
A curve between two integers of which one is above 1 has integer values only: from 10 to 100, but not from 10.0 to 100
and not from 0 to 1.

A budget of bits for a whole run is spent on contributions where they lower the loss most. A manifest gives the budget
for schedule.inner_steps instead of a number:

    { bits = 8, steps = 500 }       8 bits of contributions per parameter, over 500 local steps

It becomes a linear curve from 1 to H local steps between contributions, with as many contributions as the budget pays
for. Between two contributions that are h steps apart, peers diverge by h times their progress of a step, and the cost
is proportional to its square: h c(t) per step, where c(t) is the squared progress of a step at time t. The cheapest way
to place K contributions in the run has h proportional to 1 / sqrt(c). Progress falls roughly as one over the root of
the number of steps, so h grows with that root, which is a straight line over the rounds.
"""

import bisect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator

from optim.errors import UnknownOption, plain_words
from optim.options import OptionValue, Scalar

MAX_PHASES: Final = 64
MAX_NUMBER: Final = 10**15
MAX_ROUNDS: Final = 10**9 - 1
CURVE_EXAMPLE: Final = '{ start = 10, end = 60, rounds = 30, curve = "exponential" }'
PHASE_EXAMPLE: Final = "{ value = 1, rounds = 50 }"
PHASES_EXAMPLE: Final = f"[{PHASE_EXAMPLE}, 30]"
# The text forms that options had before they became tables.
_OLD_TEXT: Final = re.compile(r"[-=~]>|\s(until|over)\s")
OPTION: Final = "schedule.inner_steps"
EXAMPLE: Final = "{ bits = 8, steps = 500 }"


def _check_number(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
        raise ValueError("must be a number of at most 1e15")
    return value


def _check_scalar(value: object) -> Scalar:
    if not isinstance(value, bool | int | float | str):
        raise ValueError("must be a plain value")
    return value


Number = Annotated[int | float, PlainValidator(_check_number)]
Rounds = Annotated[int, Field(ge=1, le=MAX_ROUNDS)]


class TableModel(BaseModel):
    """Base of the tables that an option may be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Constant(TableModel):
    """A phase in which the value does not change. `rounds`: how long it lasts; None means to the end of the run."""

    value: Annotated[Scalar, PlainValidator(_check_scalar)]
    rounds: Rounds | None = None

    def at_round(self, _round_number: int) -> Scalar:
        return self.value


class Curve(TableModel):
    """A curve from `start` to `end` in `rounds` rounds."""

    start: Number
    end: Number
    rounds: Rounds
    curve: Literal["linear", "exponential", "cosine"] = "linear"

    @model_validator(mode="after")
    def _exponential_ends_are_positive(self) -> "Curve":
        if self.curve == "exponential" and min(self.start, self.end) <= 0:
            raise ValueError("an exponential curve takes numbers above zero")
        return self

    def at_round(self, round_number: int) -> int | float:
        """Return the value in a round, counted from the beginning of the curve."""
        progress = min(1.0, round_number / self.rounds)
        value = self._value_after(progress)
        return round(value) if self._is_whole else value

    def _value_after(self, progress: float) -> float:
        start, end = float(self.start), float(self.end)
        if progress in (0, 1):
            return end if progress else start  # exact to the bit
        if self.curve == "exponential":
            value = math.exp(math.log(start) + (math.log(end) - math.log(start)) * progress)
        else:
            weight = progress if self.curve == "linear" else (1 - math.cos(math.pi * progress)) / 2
            value = start + (end - start) * weight
        return min(max(value, min(start, end)), max(start, end))  # rounding must not lead beyond an end

    @property
    def _is_whole(self) -> bool:
        ends = (self.start, self.end)
        return all(isinstance(end, int) for end in ends) and any(abs(end) > 1 for end in ends)


@dataclass(frozen=True)
class OptionSchedule:
    """The values of an option over the rounds. `earlier`: the phases before the last one, each with its `rounds`."""

    earlier: tuple[Constant | Curve, ...]
    last: Constant | Curve

    def at_round(self, round_number: int) -> Scalar:
        """Return the value in a round."""
        for phase in self.earlier:
            if round_number < _round_count(phase):
                return phase.at_round(round_number)
            round_number -= _round_count(phase)
        return self.last.at_round(round_number)

    @property
    def constants(self) -> set[Scalar]:
        """Return the values of the phases that do not change."""
        return {phase.value for phase in (*self.earlier, self.last) if isinstance(phase, Constant)}

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Return ascending rounds; between two of them the value only rises, only falls, or stays."""
        found, begin = [], 0
        for phase in self.earlier:
            end = begin + _round_count(phase)
            found += [begin, end - 1, end] if isinstance(phase, Curve) else [end - 1, end]
            begin = end
        if isinstance(self.last, Curve):
            found += [begin, begin + self.last.rounds]
        return tuple(dict.fromkeys(found))


def read_option(name: str, value: OptionValue) -> Scalar | OptionSchedule:
    """Read an option's plain value, curve, or list of phases.

    `name` is the option in errors, such as "codec.k".

    Raises:
        UnknownOption: one line that names the option and the key, and shows a table to write instead.
    """
    if isinstance(value, str):
        _refuse_old_text(name, value)
        return value
    if isinstance(value, Mapping):
        return OptionSchedule((), _read_last(name, value))
    return _read_phases(name, value) if isinstance(value, Sequence) else value


def _refuse_old_text(name: str, text: str) -> None:
    if _OLD_TEXT.search(text):
        example = PHASES_EXAMPLE if " until " in text else CURVE_EXAMPLE
        raise UnknownOption(f"{name} = {text!r}: a value that changes over the rounds is a table; write {example}")


def _read_phases(name: str, phases: Sequence[Scalar | Mapping[str, Scalar]]) -> OptionSchedule:
    if not 2 <= len(phases) <= MAX_PHASES:
        raise UnknownOption(f"{name}: a list has 2 to {MAX_PHASES} phases; write {PHASES_EXAMPLE}, or a single value")
    names = [f"{name}, phase {number}" for number in range(1, len(phases) + 1)]
    earlier = tuple(map(_read_earlier, names[:-1], phases[:-1]))
    return OptionSchedule(earlier, _read_last(names[-1], phases[-1]))


def _read_earlier(name: str, phase: Scalar | Mapping[str, Scalar]) -> Constant | Curve:
    if not isinstance(phase, Mapping):
        shown = as_toml({"value": phase, "rounds": 50}) if isinstance(phase, Scalar) else PHASE_EXAMPLE
        raise UnknownOption(f"{name} = {phase!r}: rounds is missing; write {shown}")
    if "value" not in phase:
        return read_table(Curve, name, phase, CURVE_EXAMPLE)
    constant = read_table(Constant, name, phase, PHASE_EXAMPLE)
    if constant.rounds is None:
        raise UnknownOption(f"{name}: rounds is missing; write {as_toml({**phase, 'rounds': 50})}")
    return constant


def _read_last(name: str, phase: Scalar | Mapping[str, Scalar]) -> Constant | Curve:
    if not isinstance(phase, Mapping):
        return read_table(Constant, name, {"value": phase}, PHASES_EXAMPLE)
    if "value" in phase:
        raise UnknownOption(f"{name}: a value that stays needs no table; write {phase['value']!r} alone")
    return read_table(Curve, name, phase, CURVE_EXAMPLE)


def _round_count(phase: Constant | Curve) -> int:
    return phase.rounds or 0


Read = TypeVar("Read", bound=TableModel)


def read_table(kind: type[Read], name: str, table: Mapping[str, Scalar], example: str) -> Read:
    """Read a table of an option.

    Raises:
        UnknownOption: one line that ends with the example.
    """
    try:
        return kind.model_validate(dict(table))
    except ValidationError as error:
        raise UnknownOption(f"{_describe_fault(name, error)}; write {example}") from error


def _describe_fault(name: str, error: ValidationError) -> str:
    """Describe one fault; an unknown key first, because a missing key may be the same one misspelt."""
    faults = error.errors(include_url=False)
    fault = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = str(fault["loc"][0]) if fault["loc"] else ""
    if fault["type"] == "extra_forbidden":
        return f"{name}: unknown key {key!r}"
    if fault["type"] == "missing":
        return f"{name}: {key} is missing"
    message = plain_words(fault["msg"])
    return f"{name}: {key} = {fault['input']!r} {message}" if key else f"{name}: {message}"


def as_toml(value: OptionValue) -> str:
    """Return the value as TOML on one line, as a manifest may have it."""
    if isinstance(value, bool | str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {as_toml(one)}" for key, one in value.items()) + " }"
    return "[" + ", ".join(map(as_toml, value)) + "]"


class BitBudget(TableModel):
    """`bits` per parameter for a whole run of `steps` local steps."""

    bits: Annotated[Number, Field(gt=0)]
    steps: int = Field(ge=1, le=MAX_ROUNDS)

    def inner_steps(self, bits_of_message: float, fragments: int = 1) -> int | OptionSchedule:
        """Return the local steps between contributions.

        Args:
            bits_of_message: the bits per parameter of one contribution of every fragment together.
            fragments: the number of contributions that carry all values.

        Raises:
            UnknownOption: the budget does not pay for one contribution of every fragment.
        """
        affordable = math.floor(self.bits / bits_of_message)
        if affordable < 1:
            raise UnknownOption(
                f"{OPTION}: a contribution takes {bits_of_message:.3g} bits per parameter, and the budget is "
                f"{self.bits:g}; raise it or choose a smaller codec"
            )
        if affordable == 1 or self.steps <= affordable * fragments:
            return max(fragments, -(-self.steps // affordable))
        last = _last(fragments, affordable, self.steps)
        if last <= fragments:
            return last
        return OptionSchedule((), Curve(start=fragments, end=last, rounds=(affordable - 1) * fragments))


def _last(first: int, count: int, total: int) -> int:
    """Return the smallest end of a linear curve of `count` integers whose sum reaches the total."""

    def total_steps(last: int) -> int:
        return int(np.rint(np.linspace(first, last, count)).sum())

    return bisect.bisect_left(range(total), total, lo=first, key=total_steps)


def read_bit_budget(value: OptionValue) -> BitBudget | None:
    """Read the bit budget of schedule.inner_steps; return None for any other value.

    Raises:
        UnknownOption: the table has unknown keys or values out of range.
    """
    if isinstance(value, str) and "bits over" in value:
        raise UnknownOption(f"{OPTION} = {value!r}: a bit budget is a table; write {EXAMPLE}")
    if isinstance(value, Mapping) and value.keys() & BitBudget.model_fields.keys():
        return read_table(BitBudget, OPTION, value, EXAMPLE)
    return None
