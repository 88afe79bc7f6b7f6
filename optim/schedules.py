"""When a message is sent."""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.parts import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EverySteps:
    """After each `inner_steps` local steps. With `overlap` the peer trains on while the exchange runs."""

    kind: ClassVar[str] = "every-steps"

    inner_steps: int = Field(default=30, ge=1, le=100_000)
    overlap: bool = True


Schedule = EverySteps
