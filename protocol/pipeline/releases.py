"""Releases: telling servers which microbatches have ended, a few at a time.

A server that seems to be gone may only be slow. It hears of its microbatches once it is back, because it would hold
its step open for them until their deadline.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from protocol.identity import PeerId
from protocol.pipeline.messages import MAX_RELEASED
from protocol.pipeline.owner_events import Release

RELEASE_SECONDS = 0.2
MAX_SERVERS = 256  # with ended microbatches


class Releases:
    """The ended microbatches that servers do not know of yet; `due` is when the next ones are sent."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._serials: OrderedDict[tuple[int, PeerId], set[int]] = OrderedDict()
        self._live: Sequence[Collection[PeerId]] = ()

    def add(self, stage: int, peer: PeerId, serials: Iterable[int], now: float) -> None:
        """Send these with the next messages, or when the server is back."""
        ended = self._serials.setdefault((stage, peer), set())
        ended.update(list(serials)[: MAX_RELEASED - len(ended)])
        if len(self._serials) > MAX_SERVERS:
            self._serials.popitem(last=False)
        self._plan(now)

    def set_live(self, live: Sequence[Collection[PeerId]], now: float) -> None:
        """Take over the live peers of each stage."""
        self._live = live
        self._plan(now)

    def take(self, now: float) -> list[Release]:
        """Return the messages that are due."""
        if self.due is None or self.due > now:
            return []
        self.due = None
        return [Release(peer, stage, frozenset(self._serials.pop((stage, peer)))) for stage, peer in self._reachable()]

    def _plan(self, now: float) -> None:
        if self.due is None and self._reachable():
            self.due = now + RELEASE_SECONDS

    def _reachable(self) -> list[tuple[int, PeerId]]:
        return [(stage, peer) for stage, peer in self._serials if peer in self._live[stage]]
