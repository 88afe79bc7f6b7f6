"""Observe a swarm over time: how far the run is, its loss by tokens, and which peers stand still for how long."""

import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from node.monitoring.status import NodeStatus
from tests.swarm.process_swarm import ProcessSwarm

Curve = Sequence[tuple[int, float]]  # tokens of all peers in committed rounds, and the validation loss there


@dataclass
class Standstill:
    """The longest that each peer has gone without a change, from when it was first seen or let go on."""

    longest: dict[str, float] = field(default_factory=dict)
    _since: dict[str, tuple[int, float]] = field(default_factory=dict)

    def record(self, peer: str, reached: int, now: float) -> None:
        known, since = self._since.setdefault(peer, (reached, now))
        self.longest[peer] = max(self.longest.get(peer, 0.0), now - since)
        if reached != known:
            self._since[peer] = reached, now

    def reset(self, peer: str) -> None:
        self._since.pop(peer, None)

    @property
    def worst(self) -> float:
        return max(self.longest.values(), default=0.0)


@dataclass
class Model:
    """The results of the peers in a round."""

    tokens: int
    peers: set[str] = field(default_factory=set)
    loss: float | None = None


class RunObserver:
    """Look often: what happens between two looks is not seen. `absent`: names of peers that are not to be asked now.

    A peer that is cut off goes on alone, on a chain of its own that loses when it comes back: of each round that model
    counts which most peers came to.
    """

    def __init__(self, swarm: ProcessSwarm) -> None:
        self.standstill = Standstill()  # without a round, from its first answer on
        self.starting = Standstill()  # from its start to its first answer
        self.round = 0
        self.absent: Sequence[str] = ()
        self._swarm = swarm
        self._models: dict[int, dict[str, Model]] = {}  # by round and digest
        self._digests: dict[tuple[str, int], str] = {}  # by peer and round

    def poll(self) -> None:
        present = [peer for peer in self._swarm.peers if peer.is_running and peer.name not in self.absent]
        told = self._swarm.poll(*present) if present else []
        for status in told:
            self._record(status)
        now = time.monotonic()
        for peer in present:
            self.starting.record(peer.name, int(peer.status is not None), now)
            if peer.status is not None:
                self.starting.reset(peer.name)
                self.standstill.record(peer.name, peer.status.round, now)

    def reset_standstill(self, peer: str) -> None:
        """It was killed, frozen or cut, or is so no longer."""
        self.starting.reset(peer)
        self.standstill.reset(peer)

    def _record(self, status: NodeStatus) -> None:
        self.round = max(self.round, status.round)
        model = self._models.setdefault(status.round, {}).setdefault(status.digest, Model(status.chain_tokens))
        model.peers.add(status.peer_id)
        self._digests[status.peer_id, status.round] = status.digest
        if status.validation_loss is not None and status.validation_round is not None:
            digest = self._digests.get((status.peer_id, status.validation_round))
            if digest is not None:  # or it has evaluated what nobody has seen it come to
                self._models[status.validation_round][digest].loss = status.validation_loss

    @property
    def curve(self) -> Curve:
        common = (max(models.values(), key=lambda model: (len(model.peers), model.tokens))
                  for _, models in sorted(self._models.items()))  # fmt: skip
        return [(model.tokens, model.loss) for model in common if model.loss is not None]


def loss_up_to(curve: Curve, tokens: int) -> float:
    """The mean over the last tenth of so many tokens: from one round to the next a loss goes up and down."""
    return statistics.fmean(loss_at(curve, tokens - tokens * part // 100) for part in range(10))


def loss_at(curve: Curve, tokens: int) -> float:
    """On the line between the two points around it. ValueError where the curve does not reach so far."""
    place = bisect_left(curve, (tokens, float("-inf")))
    if place < len(curve) and curve[place][0] == tokens:
        return curve[place][1]
    if not 0 < place < len(curve):
        raise ValueError(f"the loss at {tokens} tokens was not measured")
    (before, high), (after, low) = curve[place - 1], curve[place]
    return high + (low - high) * (tokens - before) / (after - before)
