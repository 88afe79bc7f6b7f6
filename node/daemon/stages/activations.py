"""Hold the activations of a stage in slots that the daemon shares with the trainer, and fetch activations of peers.

Microbatches hold blobs by key, several of them the same blob if need be, and the owner's tokens have a key too. A slot
is free once no key holds its blob. `protocol.pipeline.server` decides which blobs a peer may hold at all, so there is
always a free slot.

Other peers get only blobs that this node made: its results and its own tokens. A malformed activation is the fault of
the peer that signed it as its result, and otherwise of the owner that names it: a peer serves other blobs of that size.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Literal

from node.loop.stage_loop import stage_settings
from node.trainer.ipc.activation_memory import ActivationMemory, SlotSizes
from protocol.blobs.blob import Blob, Bytes
from protocol.blobs.download import Downloader
from protocol.blobs.store import BlobStore
from protocol.errors import GoneError, MalformedError, MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.directory import PeerDirectory
from protocol.pipeline.messages import Direction, HeldBlob, Input, Key, Task
from protocol.pipeline.stage import StageManifest, stage_run_ids

logger = logging.getLogger(__name__)

Kind = Literal["activation", "tokens"]
SPARE_ACTIVATIONS = 2  # for results whose microbatch is dropped while it is computed
FETCH_SECONDS = 60.0
UNKNOWN_HOLDER_SECONDS = 5.0  # for a holder that is gone or whose record has not arrived yet
FETCH_ERRORS = (UnreachableError, PeerFault, MissingFileError, StorageError)


def slot_sizes(manifest: StageManifest) -> SlotSizes:
    """Return the slots of a stage: activations that fill its memory, and tokens for each of them."""
    settings = stage_settings(manifest)
    activations = settings.memory // settings.activation_bytes + SPARE_ACTIVATIONS
    return SlotSizes(
        activation_bytes=settings.activation_bytes,
        activations=activations,
        token_bytes=settings.token_bytes,
        tokens=activations + manifest.pipeline.in_flight + SPARE_ACTIVATIONS,
    )


def neighbour_runs(manifest: StageManifest) -> tuple[RunId, RunId]:
    """Return the ids of the stages before and after one; "" where there is none."""
    runs = ("", *stage_run_ids(manifest.whole_run_id, manifest.pipeline.stages), "")
    return runs[manifest.stage], runs[manifest.stage + 2]


class FreeSlots:
    """The free slots of one kind: those that were given back, and all that nobody has used yet.

    A run of tiny activations has many millions of slots, so the unused ones are no list.
    """

    def __init__(self, slots: range) -> None:
        self._unused = slots
        self._returned: list[int] = []

    def __len__(self) -> int:
        return len(self._unused) + len(self._returned)

    def take(self) -> int:
        """Remove and return a slot. Raises IndexError if there is none."""
        if self._returned:
            return self._returned.pop()
        slot, self._unused = self._unused[0], self._unused[1:]
        return slot

    def give_back(self, slot: int) -> None:
        """Add a slot that is free again."""
        self._returned.append(slot)


class ActivationStore:
    """Maps blobs to slots of `memory`; `store` serves the slots, and holds blobs while they are fetched."""

    def __init__(self, memory: ActivationMemory, store: BlobStore) -> None:
        self.memory = memory
        self.store = store
        sizes = memory.sizes
        self._free: dict[Kind, FreeSlots] = {
            "activation": FreeSlots(range(sizes.activations)),
            "tokens": FreeSlots(range(sizes.activations, sizes.activations + sizes.tokens)),
        }
        self._slots: dict[bytes, int] = {}
        self._made: set[bytes] = set()  # blobs of slots that this stage computed or read
        self._holders: defaultdict[bytes, set[Key]] = defaultdict(set)
        self._held: defaultdict[Key, set[bytes]] = defaultdict(set)

    def has(self, blob: Blob) -> bool:
        """Return whether a slot holds a blob. Raises MalformedError if the blob of that digest has another size."""
        slot = self._slots.get(blob.digest)
        if slot is not None and len(self.memory.slot(slot)) != blob.size:
            raise MalformedError("an activation of that digest has another size")
        return slot is not None

    def take_slot(self, kind: Kind) -> int:
        """Return a free slot to write into. Raises MemoryError if there is none."""
        free = self._free[kind]
        if not len(free):
            raise MemoryError(f"all slots for {kind} are in use")
        return free.take()

    def give_back(self, slot: int) -> None:
        """Free a slot without a blob."""
        self._free["activation" if slot < self.memory.sizes.activations else "tokens"].give_back(slot)

    def publish(self, key: Key, slot: int) -> Blob:
        """Serve the contents of a slot as a blob, and hold it for a microbatch."""
        blob = self.store.lend(self.memory.slot(slot))
        if blob.digest in self._slots:
            self.give_back(slot)  # the same bytes are in another slot
        else:
            self._slots[blob.digest] = slot
        self._made.add(blob.digest)
        self.hold(key, blob.digest)
        return blob

    def made(self, digest: bytes) -> bool:
        """Return whether a slot holds a blob that this stage made."""
        return digest in self._made

    def take_over(self, key: Key, blob: Blob) -> None:
        """Move a blob that was fetched from a peer from the store into a slot, and hold it for a microbatch."""
        if not self.has(blob):
            slot = self._fill_slot(blob, self.store.view(blob.digest))
            self.store.discard(blob.digest)
            self.store.lend(self.memory.slot(slot))
        self.hold(key, blob.digest)

    def copy(self, key: Key, blob: Blob, content: Bytes | None) -> None:
        """Copy a blob of another stage of this node into a slot, and hold it for a microbatch.

        Raises MissingFileError without content, MalformedError for content of another size.
        """
        if content is None:
            raise MissingFileError("no stage of this node holds the blob")
        if not self.has(blob):
            self.store.lend(self.memory.slot(self._fill_slot(blob, content)))
        self.hold(key, blob.digest)

    def _fill_slot(self, blob: Blob, content: Bytes) -> int:
        """Write a blob into a slot of its size. Raises MalformedError if it has the size of no slot, or another one."""
        sizes = self.memory.sizes
        if len(content) != blob.size or blob.size not in (sizes.activation_bytes, sizes.token_bytes):
            raise MalformedError("an activation of another size than its task says")
        slot = self.take_slot("activation" if blob.size == sizes.activation_bytes else "tokens")
        self.memory.slot(slot)[:] = content
        self._slots[blob.digest] = slot
        return slot

    def hold(self, key: Key, digest: bytes) -> None:
        """Hold a blob of a slot for a microbatch."""
        self._holders[digest].add(key)
        self._held[key].add(digest)

    def slot_of(self, blob: Blob) -> int:
        """Return the slot of a blob. Raises MissingFileError if no slot holds it, MalformedError for another size."""
        if not self.has(blob):
            raise MissingFileError("an input of the task is not here")
        return self._slots[blob.digest]

    def drop(self, key: Key, kept: Collection[Blob] = ()) -> None:
        """Release the blobs of a microbatch except `kept`, and free slots without holders."""
        keep = {blob.digest for blob in kept}
        for digest in self._held.get(key, set()) - keep:
            self._held[key].discard(digest)
            self._holders[digest].discard(key)
            if not self._holders[digest]:
                del self._holders[digest]
                self._made.discard(digest)
                self.store.discard(digest)
                self.give_back(self._slots.pop(digest))
        if not self._held.get(key):
            self._held.pop(key, None)


class ServedActivations:
    """The blobs of a stage that other peers may fetch: those that it made."""

    def __init__(self, activations: ActivationStore) -> None:
        self._activations = activations

    def has(self, digest: bytes) -> bool:
        return self._activations.made(digest) and self._activations.store.has(digest)

    def blob(self, digest: bytes) -> Blob:
        return self._activations.store.blob(digest)

    def hashes(self, digest: bytes) -> bytes:
        return self._activations.store.hashes(digest)

    def read_piece(self, digest: bytes, piece: int) -> Bytes:
        return self._activations.store.read_piece(digest, piece)


class NodeBlobs:
    """The blobs of all stages of one node; a stage copies from another one instead of fetching."""

    def __init__(self) -> None:
        self._stores: list[BlobStore] = []

    def add(self, store: BlobStore) -> None:
        """Share the blobs of a stage with the other stages."""
        self._stores.append(store)

    def view(self, digest: bytes) -> Bytes | None:
        """Return a blob that one of the stages holds."""
        return next((store.view(digest) for store in self._stores if store.has(digest)), None)


class ActivationFetcher:
    """Downloads each blob from its only holder. If the holder leaves, the download ends.

    `neighbours`: the ids of the stages before and after this one; "" where there is none.
    """

    def __init__(
        self,
        directory: PeerDirectory,
        node: NodeBlobs,
        downloader: Downloader,
        activations: ActivationStore,
        neighbours: tuple[RunId, RunId],
    ) -> None:
        self.activations = activations
        self._before, self._after = neighbours
        self._directory = directory
        self._node = node
        self._downloader = downloader
        self._running: dict[PeerId, set[asyncio.Task[None]]] = {}

    async def fetch(self, key: Key, inputs: Iterable[tuple[Input, HeldBlob]]) -> Input | None:
        """Bring the inputs of a task into slots; return the name of the first missing one."""
        for name, held in inputs:
            if not await self._fetch_one(key, held):
                return name
        return None

    def blame_maker(self, task: Task, wrong: Input) -> None:
        """Record the fault of the peer that signed a malformed input as its result, or else of the owner.

        The owner is to blame for its tokens, and for a blob that it names as something else.
        """
        held = task.inputs.named()[wrong]
        run, direction = self._maker_stage(wrong)
        maker = held.holder if run and held.is_made_by_holder(run, direction) else task.owner
        if maker != self._directory.peer_id:
            fault = MalformedError(
                f"{'tokens' if wrong == 'tokens' else 'an activation'} with a value that is not allowed"
            )
            self._directory.record_refusal(maker, fault)

    def _maker_stage(self, wrong: Input) -> tuple[RunId, Direction]:
        """Return the stage that makes an input, and in which direction; "" for tokens, which owners read."""
        if wrong == "gradient":
            return self._after, "backward"
        return self._before if wrong == "activation" else "", "forward"

    def drop_peer(self, peer: PeerId) -> None:
        """End the downloads from a peer that is gone."""
        for task in self._running.get(peer, ()):
            task.cancel()

    async def _fetch_one(self, key: Key, held: HeldBlob) -> bool:
        activations, blob = self.activations, held.blob
        try:
            if activations.has(blob):
                activations.hold(key, blob.digest)
            elif held.holder == self._directory.peer_id:
                activations.copy(key, blob, self._node.view(blob.digest))
            else:
                await self._download(held)
                activations.take_over(key, blob)
        except FETCH_ERRORS as error:
            logger.info("an activation of %s is missing: %s", held.holder, error)
            return False
        return True

    async def _download(self, held: HeldBlob) -> None:
        """Download a blob from its holder. Raises one of FETCH_ERRORS."""

        def holders() -> list[PeerId]:
            return [held.holder]

        seconds = FETCH_SECONDS if held.holder in self._directory.live() else UNKNOWN_HOLDER_SECONDS
        fetching = self._downloader.fetch(held.blob, holders, seconds, wait_if_absent=False)
        task = asyncio.create_task(fetching, name=f"activation {held.blob.name[:12]}")
        running = self._running.setdefault(held.holder, set())
        running.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise GoneError(f"{held.holder} has left")
            await task
        finally:
            task.cancel()
            running.discard(task)
            if not running:
                self._running.pop(held.holder, None)
