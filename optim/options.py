"""What every part of a method is: a small frozen dataclass whose fields are its options, checked when it is built."""

from collections.abc import Mapping, Sequence

from pydantic import ConfigDict

Scalar = bool | int | float | str
# An option as a manifest gives it: a plain value, a table, or a list of phases (optim/option_schedules.py).
OptionValue = Scalar | Mapping[str, Scalar] | Sequence[Scalar | Mapping[str, Scalar]]

# No type is guessed and no option invented, as in the run manifest.
STRICT = ConfigDict(strict=True, extra="forbid")
