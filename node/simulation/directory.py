"""Who is in the run and where everybody stands, as gossip would tell it: a little late, and to all at once.

What a peer publishes reaches the others after the time of a few hops; a peer that dies is missed after the expiry.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

from node.simulation.clock import VirtualClock
from protocol.identity import PeerId
from protocol.rounds.chain import Head, preferred
from protocol.rounds.statements import Digest

SECONDS_A_HOP = 0.02  # beside the latency


class Directory:
    """`changed` is called when what all know has changed."""

    def __init__(
        self, clock: VirtualClock, latency: float, peers: int, expiry: float, changed: Callable[[], None]
    ) -> None:
        self._clock = clock
        self._expiry = expiry
        self._changed = changed
        self._delay = (latency + SECONDS_A_HOP) * max(1, math.ceil(math.log2(max(2, peers))))
        self._published: dict[PeerId, Head | None] = {}
        self._heads: dict[PeerId, Head] = {}
        self._standing: dict[Digest, frozenset[PeerId]] = {}
        self._unions: dict[frozenset[Digest], frozenset[PeerId]] = {}  # asked for by all, the same for all

    @property
    def peers(self) -> frozenset[PeerId]:
        return frozenset(self._heads)

    def standing_at(self, digests: Iterable[Digest]) -> frozenset[PeerId]:
        asked = frozenset(digests)
        if asked not in self._unions:
            self._unions[asked] = frozenset().union(*(self._standing.get(digest, ()) for digest in asked))
        return self._unions[asked]

    def best(self, mine: Head) -> Head | None:
        """The head to be preferred above all, where one is to be preferred to `mine`."""
        best = mine
        for head in {self._heads[min(group)] for group in self._standing.values()}:
            best = head if preferred(best, head) else best
        return None if best == mine else best

    def begin(self, heads: dict[PeerId, Head]) -> None:
        """All these know one another from the start."""
        self._heads.update(heads)
        self._index()

    def publish(self, peer: PeerId, head: Head) -> None:
        self._spread(peer, head, self._delay)

    def lose(self, peer: PeerId) -> None:
        self._spread(peer, None, self._expiry)

    def _spread(self, peer: PeerId, head: Head | None, delay: float) -> None:
        """What is published while news is on its way travels with it."""
        if head is None:
            self._clock.after(delay, lambda: self._tell({peer: None}))
            return
        if not self._published:
            self._clock.after(delay, self._tell_published)
        self._published[peer] = head

    def _tell_published(self) -> None:
        news, self._published = self._published, {}
        self._tell(news)

    def _tell(self, news: dict[PeerId, Head | None]) -> None:
        for peer, head in news.items():
            if head is None:
                self._heads.pop(peer, None)
            else:
                self._heads[peer] = head
        self._index()
        self._changed()

    def _index(self) -> None:
        groups: dict[Digest, set[PeerId]] = defaultdict(set)
        for peer, head in self._heads.items():
            groups[head.digest].add(peer)
        self._standing = {digest: frozenset(group) for digest, group in groups.items()}
        self._unions.clear()
