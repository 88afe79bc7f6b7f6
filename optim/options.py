"""What every part of a method is: a small frozen dataclass whose fields are its options, checked when it is built."""

from pydantic import ConfigDict

Scalar = bool | int | float | str

# No type is guessed and no option invented, as in the run manifest.
STRICT = ConfigDict(strict=True, extra="forbid")
