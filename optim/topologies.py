"""The options of each topology: with which peers a peer exchanges, and in which form.

`reduces_parts`: a contribution is split into parts, and one peer sums each part; otherwise peers exchange whole
contributions.
"""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Butterfly:
    """Everyone sends part j to the peer that reduces part j; everyone fetches the reduced parts. For dense messages."""

    kind: ClassVar[str] = "butterfly"
    reduces_parts: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gather:
    """Everyone fetches everyone's whole message. For sparse messages."""

    kind: ClassVar[str] = "gather"
    reduces_parts: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Groups:
    """Everyone fetches the messages of its group of `size`, drawn anew each round; every peer has an anchor of its own.

    `pattern`: by a shared random permutation (arXiv 2506.10911), or in pairs round a ring or at distances 1, 2, 4, ...
    (arXiv 2410.11998).
    """

    kind: ClassVar[str] = "groups"
    reduces_parts: ClassVar[bool] = False

    size: int = Field(default=2, ge=2, le=64)
    pattern: Literal["random", "ring", "exponential"] = "random"


Topology = Butterfly | Gather | Groups
