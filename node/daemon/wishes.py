"""The blobs that are wanted now and who may have them; sources may change while a fetch is under way.

Between two peers that are both hidden behind routers only small things pass (see `protocol.network.reach`), and some
owners are slow. Who has fetched a blob has it, too: what stays open is asked of some others as well, store and forward.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from protocol.blobs.blob import Blob
from protocol.blobs.fetch import Fetcher
from protocol.identity import PeerId
from protocol.rounds.statements import Digest

PATIENCE = 2.0  # seconds for those who are named, before others are asked as well
OTHERS = 8


class _Wish(NamedTuple):
    sources: tuple[PeerId, ...]
    since: float


class Wishes:
    """`everyone` is asked for peers that may have a blob besides those named; `clock` in seconds."""

    def __init__(
        self, fetcher: Fetcher, everyone: Callable[[], Iterable[PeerId]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fetcher = fetcher
        self._everyone = everyone
        self._clock = clock
        self._open: dict[Digest, _Wish] = {}

    def want(self, blob: Blob, sources: Sequence[PeerId]) -> bool:
        """Whether this is a new wish; otherwise only its sources are renewed."""
        known = self._open.get(blob.digest)
        self._open[blob.digest] = _Wish(tuple(sources), known.since if known else self._clock())
        return known is None

    async def get(self, blob: Blob, deadline: float) -> None:
        """The blob is in the store when this returns; errors are those of Fetcher.fetch."""
        await self._fetcher.fetch(blob, lambda: self._among(blob.digest), deadline)

    def drop(self, blob: Blob) -> None:
        """It is no longer wanted."""
        self._open.pop(blob.digest, None)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._open.clear()

    async def get_from_anyone(self, blob: Blob, deadline: float) -> None:
        await self._fetcher.fetch(blob, lambda: tuple(self._everyone()), deadline)

    def _among(self, digest: Digest) -> tuple[PeerId, ...]:
        wish = self._open.get(digest)
        if wish is None or not wish.sources:
            return tuple(self._everyone())
        if self._clock() - wish.since < PATIENCE:
            return wish.sources
        # Python's hash has a salt of its own in each process: the same few at every look, others for other nodes.
        others = sorted(self._everyone(), key=lambda peer: hash((digest, peer)))[:OTHERS]
        return tuple(dict.fromkeys([*wish.sources, *others]))
