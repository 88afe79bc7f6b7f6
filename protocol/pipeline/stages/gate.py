"""The gate of an inner step: one step's forwards at a time.

A stage that steps while microbatches are between its forward and its backward computes gradients with other weights
than their activations, which costs up to 14 % of the loss. So a server takes in the forwards of one step, and steps
when all of their backwards are back. Gradients whose forward was elsewhere join the open step.

Forwards wait for the gate, backwards never do: a place in a step is held only while later stages work, so no two steps
wait for each other. Owners whose forwards wait are invited once there are places again.
"""

from collections.abc import Container

from protocol.identity import PeerId
from protocol.pipeline.ledger import Ledger
from protocol.pipeline.messages import Key

MAX_WAITING = 1024  # owners


class Gate:
    """The open step of a server. `size`: microbatches in a step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_closing = False
        self._open: set[Key] = set()
        self._added = Ledger()
        self._count = 0

    @property
    def places(self) -> int:
        """Return how many more forwards belong to the open step."""
        members = len(self._open) + self._count
        return 0 if self.is_closing and members else max(0, self.size - members)

    @property
    def is_complete(self) -> bool:
        """Return whether all gradients of the step are there."""
        return not self._open and self._count > 0 and (self.is_closing or self._count >= self.size)

    @property
    def added(self) -> Ledger:
        """Return the microbatches whose gradients the open step has."""
        return self._added

    @property
    def open_count(self) -> int:
        return len(self._open)

    def holds(self, key: Key) -> bool:
        """Return whether the step waits for the backward of this microbatch."""
        return key in self._open

    def enter(self, key: Key) -> None:
        self._open.add(key)

    def strike(self, key: Key) -> bool:
        """Wait for a microbatch no longer; return whether the step waited for it."""
        if key not in self._open:
            return False
        self._open.discard(key)
        return True

    def add(self, key: Key) -> None:
        """Count a gradient."""
        self._open.discard(key)
        self._added.add(key)
        self._count += 1

    def close(self) -> None:
        """Take in no more forwards, so that a step that has begun ends early."""
        self.is_closing = True

    def take(self) -> Ledger:
        """End the step and return its microbatches; open ones go over into the next."""
        added, self._added, self._count, self.is_closing = self._added, Ledger(), 0, False
        return added


class WaitingOwners:
    """Owners that found a server busy, in the order in which it invites them."""

    def __init__(self) -> None:
        self._owners: dict[PeerId, None] = {}

    def add(self, owner: PeerId) -> None:
        """Invite an owner later, if not too many wait already; the others ask again by themselves."""
        if len(self._owners) < MAX_WAITING:
            self._owners[owner] = None

    def keep_only(self, owners: Container[PeerId]) -> None:
        """Forget owners that are gone."""
        self._owners = {owner: None for owner in self._owners if owner in owners}

    def invite(self, places: int) -> list[PeerId]:
        """Return the owners to invite now, one for each place; they wait no longer."""
        invited = list(self._owners)[:places]
        for owner in invited:
            del self._owners[owner]
        return invited
