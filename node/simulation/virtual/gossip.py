"""A model of gossip: the members of the run and their heads, a little late and for all peers at once.

A published head reaches the other peers after the time of a few hops; a dead peer disappears after the expiry.
"""

import math
from collections.abc import Callable
from functools import partial

from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.simulation.virtual.network import VirtualClock
from protocol.consensus.chain import ChainHead
from protocol.identity import PeerId

SECONDS_PER_HOP = 0.02  # in addition to the latency


class VirtualGossip:
    """Distributes the peers' heads; calls `on_change` after each change of the shared snapshot."""

    def __init__(
        self, clock: VirtualClock, latency: float, peers: int, expiry: float, on_change: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._expiry = expiry
        self._on_change = on_change
        self.delay = (latency + SECONDS_PER_HOP) * max(1, math.ceil(math.log2(max(2, peers))))
        self._published: dict[PeerId, ChainHead | None] = {}
        self._heads: dict[PeerId, ChainHead] = {}
        self.snapshot = SwarmSnapshot({})  # shared by all peers

    def start_with(self, heads: dict[PeerId, ChainHead]) -> None:
        """Let these peers know one another from the start."""
        self._heads.update(heads)
        self._take_snapshot()

    def publish(self, peer: PeerId, head: ChainHead) -> None:
        self._publish_after(peer, head, self.delay)

    def remove(self, peer: PeerId) -> None:
        self._publish_after(peer, None, self._expiry)

    def _publish_after(self, peer: PeerId, head: ChainHead | None, delay: float) -> None:
        """Publish after a delay; heads that are published in the meantime arrive together with it."""
        if head is None:
            self._clock.schedule(delay, partial(self._apply_news, {peer: None}))
            return
        if not self._published:
            self._clock.schedule(delay, self._apply_published)
        self._published[peer] = head

    def _apply_published(self) -> None:
        news, self._published = self._published, {}
        self._apply_news(news)

    def _apply_news(self, news: dict[PeerId, ChainHead | None]) -> None:
        for peer, head in news.items():
            if head is None:
                self._heads.pop(peer, None)
            else:
                self._heads[peer] = head
        self._take_snapshot()
        self._on_change()

    def _take_snapshot(self) -> None:
        self.snapshot = SwarmSnapshot({peer: PeerState(head) for peer, head in self._heads.items()})
