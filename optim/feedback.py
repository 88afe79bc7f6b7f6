"""What becomes of that part of a message which the codec could not carry.

Every method encodes x = decay * residual + delta. Error feedback keeps residual <- x - decode(encode(x)), so that what
was left out is sent later (arXiv 1901.09847; with decay: arXiv 2508.15706). With a `share` below 1 only that part of
what was sent is taken off: residual <- x - share * decode(encode(x)) (arXiv 2411.19870, second version).
Without feedback the residual is emptied: it then only ever holds messages that were excluded from their round and have
been taken back.
"""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ErrorFeedback:
    kind: ClassVar[str] = "error"
    keeps_error: ClassVar[bool] = True

    decay: float = Field(default=1.0, gt=0, le=1)
    share: float = Field(default=1.0, gt=0, le=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NoFeedback:
    kind: ClassVar[str] = "none"
    keeps_error: ClassVar[bool] = False

    @property
    def decay(self) -> float:
        return 1.0

    @property
    def share(self) -> float:
        return 1.0


Feedback = ErrorFeedback | NoFeedback
