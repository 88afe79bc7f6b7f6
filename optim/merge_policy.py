"""How a peer moves to a new anchor after it has trained on since its contribution.

`live` are its shared vectors now, `reference` the point that its last contribution was measured up to, and `phi` the
agreed vectors after the round.
"""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RebaseOnAnchor:
    """Keep what was trained since the contribution.

        base = phi - unsent * residual
        live <- base + keep * (live - reference);  reference <- base

    With keep below 1, all of (reference - live) goes into the residual instead and reference <- live, so that the next
    contribution carries it and nothing is lost: the kept part is a loan until it is merged, not progress. keep = 1 is
    for synchronous methods, where there is nothing to keep, and for overlap. With keep = 0, CO2 (arXiv 2401.16265)
    restarts from the anchor. With keep = 1 / peers, eager updates (arXiv 2502.12996) apply the peer's own part of the
    next merge at once.

    With `unsent` above 0, a peer trains on from where that fraction of its residual would have brought it, so that it
    does not compute gradients for known progress again. Progress is measured from `reference`, so the residual still
    counts once, when it is sent. 0 is SparseLoCo (arXiv 2508.15706). With 1 every peer has its whole own progress, as
    with error reset (arXiv 2007.13221), and the peers drift apart with it.
    """

    kind: ClassVar[str] = "carry"

    keep: float = Field(default=1.0, ge=0, le=1)
    unsent: float = Field(default=0.0, ge=0, le=1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Interpolate:
    """Mix the values that the round exchanged, as in Streaming DiLoCo (arXiv 2501.18512).

        live <- alpha * live + (1 - alpha) * phi;  reference <- phi

    The remaining deviation of the peer is sent again as progress; the fraction (1 - alpha) of its last steps is given
    up.
    """

    kind: ClassVar[str] = "mix"
    unsent: ClassVar[float] = 0.0

    alpha: float = Field(default=0.5, ge=0, le=1)


MergePolicy = RebaseOnAnchor | Interpolate
