"""The options of each topology: with which peers a peer exchanges contributions, and in which form.

With `reduces_parts`, a contribution is split into parts and one peer sums each part. Otherwise peers exchange whole
contributions.
"""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Butterfly:
    """Each peer sends part j to the peer that reduces it, then fetches the reduced parts. For dense contributions."""

    kind: ClassVar[str] = "butterfly"
    reduces_parts: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gather:
    """Each peer fetches the whole contribution of every other peer. For sparse contributions."""

    kind: ClassVar[str] = "gather"
    reduces_parts: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Groups:
    """Each peer fetches the contributions of its group of `size`; the groups change every round.

    Each peer has an anchor of its own. `pattern` = "random" draws the groups from a shared permutation (arXiv
    2506.10911); "ring" pairs neighbours on a ring, "exponential" peers at distances 1, 2, 4, ... (arXiv 2410.11998).
    """

    kind: ClassVar[str] = "groups"
    reduces_parts: ClassVar[bool] = False

    size: int = Field(default=2, ge=2, le=64)
    pattern: Literal["random", "ring", "exponential"] = "random"


Topology = Butterfly | Gather | Groups
