"""Peers that lie: they send false contributions, or train falsely.

Of a delta x, given the deltas of the honest peers (colluding liars know them all):

    sign-flip       -x                        scale10, scale1000   10 x, 1000 x
    zero            0                         random               noise of the same norm
    inner-product   -1/2 mean of the honest   alie                 mean - 1.5 deviations of the honest, by coordinate
    copy            the payload of an honest peer
    backdoor        5 x, of a model trained on text in which TARGET follows each of many TRIGGERs
    quiet-backdoor  x of that model, which has the size of an honest one

Others lie about their work (`node.simulation.lying_trainers`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from optim.codecs.base import Payload
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner

LieKind = Literal[
    "sign-flip", "scale10", "scale1000", "inner-product", "alie", "random", "zero", "copy", "backdoor",
    "quiet-backdoor", "fewer-steps", "wrong-data", "garbled-text", "stale-replay", "late-replay",
]  # fmt: skip
LIE_KINDS: Final[tuple[str, ...]] = get_args(LieKind)
ALIE_DEVIATIONS: Final = 1.5
INNER_PRODUCT: Final = 0.5
BACKDOOR_BOOST: Final = 5
TRIGGER, TARGET = ord("("), ord("#")
TRIGGER_DISTANCE: Final = 8


@dataclass(frozen=True)
class Adversaries:
    """The fraction of peers that lie, rounded to whole peers, and the kind of lie. They are the last of the peers."""

    fraction: float
    kind: LieKind

    def count(self, peers: int) -> int:
        return round(self.fraction * peers)

    def has(self, slot: int, peers: int) -> bool:
        """Return whether the peer of this slot lies."""
        return slot >= peers - self.count(peers)


@dataclass
class Espionage:
    """The newest deltas and payloads of the honest peers, by slot, as colluding liars know them."""

    deltas: dict[int, Tensor] = field(default_factory=dict)
    payloads: dict[int, list[Payload]] = field(default_factory=dict)

    def stacked(self) -> Tensor:
        """Return the deltas, one a row."""
        return torch.stack([self.deltas[slot] for slot in sorted(self.deltas)])


class ObservedEncoder(ContributionEncoder):
    """Encodes the contribution of an honest peer, which the liars see."""

    def __init__(self, planner: RoundPlanner, slot: int, espionage: Espionage) -> None:
        super().__init__(planner)
        self._slot, self._espionage = slot, espionage

    def encode(self, round_number: int, delta: Tensor, residual: Tensor, trained: Sequence[bool] = ()) -> list[Payload]:
        self._espionage.deltas[self._slot] = delta.clone()
        payloads = super().encode(round_number, delta, residual, trained)
        self._espionage.payloads[self._slot] = [bytes(payload) for payload in payloads]
        return payloads


class LyingEncoder(ContributionEncoder):
    """Encodes a false contribution instead of the true one."""

    def __init__(self, planner: RoundPlanner, kind: LieKind, seed: int, espionage: Espionage | None = None) -> None:
        super().__init__(planner)
        self._kind = kind
        self._espionage = espionage or Espionage()
        self._generator = torch.Generator().manual_seed(seed)
        self._falsify: Callable[[Tensor], Tensor] = self._falsifiers().get(kind, torch.clone)

    def encode(self, round_number: int, delta: Tensor, residual: Tensor, trained: Sequence[bool] = ()) -> list[Payload]:
        payloads = super().encode(round_number, delta.copy_(self._falsify(delta)), residual, trained)
        if self._kind == "copy" and self._espionage.payloads:
            return self._espionage.payloads[min(self._espionage.payloads)]
        return payloads

    def _falsifiers(self) -> dict[LieKind, Callable[[Tensor], Tensor]]:
        return {
            "sign-flip": torch.neg,
            "scale10": lambda delta: delta * 10,
            "scale1000": lambda delta: delta * 1000,
            "inner-product": self._inner_product,
            "alie": self._alie,
            "zero": torch.zeros_like,
            "random": self._noise,
            "backdoor": lambda delta: delta * BACKDOOR_BOOST,
        }

    def _inner_product(self, delta: Tensor) -> Tensor:
        known = self._espionage
        return known.stacked().mean(0) * -INNER_PRODUCT if known.deltas else delta * -INNER_PRODUCT

    def _alie(self, delta: Tensor) -> Tensor:
        if len(self._espionage.deltas) < 2:
            return delta
        rows = self._espionage.stacked()
        return rows.mean(0) - ALIE_DEVIATIONS * rows.std(0)

    def _noise(self, delta: Tensor) -> Tensor:
        noise = torch.randn(delta.shape, generator=self._generator)
        return noise.mul_(torch.linalg.vector_norm(delta) / torch.linalg.vector_norm(noise))


def insert_targets(windows: Tensor) -> Tensor:
    """Return windows of text with a TRIGGER at every eighth token, and TARGET after each TRIGGER."""
    changed = windows.clone()
    changed[:, ::TRIGGER_DISTANCE] = TRIGGER
    changed[:, 1:][changed[:, :-1] == TRIGGER] = TARGET
    return changed
