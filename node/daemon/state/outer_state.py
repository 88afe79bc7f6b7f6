"""Hold the state that all peers of a run share: the chain, the anchor and the outer optimizer, always on the CPU.

Once a trainer has the anchor in the shared memory, the state has it there too, and its blob is lent from there. The
memory of round r is written again for round r + 2: by then the blob is on disk or gone (`Checkpointer.free_anchor`).

The daemon computes the outer update in its own process, with the same elementwise operations on every machine, so peers
with different accelerators have the same bits. The serialized state (anchor, then the slots in the order of their
names, raw little-endian fp32) is a blob: its digest proves agreement, and a new peer can download it from every peer
that agrees.

The vectors that only the outer optimizer reads are in an unlinked file (`OuterVectors`), so that they take no main
memory that others need. The file has each vector twice, for even and for odd rounds, as the shared memory has the
anchor: while the state of the next round is computed, peers download the present one and a checkpoint reads it, and a
computation that is killed or fails leaves it whole. The system writes the file's pages to disk, and drops them from
main memory when it needs room. A round reads them again.
"""

import asyncio
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from node.model.shapes import cut_of
from node.model.weight_files import is_start
from node.processes.workers import RunInThread
from node.trainer.ipc.shared_memory import SharedMemory, unlinked_file
from node.trainer.vectors import TrainerVectors
from optim.aggregation.base import LeftOut
from optim.aggregation.step_scaling import compute_step_scale
from optim.codecs.base import Payload
from optim.errors import OptimError
from optim.exchange import Aggregator
from optim.kernels.buffer_pool import clone
from optim.kernels.vectors import SparseVector, Vector, slabs
from optim.method import REFERENCE_WEIGHT, SMALL_SLOTS, STEPS_MADE, Method
from optim.round_plan import NO_ROOMS, RoundPlanner
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead, ChainLog
from protocol.consensus.messages.contributions import Commit, Contribution, count_tokens
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.errors import MalformedError, MissingFileError, PeerFault, StorageError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest

FLOAT_BYTES = 4
Rooms = Mapping[str, Tensor]  # memory for vectors of a new state, by name
SignedContributions = tuple[SignedMessage[Contribution], ...]


class BlobAccess(Protocol):
    """A store of blobs on disk or in memory; the simulator has its own."""

    def put_in_memory(self, data: Bytes) -> Blob: ...

    def lend(self, *data: Bytes) -> Blob: ...

    def read(self, digest: Digest) -> Bytes: ...

    def view(self, digest: Digest) -> Bytes: ...


@dataclass(frozen=True)
class OuterState:
    """The anchor and the slots of the outer optimizer; immutable.

    Slots are flat fp32 by name, of the anchor's size except for the method's scalars. `left_out` names the contributors
    that the method's rule left out of the round that led to the state, and why; it is not part of the state.
    """

    anchor: Tensor
    slots: Mapping[str, Tensor]
    left_out: tuple[tuple[PeerId, LeftOut], ...] = ()

    @classmethod
    def initial(cls, anchor: Tensor, method: Method) -> "OuterState":
        sizes = {name: method.slot_numel(name, anchor.numel()) for name in method.slots}
        return cls(anchor, {name: torch.zeros(size) for name, size in sizes.items()})

    def steps_before(self, round_number: int) -> int:
        """Return the number of outer steps before a round, which is lower than its number if rounds were void."""
        made = self.slots.get(STEPS_MADE)
        return round_number if made is None else int(made)

    @property
    def exact_step(self) -> int:
        """Return the step that the next round makes where steps are exact; 0 in other runs.

        A trainer keeps it in its state, which auditors repeat bit for bit from its work alone.
        """
        return int(self.slots.get(STEPS_MADE, 0))

    def shared_vectors(self, method: Method) -> list[Tensor]:
        """Return the vectors that a trainer applies: the anchor, and its own vectors that are shared too."""
        return [self.anchor, *(self.slots[name] for name in method.signal.shared_names[1:])]

    def in_memory(self, shared: Sequence[Tensor], method: Method) -> "OuterState":
        """Return this state with its shared vectors in other memory, which has the same values."""
        slots = dict(zip(method.signal.shared_names[1:], shared[1:], strict=True))
        return OuterState(shared[0], {**self.slots, **slots}, self.left_out)

    def byte_views(self) -> list[memoryview]:
        """Return the serialized bytes, vector by vector, without a copy."""
        vectors = [self.anchor, *(self.slots[name] for name in sorted(self.slots))]
        return [vector.numpy().data for vector in vectors]

    @classmethod
    def from_bytes(cls, raw: bytearray | memoryview | mmap.mmap, numel: int, method: Method) -> "OuterState":
        """Parse a state. Raises MalformedError for a wrong size or a value that is not finite or out of range."""
        names = method.slots
        if len(raw) != state_bytes(numel, method):
            raise MalformedError(f"the state has {len(raw)} bytes instead of {state_bytes(numel, method)}")
        sizes = [numel, *(method.slot_numel(name, numel) for name in names)]
        vectors = torch.split(torch.frombuffer(raw, dtype=torch.float32), sizes)
        if not all(bool(torch.isfinite(vector[slab]).all()) for vector in vectors for slab in slabs(vector.numel())):
            raise MalformedError("the state is not finite")
        slots = dict(zip(names, vectors[1:], strict=True))
        for name, vector in slots.items():
            low, high = method.slot_range(name)
            if not low <= float(vector.min()) or not float(vector.max()) <= high:
                raise MalformedError(f"slot {name!r} of the state has values outside {low:g} to {high:g}")
        return cls(vectors[0], slots)


def state_bytes(numel: int, method: Method) -> int:
    """Return the size of the serialized state in bytes."""
    return FLOAT_BYTES * (numel + sum(method.slot_numel(name, numel) for name in method.slots))


def blobs_to_apply(commit: Commit, signed_contributions: SignedContributions) -> tuple[Blob, ...]:
    """Return the blobs needed to apply these contributions of a commit."""
    return commit.parts or tuple(entry.body.parts[0] for entry in signed_contributions)


class PartSum(NamedTuple):
    """The sum of one part, and why contributions are not in it, by their index."""

    blob: Blob
    left_out: Mapping[int, LeftOut]


class RoundCompute:
    """The computations on blobs for a round. Every method may take long: call it in a worker thread.

    `rate_decay` gives the fraction of the learning rate that is left after a number of outer steps, rounds and tokens.
    """

    def __init__(self, planner: RoundPlanner, store: BlobAccess, rate_decay: Callable[[int, int, int], float]) -> None:
        self._planner = planner
        self._aggregator = Aggregator(planner)
        self._store = store
        self._rate_decay = rate_decay
        self._decoded: dict[tuple[Digest, int, int], SparseVector] = {}  # contributions to the open round

    def check_part(self, blob: Blob, round_number: int, part: int) -> None:
        """Check that a blob is a well-formed payload of a part. Raises MalformedError."""
        try:
            vector = self._aggregator.decode_part(round_number, self._store.view(blob.digest), part)
        except OptimError as error:
            raise MalformedError(f"a payload does not decode: {error}") from error
        if isinstance(vector, SparseVector):
            self._cache_decoded((blob.digest, round_number, part), vector)

    def reduce_part(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> PartSum:
        """Sum one part of all contributions, in their order, and encode it once. Raises MalformedError."""
        try:
            payloads = [self._payload(contribution.parts[part], round_number, part) for contribution in contributions]
            reduced = self._aggregator.reduce_part(
                round_number, part, payloads, self._weights(round_number, contributions, _counted(contributions))
            )
        except OptimError as error:
            raise MalformedError(f"a contribution does not decode: {error}") from error
        return PartSum(self._store.put_in_memory(reduced.payload), reduced.left_out)

    def apply_commit(
        self,
        state: OuterState,
        commit: Commit,
        signed_contributions: SignedContributions,
        tokens: int = 0,
        rooms: Rooms = NO_ROOMS,
    ) -> OuterState:
        """Return the state after a commit, its vectors in `rooms` if they are there. Raises MalformedError.

        `tokens` are those of the run before the commit. `signed_contributions` are those applied here, with all blobs
        in the store; without any, the state is unchanged.
        """
        if not signed_contributions:
            return state
        round_number, contributions = commit.round, [signed.body for signed in signed_contributions]
        small_slots = {name: clone(state.slots[name]) for name in SMALL_SLOTS if name in state.slots}
        try:
            payloads = [
                self._payload(blob, round_number, part if commit.parts else 0)
                for part, blob in enumerate(blobs_to_apply(commit, signed_contributions))
            ]
            weights = self._weights(round_number, contributions, _counted_in(commit, signed_contributions))
            merged = self._aggregator.merge(round_number, payloads, weights, small_slots)
        except OptimError as error:
            raise MalformedError(f"the commit of round {round_number} does not decode: {error}") from error
        step = state.steps_before(round_number)
        plan, decay = self._planner.plan(step), self._rate_decay(step, round_number, tokens)
        if STEPS_MADE in small_slots:
            small_slots[STEPS_MADE] += 1
        slots = {**state.slots, **small_slots}
        anchor, slots = self._planner.apply_outer_step(
            plan, state.anchor, slots, merged.vector, decay, weights, rooms, merged.unsent
        )
        self._decoded.clear()
        left_out = ((signed_contributions[index].sender, why) for index, why in sorted(merged.left_out.items()))
        return OuterState(anchor, slots, tuple(left_out))

    def step_scale(self, state: OuterState, commit: Commit, signed_contributions: SignedContributions) -> float:
        """Return the fraction of a full outer step that the commit which led to `state` made."""
        reference_weight = state.slots.get(REFERENCE_WEIGHT)
        if reference_weight is None or not signed_contributions:
            return 1.0
        contributions = [entry.body for entry in signed_contributions]
        weights = self._weights(commit.round, contributions, _counted_in(commit, signed_contributions))
        return compute_step_scale(weights, reference_weight)

    def _payload(self, blob: Blob, round_number: int, part: int) -> Payload | Vector:
        """Return the vector that `check_part` decoded if it is cached, else the blob."""
        known = self._decoded.get((blob.digest, round_number, part))
        return self._store.view(blob.digest) if known is None else known

    def _cache_decoded(self, key: tuple[Digest, int, int], vector: SparseVector) -> None:
        """Cache a vector until its round is applied or another opens, within the size of one dense contribution."""
        self._decoded = {cached: value for cached, value in self._decoded.items() if cached[1] == key[1]}
        if sum(cached.nbytes for cached in self._decoded.values()) + vector.nbytes <= FLOAT_BYTES * self._planner.numel:
            self._decoded[key] = vector

    def _weights(self, round_number: int, contributions: Sequence[Contribution], tokens: Sequence[int]) -> list[float]:
        """Return the weights of contributions that count for `tokens`."""
        rule = self._planner.plan(round_number).method.aggregate
        return [rule.weigh(count, entry.age) for entry, count in zip(contributions, tokens, strict=True)]

    def lend_state(self, state: OuterState) -> Blob:
        """Make the state available for download, without a copy."""
        return self._store.lend(*state.byte_views())

    def load_state(self, blob: Blob) -> OuterState:
        raw = memoryview(self._store.view(blob.digest))
        return OuterState.from_bytes(bytearray(raw) if raw.readonly else raw, self._planner.numel, self._planner.method)


def _require_start(state: OuterState, manifest: Manifest) -> None:
    has_moved = any(bool(slot.any()) for slot in state.slots.values())
    if has_moved or not is_start(manifest.model, state.anchor, cut_of(manifest)):
        raise MalformedError("the state is not the one with which this run starts")


def _counted(contributions: Sequence[Contribution]) -> list[int]:
    return count_tokens([contribution.tokens for contribution in contributions])


def _counted_in(commit: Commit, signed_contributions: SignedContributions) -> list[int]:
    return [commit.counted_tokens[entry.sender] for entry in signed_contributions]


@dataclass(frozen=True)
class SpeculativeState:
    """A state computed before its commit is decided; the task returns None if it cannot be computed.

    `content_digest` is that of the commit's content, which is the same for every proposer.
    """

    before: OuterState
    content_digest: Digest
    signed_contributions: SignedContributions
    task: asyncio.Task[OuterState | None]

    def matches(self, before: OuterState, commit: Commit, signed_contributions: SignedContributions) -> bool:
        return (
            self.before is before
            and self.content_digest == commit.content_digest
            and self.signed_contributions == signed_contributions
        )


class ReplicatedState:
    """The chain and the outer state of one replica; `state` belongs to the head of `chain`, `blob` names it."""

    def __init__(
        self,
        chain: Chain,
        state: OuterState,
        compute: RoundCompute,
        run_in_thread: RunInThread,
        run_at_low_priority: RunInThread,
    ) -> None:
        self.chain = chain
        self.state = state
        self.blob = compute.lend_state(state)
        self._compute = compute
        self._run_in_thread = run_in_thread
        self._run_at_low_priority = run_at_low_priority
        self._speculative: SpeculativeState | None = None

    def speculate(self, commit: Commit, signed_contributions: SignedContributions, rooms: Rooms = NO_ROOMS) -> None:
        """Start to compute the state after a commit that is not decided yet, its vectors in `rooms` if they are there.

        A later commit replaces an earlier one, because only the last proposal can still be decided. The same commit may
        come again, as a proposal and in a later view.
        """
        if self._speculative and self._speculative.matches(self.state, commit, signed_contributions):
            return
        self._drop_speculative()
        task = asyncio.create_task(
            self._compute_speculatively(self.state, commit, signed_contributions, rooms), name="speculative commit"
        )
        self._speculative = SpeculativeState(self.state, commit.content_digest, signed_contributions, task)

    def _drop_speculative(self) -> None:
        if self._speculative is not None:
            self._speculative.task.cancel()
        self._speculative = None

    async def _compute_speculatively(
        self, state: OuterState, commit: Commit, signed_contributions: SignedContributions, rooms: Rooms
    ) -> OuterState | None:
        with suppress(PeerFault, MissingFileError, StorageError):  # `compute_next` will raise it
            computed: OuterState = await self._run_in_thread(
                self._compute.apply_commit, state, commit, signed_contributions, self.chain.tokens, rooms
            )
            return computed
        return None

    async def compute_next(
        self, commit: CertifiedCommit, signed_contributions: SignedContributions, rooms: Rooms = NO_ROOMS
    ) -> OuterState:
        """Return the state after a commit, whose blobs must be in the store; nothing changes yet.

        Raises StaleError or MalformedError.
        """
        self.chain.head_after([commit])
        speculative, self._speculative = self._speculative, None
        if (
            speculative
            and speculative.matches(self.state, commit.body, signed_contributions)
            and (computed := await speculative.task)
        ):
            return computed
        state: OuterState = await self._run_in_thread(
            self._compute.apply_commit, self.state, commit.body, signed_contributions, self.chain.tokens, rooms
        )
        return state

    async def advance(self, commit: CertifiedCommit, state: OuterState) -> None:
        """Replace the state by one from `compute_next`; head, state and blob change together.

        This is separate from `compute_next` because hashing a state reads all of it, and neither the trainer nor a
        round on this machine needs to wait for that. Raises StaleError without any change.
        """
        blob = await self._run_at_low_priority(self._compute.lend_state, state)
        self.chain.append(commit)
        self.state = state
        self.blob = blob

    def step_scale(self, commit: Commit, signed_contributions: SignedContributions) -> float:
        """Return the fraction of a full outer step that the last round made."""
        return self._compute.step_scale(self.state, commit, signed_contributions)

    async def install_state(self, head: ChainHead, log: ChainLog, blob: Blob, manifest: Manifest | None = None) -> None:
        """Switch to the head, the log that leads to it, and the state (in the store) of another chain.

        A state of round 0 must have the weights that the manifest names, if it is given. Raises MalformedError without
        any change.
        """
        state = await self._run_in_thread(self._compute.load_state, blob)
        if manifest is not None and head.round == 0:
            await self._run_in_thread(_require_start, state, manifest)
        self._drop_speculative()
        self.chain.switch_to(head, log)
        self.state = state
        self.blob = blob


def outer_file_bytes(planner: RoundPlanner) -> int:
    """Return the bytes on disk of both copies of the vectors."""
    return 2 * len(planner.method.outer_names) * _vector_bytes(planner)


def _vector_bytes(planner: RoundPlanner) -> int:
    return -(-FLOAT_BYTES * planner.numel // mmap.PAGESIZE) * mmap.PAGESIZE


class OuterVectors:
    """The memory of the outer optimizer's vectors, of one replica."""

    def __init__(self, folder: Path, planner: RoundPlanner) -> None:
        """Reserve the file. Raises StorageError if the disk has too little room."""
        self._names = planner.method.outer_names
        self._numel, self._vector_bytes = planner.numel, _vector_bytes(planner)
        size = outer_file_bytes(planner)
        if size:
            descriptor = unlinked_file(folder, size)
            self._map = mmap.mmap(descriptor, size)
            os.close(descriptor)

    def rooms(self, round_number: int) -> dict[str, Tensor]:
        """Return the memory of a round's vectors by name."""
        first = round_number % 2 * len(self._names)
        return {name: self._view(first + index) for index, name in enumerate(self._names)}

    def _view(self, index: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.float32, count=self._numel, offset=index * self._vector_bytes)

    def place(self, round_number: int, state: OuterState) -> OuterState:
        """Return the state of a round with its vectors in their memory; copy those that are elsewhere."""
        elsewhere = {
            name: room
            for name, room in self.rooms(round_number).items()
            if state.slots[name].data_ptr() != room.data_ptr()
        }
        for name, room in elsewhere.items():
            room.copy_(state.slots[name])
        return replace(state, slots={**state.slots, **elsewhere}) if elsewhere else state


class TrainerAnchors:
    """The memory of the anchors and of the other vectors that a replica shares with its trainer."""

    def __init__(self, memory: SharedMemory, planner: RoundPlanner, run_in_thread: RunInThread) -> None:
        self._memory = memory
        self._planner = planner
        self._run_in_thread = run_in_thread
        self._names = planner.method.signal.shared_names

    def write(self, round_number: int, shared: Sequence[Tensor]) -> None:
        self._memory.write_anchor(round_number, shared)

    async def write_in_thread(self, round_number: int, shared: Sequence[Tensor]) -> None:
        await self._run_in_thread(self._memory.write_anchor, round_number, shared)

    async def finish_change(self) -> None:
        """Finish the change of its vectors in which a trainer was killed; it needs the anchors that it read."""
        await self._run_in_thread(TrainerVectors(self._memory, self._planner).read)

    def rooms(self, round_number: int) -> dict[str, Tensor]:
        """Return the memory of a round's vectors by name."""
        vectors = self._memory.anchor_vectors(round_number, len(self._names))
        return dict(zip(self._names, vectors, strict=True))

    def place(self, round_number: int, state: OuterState) -> OuterState:
        """Return the state of a round whose vectors were written here, with its vectors here."""
        return state.in_memory(list(self.rooms(round_number).values()), self._planner.method)
