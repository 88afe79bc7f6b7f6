"""Admission by bytes: the memory of a server, shared fairly between owners, with a part reserved for backwards.

A microbatch takes memory for its forwards in the order of the stages and then for its backwards in reverse order. As
backwards and replays have memory that no forward can take, the last one in that order can always proceed, so nothing
waits in a circle.
"""

from collections import Counter, defaultdict

from protocol.identity import PeerId
from protocol.pipeline.messages import Key

RESERVED_SHARE = 0.25  # for backwards and replays


class Memory:
    """The bytes of activations that one server holds for microbatches of others.

    `backward_bytes`: what one backward needs at most; replays leave room for it.
    """

    def __init__(self, capacity: int, backward_bytes: int) -> None:
        self.capacity = capacity
        self.backward_bytes = backward_bytes
        self.owners = 1
        self._held: defaultdict[Key, int] = defaultdict(int)
        self._by_owner = Counter[PeerId]()
        self._used = 0

    @property
    def used(self) -> int:
        return self._used

    @property
    def forward_capacity(self) -> int:
        """Return the bytes that forwards may take."""
        return self.capacity - max(int(self.capacity * RESERVED_SHARE), self.backward_bytes)

    def admits_forward(self, key: Key, size: int) -> bool:
        """Return whether a forward fits into the memory of forwards and into its owner's share of that."""
        limit = self.forward_capacity
        share = max(size, limit // max(1, self.owners))
        return self._used + size <= limit and self._by_owner[key.owner] + size <= share

    def forward_places(self, size: int) -> int:
        """Return how many forwards fit, whoever owns them."""
        return max(0, self.forward_capacity - self._used) // size

    def admits_replay(self, size: int) -> bool:
        return self._used + size + self.backward_bytes <= self.capacity

    def admits_backward(self, size: int) -> bool:
        return self._used + size <= self.capacity

    def take(self, key: Key, size: int) -> None:
        """Count bytes of a microbatch."""
        self._held[key] += size
        self._by_owner[key.owner] += size
        self._used += size

    def shrink(self, key: Key, size: int) -> None:
        """Keep only `size` bytes of a microbatch."""
        self.take(key, size - self._held.get(key, 0))
        if not size:
            del self._held[key]
            if not self._by_owner[key.owner]:
                del self._by_owner[key.owner]
