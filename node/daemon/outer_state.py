"""Hold the state that all peers of a run share: the chain, the anchor and the outer optimizer, always on the CPU.

The daemon computes the outer update in its own process, with the same elementwise operations on every machine, so peers
with different accelerators have the same bits. The serialized state (anchor, then the slots in the order of their
names, raw little-endian fp32) is a blob: its digest proves agreement, and a new peer can download it from every peer
that agrees.
"""

import asyncio
import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from node.workers import RunInThread
from optim.aggregation.base import LeftOut
from optim.aggregation.step_scaling import compute_step_scale
from optim.codecs.base import Payload
from optim.errors import OptimError
from optim.exchange import Aggregator
from optim.kernels.buffer_pool import clone
from optim.kernels.vectors import SparseVector, Vector
from optim.method import REFERENCE_WEIGHT, SMALL_SLOTS, Method
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.certified import CertifiedCommit, ChainLog
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.messages import Commit, Contribution, Digest, SignedMessage
from protocol.consensus.weights import count_tokens
from protocol.errors import MalformedError, MissingFileError, PeerFault, StorageError
from protocol.identity import PeerId

FLOAT_BYTES = 4
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
    whom the method's rule left out of the round that led to the state, and why; it is not part of the state.
    """

    anchor: Tensor
    slots: Mapping[str, Tensor]
    left_out: tuple[tuple[PeerId, LeftOut], ...] = ()

    @classmethod
    def initial(cls, anchor: Tensor, method: Method) -> "OuterState":
        sizes = {name: method.slot_numel(name, anchor.numel()) for name in method.slots}
        return cls(anchor, {name: torch.zeros(size) for name, size in sizes.items()})

    def shared_vectors(self, method: Method) -> list[Tensor]:
        """Return the vectors that a trainer applies: the anchor, and its own vectors that are shared too."""
        return [self.anchor, *(self.slots[name] for name in method.signal.shared_names[1:])]

    def byte_views(self) -> list[memoryview]:
        """Return the serialized bytes, vector by vector, without a copy."""
        vectors = [self.anchor, *(self.slots[name] for name in sorted(self.slots))]
        return [vector.numpy().data for vector in vectors]

    @classmethod
    def from_bytes(cls, raw: bytearray | mmap.mmap, numel: int, method: Method) -> "OuterState":
        """Parse a state. Raises MalformedError for a wrong size or a value that is not finite or out of range."""
        names = method.slots
        if len(raw) != state_bytes(numel, method):
            raise MalformedError(f"the state has {len(raw)} bytes instead of {state_bytes(numel, method)}")
        sizes = [numel, *(method.slot_numel(name, numel) for name in names)]
        vectors = torch.split(torch.frombuffer(raw, dtype=torch.float32), sizes)
        if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
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

    `rate_decay` maps a round to the fraction of the run's learning rate that is left at its beginning.
    """

    def __init__(self, planner: RoundPlanner, store: BlobAccess, rate_decay: Callable[[int], float]) -> None:
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

    def apply_commit(self, state: OuterState, commit: Commit, signed_contributions: SignedContributions) -> OuterState:
        """Return the state after a commit. Raises MalformedError.

        `signed_contributions` are those applied here, with all blobs in the store; without any, the state is unchanged.
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
        plan, decay = self._planner.plan(round_number), self._rate_decay(round_number)
        slots = {**state.slots, **small_slots}
        anchor, slots = self._planner.apply_outer_step(plan, state.anchor, slots, merged.vector, decay, weights)
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
        raw = self._store.read(blob.digest)
        own = raw if isinstance(raw, bytearray) else bytearray(raw)
        return OuterState.from_bytes(own, self._planner.numel, self._planner.method)


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

    def speculate(self, commit: Commit, signed_contributions: SignedContributions) -> None:
        """Start to compute the state after a commit that is not decided yet.

        A later commit replaces an earlier one, because only the last proposal can still be decided. The same commit may
        come again, as a proposal and in a later view.
        """
        if self._speculative and self._speculative.matches(self.state, commit, signed_contributions):
            return
        self._drop_speculative()
        task = asyncio.create_task(
            self._compute_speculatively(self.state, commit, signed_contributions), name="speculative commit"
        )
        self._speculative = SpeculativeState(self.state, commit.content_digest, signed_contributions, task)

    def _drop_speculative(self) -> None:
        if self._speculative is not None:
            self._speculative.task.cancel()
        self._speculative = None

    async def _compute_speculatively(
        self, state: OuterState, commit: Commit, signed_contributions: SignedContributions
    ) -> OuterState | None:
        with suppress(PeerFault, MissingFileError, StorageError):  # `compute_next` will raise it
            computed: OuterState = await self._run_in_thread(
                self._compute.apply_commit, state, commit, signed_contributions
            )
            return computed
        return None

    async def compute_next(self, commit: CertifiedCommit, signed_contributions: SignedContributions) -> OuterState:
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
            self._compute.apply_commit, self.state, commit.body, signed_contributions
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

    async def install_state(self, head: ChainHead, log: ChainLog, blob: Blob) -> None:
        """Switch to the head, the log that leads to it, and the state (in the store) of another chain.

        Raises MalformedError without any change.
        """
        state = await self._run_in_thread(self._compute.load_state, blob)
        self._drop_speculative()
        self.chain.switch_to(head, log)
        self.state = state
        self.blob = blob
