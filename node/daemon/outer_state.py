"""What all peers of a run hold alike: the chain of commits, the anchor and the outer optimizer, always on the CPU.

The outer update is computed here, in the daemon's process, on every machine in the same elementwise operations, so
peers with different accelerators still hold the same bits. The state's serialized form (anchor, then the slots in the
order of their names, raw little-endian fp32) is a blob: its digest proves agreement, and a newcomer can fetch it from
everyone who agrees.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from node.workers import RunInThread
from optim.aggregation.step_scaling import compute_step_scale
from optim.codecs.base import Payload
from optim.errors import OptimError
from optim.exchange import Aggregator
from optim.kernels.buffer_pool import clone
from optim.kernels.vectors import SparseVector, Vector
from optim.method import AGGREGATION_STATE, REFERENCE_WEIGHT, Method
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.messages import Commit, Contribution, Digest, SignedMessage
from protocol.errors import MalformedError, MissingFileError, PeerFault, StorageError

FLOAT_BYTES = 4
SignedContributions = tuple[SignedMessage[Contribution], ...]


class BlobAccess(Protocol):
    """Where blobs lie: on disk or in memory, or in the simulator's."""

    def put_in_memory(self, data: Bytes) -> Blob: ...

    def lend(self, *data: Bytes) -> Blob: ...

    def read(self, digest: Digest) -> Bytes: ...

    def view(self, digest: Digest) -> Bytes: ...


@dataclass(frozen=True)
class OuterState:
    """Never changed in place. `slots` by name, each flat fp32, of the anchor's size but for the method's numbers."""

    anchor: Tensor
    slots: Mapping[str, Tensor]

    @classmethod
    def initial(cls, anchor: Tensor, method: Method) -> "OuterState":
        sizes = {name: method.slot_numel(name, anchor.numel()) for name in method.slots}
        return cls(anchor, {name: torch.zeros(size) for name, size in sizes.items()})

    def shared_vectors(self, method: Method) -> list[Tensor]:
        """What a trainer adopts: the anchor and those of its own vectors that are agreed too."""
        return [self.anchor, *(self.slots[name] for name in method.signal.shared_names[1:])]

    def byte_views(self) -> list[memoryview]:
        """Its bytes, vector by vector, not copied."""
        vectors = [self.anchor, *(self.slots[name] for name in sorted(self.slots))]
        return [vector.numpy().data for vector in vectors]

    @classmethod
    def from_bytes(cls, raw: bytearray, numel: int, method: Method) -> "OuterState":
        """Raises MalformedError on a wrong size or a number that is not finite."""
        names = method.slots
        if len(raw) != state_bytes(numel, method):
            raise MalformedError(f"a state of {len(raw)} bytes, {state_bytes(numel, method)} are expected")
        sizes = [numel, *(method.slot_numel(name, numel) for name in names)]
        vectors = torch.split(torch.frombuffer(raw, dtype=torch.float32), sizes)
        if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
            raise MalformedError("a state that is not finite")
        return cls(vectors[0], dict(zip(names, vectors[1:], strict=True)))


def state_bytes(numel: int, method: Method) -> int:
    """Size of the serialized state."""
    return FLOAT_BYTES * (numel + sum(method.slot_numel(name, numel) for name in method.slots))


def blobs_to_apply(commit: Commit, signed_contributions: SignedContributions) -> tuple[Blob, ...]:
    """What it takes to apply this share of a commit."""
    return commit.parts or tuple(entry.body.parts[0] for entry in signed_contributions)


class RoundCompute:
    """The arithmetic on blobs that one round asks for. Every method may take long: call it in a worker thread.

    `decay`: what is left of the run's learning rate at a local step, as a share of 1.
    """

    def __init__(self, program: RoundPlanner, store: BlobAccess, rate_decay: Callable[[int], float]) -> None:
        self._program = program
        self._merger = Aggregator(program)
        self._store = store
        self._rate_decay = rate_decay
        self._decoded: dict[tuple[Digest, int, int], SparseVector] = {}  # messages of the open round

    def check_part(self, blob: Blob, round_number: int, part: int) -> None:
        """Raises MalformedError unless the blob is a well-formed payload of that part."""
        try:
            vector = self._merger.decode_part(round_number, self._store.view(blob.digest), part)
        except OptimError as error:
            raise MalformedError(f"a payload does not decode: {error}") from error
        if isinstance(vector, SparseVector):
            self._cache_decoded((blob.digest, round_number, part), vector)

    def reduce_part(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> Blob:
        """One part of every contribution, summed in this order and encoded once. Raises MalformedError."""
        try:
            payloads = [self._payload(contribution.parts[part], round_number, part) for contribution in contributions]
            reduced = self._merger.reduce_part(round_number, part, payloads, self._weights(round_number, contributions))
        except OptimError as error:
            raise MalformedError(f"a contribution does not decode: {error}") from error
        return self._store.put_in_memory(reduced)

    def apply_commit(self, state: OuterState, commit: Commit, signed_contributions: SignedContributions) -> OuterState:
        """The state after a commit. `share`: what of it is applied here, its blobs all in the store; none leaves the
        state as it is. Raises MalformedError."""
        if not signed_contributions:
            return state
        number, contributions = commit.round, [statement.body for statement in signed_contributions]
        memory = {AGGREGATION_STATE: clone(state.slots[AGGREGATION_STATE])} if AGGREGATION_STATE in state.slots else {}
        try:
            payloads = [
                self._payload(blob, number, part if commit.parts else 0)
                for part, blob in enumerate(blobs_to_apply(commit, signed_contributions))
            ]
            weights = self._weights(number, contributions)
            merged = self._merger.merge(number, payloads, weights, memory.get(AGGREGATION_STATE))
        except OptimError as error:
            raise MalformedError(f"the commit of round {number} does not decode: {error}") from error
        plan, decay = self._program.plan(number), self._rate_decay(self._program.steps_before(number))
        slots = {**state.slots, **memory}
        anchor, slots = self._program.apply_outer_step(plan, state.anchor, slots, merged, decay, weights)
        self._decoded.clear()
        return OuterState(anchor, slots)

    def step_scale(self, state: OuterState, round_number: int, signed_contributions: SignedContributions) -> float:
        """Of a whole step, that the round made by which `state` came about."""
        usual = state.slots.get(REFERENCE_WEIGHT)
        if usual is None or not signed_contributions:
            return 1.0
        return compute_step_scale(self._weights(round_number, [entry.body for entry in signed_contributions]), usual)

    def _payload(self, blob: Blob, round_number: int, part: int) -> Payload | Vector:
        """As `check` has read it, where there was room to keep that."""
        known = self._decoded.get((blob.digest, round_number, part))
        return self._store.view(blob.digest) if known is None else known

    def _cache_decoded(self, key: tuple[Digest, int, int], vector: SparseVector) -> None:
        """Until the round is applied, or another one is open; in no more memory than one dense message takes."""
        self._decoded = {known: its_vector for known, its_vector in self._decoded.items() if known[1] == key[1]}
        if sum(known.nbytes for known in self._decoded.values()) + vector.nbytes <= FLOAT_BYTES * self._program.numel:
            self._decoded[key] = vector

    def _weights(self, round_number: int, contributions: Sequence[Contribution]) -> list[float]:
        rule = self._program.plan(round_number).method.aggregate
        return [rule.weigh(contribution.tokens, contribution.age) for contribution in contributions]

    def lend_state(self, state: OuterState) -> Blob:
        """Let others fetch the state, from where it lies."""
        return self._store.lend(*state.byte_views())

    def load_state(self, blob: Blob) -> OuterState:
        raw = self._store.read(blob.digest)
        own = raw if isinstance(raw, bytearray) else bytearray(raw)
        return OuterState.from_bytes(own, self._program.numel, self._program.method)


@dataclass(frozen=True)
class SpeculativeState:
    """A state that is being computed before it is certain that it will be wanted: None where that cannot be done.
    `content`: what the commit decides, whoever may propose it."""

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
    """Where this peer stands: `state` belongs to the head of `chain`, `blob` is the state's name."""

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
        """Begin with what `after` will be asked for, while others have still to agree on it. Of two that are foreseen
        the later one counts: what has been asked for last is what can still be decided. The same may come again, as a
        proposal and in a later view."""
        if self._speculative and self._speculative.matches(self.state, commit, signed_contributions):
            return
        self._drop_speculative()
        work = asyncio.create_task(
            self._compute_speculatively(self.state, commit, signed_contributions), name="foresee"
        )
        self._speculative = SpeculativeState(self.state, commit.content_digest, signed_contributions, work)

    def _drop_speculative(self) -> None:
        if self._speculative is not None:
            self._speculative.task.cancel()
        self._speculative = None

    async def _compute_speculatively(
        self, state: OuterState, commit: Commit, signed_contributions: SignedContributions
    ) -> OuterState | None:
        with suppress(PeerFault, MissingFileError, StorageError):  # whoever wants it for certain will hear why
            computed: OuterState = await self._run_in_thread(
                self._compute.apply_commit, state, commit, signed_contributions
            )
            return computed
        return None

    async def compute_next(
        self, commit: SignedMessage[Commit], signed_contributions: SignedContributions
    ) -> OuterState:
        """The state that a commit leads to. The blobs of `share` must be in the store; nothing changes here yet.

        Raises StaleError or MalformedError.
        """
        self.chain.head_after([commit])
        foreseen, self._speculative = self._speculative, None
        if (
            foreseen
            and foreseen.matches(self.state, commit.body, signed_contributions)
            and (known := await foreseen.task)
        ):
            return known
        state: OuterState = await self._run_in_thread(
            self._compute.apply_commit, self.state, commit.body, signed_contributions
        )
        return state

    async def advance(self, commit: SignedMessage[Commit], state: OuterState) -> None:
        """Go to the state that `after` has computed; head, state and blob change together.

        It is a step of its own because to name a state takes as long as to read all of it, and a trainer need not wait
        for that, nor any round on this machine. Raises StaleError, and nothing changes.
        """
        blob = await self._run_at_low_priority(self._compute.lend_state, state)
        self.chain.append(commit)
        self.state = state
        self.blob = blob

    def step_scale(self, commit: Commit, signed_contributions: SignedContributions) -> float:
        """Of a whole step, that the last round made."""
        return self._compute.step_scale(self.state, commit.round, signed_contributions)

    async def install_state(self, head: ChainHead, blob: Blob, commits: Sequence[SignedMessage[Commit]]) -> None:
        """Another chain: its head, its state (in the store) and commits of it that follow one another; they are kept
        where they lead to its head. MalformedError: nothing has changed."""
        state = await self._run_in_thread(self._compute.load_state, blob)
        self._drop_speculative()
        self.chain.switch_to(head, commits if commits and commits[-1].body.round == head.round - 1 else ())
        self.state = state
        self.blob = blob
