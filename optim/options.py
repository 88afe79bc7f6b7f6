"""The base of a method's components: small frozen dataclasses whose fields are their options, checked when built."""

from collections.abc import Mapping, Sequence

from pydantic import ConfigDict

Scalar = bool | int | float | str
# An option as a manifest gives it: a plain value, a table, or a list of phases (optim/schedules/option_schedules.py).
OptionValue = Scalar | Mapping[str, Scalar] | Sequence[Scalar | Mapping[str, Scalar]]

# As in the run manifest, types are not converted and unknown options are refused.
STRICT = ConfigDict(strict=True, extra="forbid")
