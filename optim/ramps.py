"""Options that change over the rounds of a run. Any number of any part may be given as a text instead:

    "0.5 -> 0.9 over 20"              straight from 0.5 in round 0 to 0.9 in round 20, then constant
    "10 => 100 over 40"               by equal factors: H that grows, k that shrinks
    "1 ~> 0.1 over 500"               along half a cosine
    "1 until 50 then 30"              1 before round 50, 30 from it on; what follows may be any of these again,
                                      its rounds counted from 50

The kind of a codec may change in the same way: "none until 50 then sign". A course between two whole numbers, written
as such, of which one is above 1, takes whole values only: 10 -> 100, but not 10.0 -> 100 and not 0 -> 1.
"""

import math
import re
from dataclasses import dataclass

from optim.errors import UnknownOption
from optim.options import Scalar

MAX_LETTERS = 200
WHOLE = r"[-+]?[0-9]{1,15}"
NUMBER = r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?"
ROUNDS = r"[0-9]{1,9}"
_STEP = re.compile(rf"\s*(?P<first>\S+)\s+until\s+(?P<round>{ROUNDS})\s+then\s+(?P<rest>.+)")
_CURVE = re.compile(
    rf"\s*(?P<first>{NUMBER})\s*(?P<curve>->|=>|~>)\s*(?P<last>{NUMBER})\s+over\s+(?P<rounds>{ROUNDS})\s*"
)
_ENDLESS = re.compile(rf"\s*{NUMBER}\s*(->|=>|~>)\s*{NUMBER}\s*")


@dataclass(frozen=True)
class Ramp:
    """`knots`: the rounds at which its course may turn: between two of them it only rises, only falls, or rests."""

    text: str

    def at(self, round_number: int) -> Scalar:
        return _value(self.text, round_number)

    @property
    def words(self) -> set[str]:
        """What stands before and behind each turn."""
        return _words(self.text)

    @property
    def knots(self) -> tuple[int, ...]:
        return _knots(self.text, 0)


def ramp(value: Scalar) -> Ramp | None:
    """None for a plain value. UnknownOption for a text that means to be a ramp and is none."""
    if not isinstance(value, str) or not re.search(r"\suntil\s|\sover\s", value):
        return None
    if len(value) > MAX_LETTERS:
        raise UnknownOption(f"a course of values in {len(value)} letters; write it in {MAX_LETTERS}")
    found = Ramp(value)
    for number in (0, *found.knots):  # nonsense may stand in any piece
        found.at(number)
    if not found.knots:
        raise UnknownOption(f"{value!r} never changes; write the value alone")
    return found


def is_endless(value: object) -> bool:
    """A curve that does not say over how many rounds: no course, but somebody meant one."""
    return isinstance(value, str) and _ENDLESS.fullmatch(value) is not None


def _value(text: str, number: int) -> Scalar:
    if step := _STEP.fullmatch(text):
        turn = int(step["round"])
        return _plain(step["first"]) if number < turn else _value(step["rest"], number - turn)
    if curve := _CURVE.fullmatch(text):
        value = _on_curve(_number(curve["first"]), _number(curve["last"]), _share(curve, number), curve["curve"])
        return round(value) if _is_whole(curve["first"], curve["last"]) else value
    if " " in text.strip():
        raise UnknownOption(f'{text!r} is no course of values; write "A -> B over ROUNDS" or "A until ROUND then B"')
    return _plain(text)


def _share(curve: re.Match[str], number: int) -> float:
    """Of its way, in 0 to 1, that the course has made in that round."""
    return min(1.0, number / max(1, int(curve["rounds"])))


def _on_curve(first: float, last: float, share: float, curve: str) -> float:
    if curve == "=>" and min(first, last) <= 0:
        raise UnknownOption("a course by equal factors (=>) takes numbers above zero")
    if share in (0, 1):
        return last if share else first  # to the bit
    if curve == "=>":
        value = math.exp(math.log(first) + (math.log(last) - math.log(first)) * share)
    else:
        weight = share if curve == "->" else (1 - math.cos(math.pi * share)) / 2
        value = first + (last - first) * weight
    return min(max(value, min(first, last)), max(first, last))  # rounding must not lead beyond an end


def _is_whole(*ends: str) -> bool:
    return all(re.fullmatch(WHOLE, end) for end in ends) and any(abs(int(end)) > 1 for end in ends)


def _knots(text: str, start: int) -> tuple[int, ...]:
    if step := _STEP.fullmatch(text):
        turn = start + int(step["round"])
        return (max(start, turn - 1), turn, *_knots(step["rest"], turn))
    if curve := _CURVE.fullmatch(text):
        return start, start + max(1, int(curve["rounds"]))
    return ()


def _plain(text: str) -> Scalar:
    text = text.strip()
    if re.fullmatch(NUMBER, text):
        return int(text) if re.fullmatch(WHOLE, text) else _number(text)
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise UnknownOption(f"{text!r} is no number") from error
    if not math.isfinite(value):
        raise UnknownOption(f"{text!r} is too great a number")
    return value


def _words(text: str) -> set[str]:
    step = _STEP.fullmatch(text)
    return {step["first"], *_words(step["rest"])} if step else {text.strip()}
