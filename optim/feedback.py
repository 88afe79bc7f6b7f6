"""Error feedback: the part of a contribution that the codec could not carry.

Every method encodes x = decay * residual + delta. Error feedback keeps residual <- x - decode(encode(x)), so that the
rest is sent later (arXiv 1901.09847; with decay: arXiv 2508.15706). With `share` below 1, only that fraction of the
sent values is subtracted: residual <- x - share * decode(encode(x)) (arXiv 2411.19870, second version).

Without feedback the residual is emptied by every contribution. It then holds only contributions that were excluded from
their round and have been restored.
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
