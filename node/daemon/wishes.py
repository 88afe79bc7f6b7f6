"""The blobs that are wanted now and who may have them; sources may change while a fetch is under way."""

from collections.abc import Callable, Iterable, Sequence

from protocol.blobs.blob import Blob
from protocol.blobs.fetch import Fetcher
from protocol.identity import PeerId
from protocol.rounds.statements import Digest


class Wishes:
    """`everyone` is asked for peers that may have a blob besides those named."""

    def __init__(self, fetcher: Fetcher, everyone: Callable[[], Iterable[PeerId]]) -> None:
        self._fetcher = fetcher
        self._everyone = everyone
        self._sources: dict[Digest, tuple[PeerId, ...]] = {}

    def want(self, blob: Blob, sources: Sequence[PeerId]) -> bool:
        """Whether this is a new wish; otherwise only its sources are renewed."""
        known = blob.digest in self._sources
        self._sources[blob.digest] = tuple(sources)
        return not known

    async def get(self, blob: Blob, deadline: float) -> None:
        """The blob is in the store when this returns; errors are those of Fetcher.fetch."""
        await self._fetcher.fetch(blob, lambda: self._among(blob.digest), deadline)

    def drop(self, blob: Blob) -> None:
        """It is no longer wanted."""
        self._sources.pop(blob.digest, None)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._sources.clear()

    async def get_from_anyone(self, blob: Blob, deadline: float) -> None:
        await self._fetcher.fetch(blob, lambda: tuple(self._everyone()), deadline)

    def _among(self, digest: Digest) -> tuple[PeerId, ...]:
        return self._sources.get(digest) or tuple(self._everyone())
