"""The options of each topology: with which peers a peer exchanges contributions, and in which form.

With `reduces_parts`, a contribution is split into parts and one peer sums each part. Otherwise peers exchange whole
contributions.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TopologyOptions:
    """How peers exchange contributions, as far as a method can choose; `protocol.consensus.topology` carries it out."""

    kind: ClassVar[str]
    reduces_parts: ClassVar[bool] = False

    @property
    def group_size(self) -> int | None:
        """Return the size of the groups in which peers exchange contributions; `None` if all do with all.

        Each peer of a group has its own anchor, so a method needs an outer optimizer that lets the anchors converge.
        """
        return None

    def partners(self, peers: int) -> int:
        """Return how many others a peer exchanges contributions with, in a swarm of `peers`."""
        return min(self.group_size or peers, peers) - 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ButterflyOptions(TopologyOptions):
    """Each peer sends part j to the peer that reduces it, then fetches the reduced parts. For dense contributions."""

    kind: ClassVar[str] = "butterfly"
    reduces_parts: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatherOptions(TopologyOptions):
    """Each peer fetches the whole contribution of every other peer. For sparse contributions."""

    kind: ClassVar[str] = "gather"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GatherAllOptions(TopologyOptions):
    """As gather, but a round waits for slow links until its exchange times out, so that every contribution counts."""

    kind: ClassVar[str] = "gather-all"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GroupsOptions(TopologyOptions):
    """Each peer fetches the contributions of its group of `size`; the groups change every round.

    `pattern` = "random" draws the groups from a shared permutation (arXiv 2506.10911); "ring" pairs neighbours on a
    ring, "exponential" peers at distances 1, 2, 4, ... (arXiv 2410.11998).
    """

    kind: ClassVar[str] = "groups"

    size: int = Field(default=2, ge=2, le=64)
    pattern: Literal["random", "ring", "exponential"] = "random"

    @property
    def group_size(self) -> int:
        return self.size


_TOPOLOGIES: tuple[type[TopologyOptions], ...] = (ButterflyOptions, GatherOptions, GatherAllOptions, GroupsOptions)
TOPOLOGIES: Final[Mapping[str, type[TopologyOptions]]] = {options.kind: options for options in _TOPOLOGIES}
