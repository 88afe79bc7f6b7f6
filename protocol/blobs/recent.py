"""Remember which blobs were named a short while ago. PURE."""

from collections import OrderedDict
from collections.abc import Set

MAX_RECENT_BLOBS = 256


class RecentBlobs:
    """The digests of the blobs that were named in the last `seconds`; of too many the oldest are forgotten."""

    def __init__(self, seconds: float, limit: int = MAX_RECENT_BLOBS) -> None:
        self._seconds = seconds
        self._limit = limit
        self._named_at: OrderedDict[bytes, float] = OrderedDict()

    def add(self, digest: bytes, now: float) -> None:
        """Remember a blob from now on."""
        self._named_at[digest] = now
        self._named_at.move_to_end(digest)
        if len(self._named_at) > self._limit:
            self._named_at.popitem(last=False)

    def digests(self, now: float) -> Set[bytes]:
        """Return the blobs that are remembered."""
        return {digest for digest, named in self._named_at.items() if now - named < self._seconds}
