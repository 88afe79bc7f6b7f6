"""How a peer goes over to a new anchor, having trained on since its message.

`live`: its shared vectors now; `reference`: where its last message left off; `phi`: the agreed vectors after the round.
"""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RebaseOnAnchor:
    """What was trained since the message lives on:

    base = phi - unsent * residual
    live <- base + keep * (live - reference);  reference <- base

    With keep below 1 the whole of (reference - live) goes into the residual instead, so the next message carries all of
    it and nothing is lost, and reference <- live: the part that was kept is a loan until its merge comes, not progress.
    keep = 1: synchronous methods, where there is nothing to carry, and overlap. keep = 0: CO2 (arXiv 2401.16265) starts
    again from the anchor. keep = 1 / peers: eager updates (arXiv 2502.12996): the own share of the next merge is taken
    at once.

    With `unsent` above 0 a peer trains on from where that part of what the codec left out would have brought it, and so
    makes no gradient for what it knows already. As progress is measured from `reference`, it still counts once, when
    it is sent. 0: SparseLoCo (arXiv 2508.15706). 1: every peer has its own progress whole, as with error reset
    (arXiv 2007.13221), and peers drift apart with it.
    """

    kind: ClassVar[str] = "carry"

    keep: float = Field(default=1.0, ge=0, le=1)
    unsent: float = Field(default=0.0, ge=0, le=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Interpolate:
    """Streaming DiLoCo (arXiv 2501.18512), on the values that the round exchanged:

    live <- alpha * live + (1 - alpha) * phi;  reference <- phi

    What is left of the own deviation is sent again as progress; the part (1 - alpha) of the last steps is given up.
    """

    kind: ClassVar[str] = "mix"
    unsent: ClassVar[float] = 0.0

    alpha: float = Field(default=0.5, ge=0, le=1)


MergePolicy = RebaseOnAnchor | Interpolate
