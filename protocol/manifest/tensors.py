"""The tensors of a model of the organiser's own: a line of text for each, with name, shape and first values.

    features.0.weight 16x3x3x3 normal 0.1
    features.0.bias 16 zeros
    scale scalar ones

No code travels with a run. A model that starts from weights (`model.from`) needs no first values.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, Field

CUSTOM_KIND: Final = "custom"
MAX_TENSORS: Final = 1026  # as many as another model may have blocks
MAX_DIMENSIONS: Final = 8
MAX_ELEMENTS: Final = 2**40
SCALAR: Final = "scalar"
LINE: Final = re.compile(
    r"(?P<name>[!-~]{1,200}) (?P<shape>scalar|[1-9]\d{0,11}(x[1-9]\d{0,11}){0,7})"
    r"( (?P<first>zeros|ones|normal (?P<deviation>\d{1,6}(\.\d{1,12})?(e-?\d{1,2})?)))?",
    re.ASCII,
)
ADVICE: Final = "write NAME SHAPE and zeros, ones or normal DEVIATION, such as 'layer.weight 64x32 normal 0.02'"


@dataclass(frozen=True)
class TensorLine:
    """A parameter: its name, its shape, and mean and standard deviation of its first values if the line has any."""

    name: str
    shape: tuple[int, ...]
    first: tuple[float, float] | None


def parse_tensor(text: str) -> TensorLine:
    """Parse a line. Raises ValueError, which says what to write."""
    found = LINE.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:80]!r} is not a tensor; {ADVICE}")
    shape = () if found["shape"] == SCALAR else tuple(map(int, found["shape"].split("x")))
    if found["first"] is None:
        return TensorLine(found["name"], shape, None)
    if found["deviation"] is None:
        return TensorLine(found["name"], shape, (float(found["first"] == "ones"), 0.0))
    return TensorLine(found["name"], shape, (0.0, float(found["deviation"])))


def format_tensor(name: str, shape: Iterable[int], first: str = "") -> str:
    """Return the line of a parameter."""
    return " ".join(filter(None, (name, "x".join(map(str, shape)) or SCALAR, first)))


def _check_lines(lines: tuple[str, ...]) -> tuple[str, ...]:
    tensors = [parse_tensor(line) for line in lines]
    names = [tensor.name for tensor in tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise ValueError(f"{twice[0]} is there twice; remove one")
    if sum(math.prod(tensor.shape) for tensor in tensors) > MAX_ELEMENTS:
        raise ValueError(f"the tensors have more than {MAX_ELEMENTS} elements; use a smaller model")
    return lines


TensorLines = Annotated[tuple[str, ...], Field(max_length=MAX_TENSORS), AfterValidator(_check_lines)]
