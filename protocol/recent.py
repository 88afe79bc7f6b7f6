"""Tables of a fixed size: they keep the newest entries, so no peer can make a node remember more. PURE."""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping, Set
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentTable(MutableMapping[Key, Value]):
    """A dictionary of the `size` entries set last. Setting a key again makes it the newest; reading it does not."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[Key, Value] = OrderedDict()

    def __getitem__(self, key: Key) -> Value:
        return self._entries[key]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def __delitem__(self, key: Key) -> None:
        del self._entries[key]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys, oldest first."""
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"RecentTable({self._size}, {dict(self._entries)})"


class RecentSet(Generic[Key]):
    """The members that were added in the last `seconds`, and of these at most the newest `size`."""

    def __init__(self, seconds: float, size: int) -> None:
        self._seconds = seconds
        self._added_at = RecentTable[Key, float](size)

    def add(self, member: Key, now: float) -> None:
        """Add a member, or restart its time."""
        self._added_at[member] = now

    def members(self, now: float) -> Set[Key]:
        """Return the members that were added recently."""
        return {member for member, added_at in self._added_at.items() if now - added_at < self._seconds}
