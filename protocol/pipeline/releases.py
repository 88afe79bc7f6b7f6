"""Releases: telling servers which microbatches have ended, a few at a time."""

from collections.abc import Collection, Iterable, Sequence

from protocol.identity import PeerId
from protocol.pipeline.owner_events import Release

RELEASE_SECONDS = 0.2


class Releases:
    """The ended microbatches that servers do not know of yet; `due` is when the next ones are sent."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._serials: dict[tuple[int, PeerId], set[int]] = {}

    def add(self, stage: int, peer: PeerId, serials: Iterable[int], now: float) -> None:
        """Send these with the next messages."""
        self._serials.setdefault((stage, peer), set()).update(serials)
        if self.due is None:
            self.due = now + RELEASE_SECONDS

    def keep_only(self, live: Sequence[Collection[PeerId]]) -> None:
        """Forget servers that are gone; `live`: the peers of each stage."""
        for stage, peer in [key for key in self._serials if key[1] not in live[key[0]]]:
            del self._serials[stage, peer]

    def take(self, now: float) -> list[Release]:
        """Return the messages that are due."""
        if self.due is None or self.due > now:
            return []
        self.due = None
        serials, self._serials = self._serials, {}
        return [Release(peer, stage, frozenset(ended)) for (stage, peer), ended in serials.items()]
