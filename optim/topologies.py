"""Who exchanges with whom, and in which form."""

from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from optim.parts import STRICT

TopologyKind = Literal["butterfly", "gather"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Butterfly:
    """Everyone sends part j to the peer that reduces part j; everyone fetches the reduced parts. For dense messages."""

    kind: ClassVar[TopologyKind] = "butterfly"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gather:
    """Everyone fetches everyone's whole message. For sparse messages."""

    kind: ClassVar[TopologyKind] = "gather"


Topology = Butterfly | Gather
