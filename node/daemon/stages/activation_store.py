"""The activations of a stage's peer: slots that it shares with its trainer, and the blobs that others fetch from them.

A blob is held for one or several microbatches, by key, and once more for the owner's tokens; its slot is free again
when nobody holds it. Which blobs a peer may hold at all is decided by `protocol.pipeline.stages.server`, so a free slot
is always there.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Literal

from node.trainer.ipc.activation_memory import ActivationMemory, SlotSizes
from protocol.blobs.blob import Blob, Bytes
from protocol.blobs.store import BlobStore
from protocol.manifest.run import Manifest
from protocol.pipeline.messages import Key

Kind = Literal["activation", "tokens"]
TOKEN_BYTES = 4  # int32
SPARE_ACTIVATIONS = 2  # for a result whose microbatch is given up while it is computed


def slot_sizes(manifest: Manifest) -> SlotSizes:
    """Return the slots of a stage of a run: as many activations as its memory holds, and tokens for each of them."""
    model, table = manifest.model, manifest.pipeline
    activation_bytes = table.activation_bytes(model.context, model.stream_width)
    activations = table.memory // activation_bytes + SPARE_ACTIVATIONS
    token_bytes = TOKEN_BYTES * table.microbatch * (model.context + 1)
    tokens = activations + table.in_flight + SPARE_ACTIVATIONS
    return SlotSizes(activation_bytes=activation_bytes, activations=activations, token_bytes=token_bytes, tokens=tokens)


class ActivationStore:
    """Slots of `memory` by blob; `store` serves them, and keeps what is being fetched."""

    def __init__(self, memory: ActivationMemory, store: BlobStore) -> None:
        self.memory = memory
        self.store = store
        sizes = memory.sizes
        self._free: dict[Kind, list[int]] = {
            "activation": list(range(sizes.activations)),
            "tokens": list(range(sizes.activations, sizes.activations + sizes.tokens)),
        }
        self._slots: dict[bytes, int] = {}
        self._holders: defaultdict[bytes, set[Key]] = defaultdict(set)
        self._held: defaultdict[Key, set[bytes]] = defaultdict(set)

    def has(self, digest: bytes) -> bool:
        return digest in self._slots

    def take_slot(self, kind: Kind) -> int:
        """Return a free slot to write into. Raises MemoryError if there is none."""
        free = self._free[kind]
        if not free:
            raise MemoryError(f"all slots for {kind} are in use")
        return free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that has no blob."""
        self._free["activation" if slot < self.memory.sizes.activations else "tokens"].append(slot)

    def publish(self, key: Key, slot: int) -> Blob:
        """Serve the contents of a slot as a blob, and hold it for a microbatch."""
        blob = self.store.lend(self.memory.slot(slot))
        if blob.digest in self._slots:
            self.give_back(slot)  # the same bytes are in another slot
        else:
            self._slots[blob.digest] = slot
        self.hold(key, blob.digest)
        return blob

    def take_over(self, key: Key, blob: Blob) -> None:
        """Move a blob that was fetched into the store into a slot, and hold it for a microbatch."""
        if blob.digest not in self._slots:
            slot = self._fill_slot(blob, self.store.view(blob.digest))
            self.store.discard(blob.digest)
            self.store.lend(self.memory.slot(slot))
        self.hold(key, blob.digest)

    def copy(self, key: Key, blob: Blob, content: Bytes) -> None:
        """Copy a blob of another stage of this node into a slot, and hold it for a microbatch."""
        if blob.digest not in self._slots:
            self.store.lend(self.memory.slot(self._fill_slot(blob, content)))
        self.hold(key, blob.digest)

    def _fill_slot(self, blob: Blob, content: Bytes) -> int:
        slot = self.take_slot("activation" if blob.size == self.memory.sizes.activation_bytes else "tokens")
        self.memory.slot(slot)[:] = content
        self._slots[blob.digest] = slot
        return slot

    def hold(self, key: Key, digest: bytes) -> None:
        """Keep a blob that is here for a microbatch."""
        self._holders[digest].add(key)
        self._held[key].add(digest)

    def slot_of(self, blob: Blob) -> int:
        """Return the slot of a blob that is here."""
        return self._slots[blob.digest]

    def drop(self, key: Key, kept: Collection[Blob] = ()) -> None:
        """Hold the blobs of a microbatch no longer, except some; free those that nobody holds."""
        keep = {blob.digest for blob in kept}
        for digest in self._held.get(key, set()) - keep:
            self._held[key].discard(digest)
            self._holders[digest].discard(key)
            if not self._holders[digest]:
                del self._holders[digest]
                self.store.discard(digest)
                self.give_back(self._slots.pop(digest))
        if not self._held.get(key):
            self._held.pop(key, None)
