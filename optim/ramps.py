"""Options that change over the rounds of a run. Any number of any part may be given as a text instead:

    "0.5 -> 0.9 over 20"              straight from 0.5 in round 0 to 0.9 in round 20, then constant
    "10 => 100 over 40"               by equal factors: H that grows, k that shrinks
    "1 ~> 0.1 over 500"               along half a cosine
    "1 until 50 then 30"              1 before round 50, 30 from it on; what follows may be any of these again,
                                      its rounds counted from 50

The kind of a codec may change in the same way: "none until 50 then sign".
"""

import math
import re
from dataclasses import dataclass

from optim.errors import UnknownOption
from optim.parts import Scalar

NUMBER = r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
_STEP = re.compile(r"\s*(?P<first>\S+)\s+until\s+(?P<round>\d+)\s+then\s+(?P<rest>.+)")
_CURVE = re.compile(rf"\s*(?P<first>{NUMBER})\s*(?P<curve>->|=>|~>)\s*(?P<last>{NUMBER})\s+over\s+(?P<rounds>\d+)\s*")


@dataclass(frozen=True)
class Ramp:
    """`knots`: the rounds at which its course may turn: between two of them it only rises, only falls, or rests."""

    text: str

    def at(self, round_number: int) -> Scalar:
        return _value(self.text, round_number)

    @property
    def knots(self) -> tuple[int, ...]:
        return _knots(self.text, 0)


def ramp(value: Scalar) -> Ramp | None:
    """None for a plain value. UnknownOption for a text that means to be a ramp and is none."""
    if not isinstance(value, str) or not re.search(r"\suntil\s|\sover\s", value):
        return None
    found = Ramp(value)
    found.at(0)
    if not found.knots:
        raise UnknownOption(f"{value!r} never changes; write the value alone")
    return found


def _value(text: str, number: int) -> Scalar:
    if step := _STEP.fullmatch(text):
        turn = int(step["round"])
        return _plain(step["first"]) if number < turn else _value(step["rest"], number - turn)
    if curve := _CURVE.fullmatch(text):
        return _on_curve(_number(curve["first"]), _number(curve["last"]), int(curve["rounds"]), curve["curve"], number)
    if " " in text.strip():
        raise UnknownOption(f'{text!r} is no course of values; write "A -> B over ROUNDS" or "A until ROUND then B"')
    return _plain(text)


def _on_curve(first: float, last: float, rounds: int, curve: str, number: int) -> Scalar:
    share = min(1.0, number / max(1, rounds))
    if curve == "=>":
        if first <= 0 or last <= 0:
            raise UnknownOption("a course by equal factors (=>) takes numbers above zero")
        value = math.exp(math.log(first) + (math.log(last) - math.log(first)) * share)
    else:
        weight = share if curve == "->" else (1 - math.cos(math.pi * share)) / 2
        value = first + (last - first) * weight
    whole = float(first).is_integer() and float(last).is_integer() and (abs(first) > 1 or abs(last) > 1)
    return round(value) if whole else value


def _knots(text: str, start: int) -> tuple[int, ...]:
    if step := _STEP.fullmatch(text):
        turn = start + int(step["round"])
        return (max(start, turn - 1), turn, *_knots(step["rest"], turn))
    if curve := _CURVE.fullmatch(text):
        return start, start + int(curve["rounds"])
    return ()


def _plain(text: str) -> Scalar:
    text = text.strip()
    if re.fullmatch(NUMBER, text):
        return int(text) if re.fullmatch(r"[-+]?\d+", text) else _number(text)
    return text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise UnknownOption(f"{text!r} is no number") from error
