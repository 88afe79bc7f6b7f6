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

from node.daemon.workers import Work
from optim.codecs.codec import Payload
from optim.errors import OptimError
from optim.exchange import Merger
from optim.memory import copy
from optim.method import MEMORY, USUAL, Method
from optim.program import Program
from optim.usual import share_of
from optim.vectors import SparseVector, Vector
from protocol.blobs.blob import Blob, Bytes
from protocol.errors import MalformedError, MissingFileError, PeerFault, StorageError
from protocol.rounds.chain import Chain, Head
from protocol.rounds.statements import Commit, Contribution, Digest, Statement

FLOAT_BYTES = 4
Share = tuple[Statement[Contribution], ...]


class Store(Protocol):
    """Where blobs lie: on disk or in memory, or in the simulator's."""

    def hold(self, data: Bytes) -> Blob: ...

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
        sizes = {name: method.size_of(name, anchor.numel()) for name in method.slots}
        return cls(anchor, {name: torch.zeros(size) for name, size in sizes.items()})

    def shared(self, method: Method) -> list[Tensor]:
        """What a trainer adopts: the anchor and those of its own vectors that are agreed too."""
        return [self.anchor, *(self.slots[name] for name in method.signal.shares[1:])]

    def views(self) -> list[memoryview]:
        """Its bytes, vector by vector, not copied."""
        vectors = [self.anchor, *(self.slots[name] for name in sorted(self.slots))]
        return [vector.numpy().data for vector in vectors]

    @classmethod
    def from_bytes(cls, raw: bytearray, numel: int, method: Method) -> "OuterState":
        """Raises MalformedError on a wrong size or a number that is not finite."""
        names = method.slots
        if len(raw) != state_bytes(numel, method):
            raise MalformedError(f"a state of {len(raw)} bytes, {state_bytes(numel, method)} are expected")
        sizes = [numel, *(method.size_of(name, numel) for name in names)]
        vectors = torch.split(torch.frombuffer(raw, dtype=torch.float32), sizes)
        if not all(bool(torch.isfinite(vector).all()) for vector in vectors):
            raise MalformedError("a state that is not finite")
        return cls(vectors[0], dict(zip(names, vectors[1:], strict=True)))


def state_bytes(numel: int, method: Method) -> int:
    """Size of the serialized state."""
    return FLOAT_BYTES * (numel + sum(method.size_of(name, numel) for name in method.slots))


def blobs_of(commit: Commit, share: Share) -> tuple[Blob, ...]:
    """What it takes to apply this share of a commit."""
    return commit.parts or tuple(entry.body.parts[0] for entry in share)


class Workshop:
    """The arithmetic on blobs that one round asks for. Every method may take long: call it in a worker thread.

    `decay`: what is left of the run's learning rate at a local step, as a share of 1.
    """

    def __init__(self, program: Program, store: Store, decay: Callable[[int], float]) -> None:
        self._program = program
        self._merger = Merger(program)
        self._store = store
        self._decay = decay
        self._read: dict[tuple[Digest, int, int], SparseVector] = {}  # messages of the open round

    def check(self, blob: Blob, round_number: int, part: int) -> None:
        """Raises MalformedError unless the blob is a well-formed payload of that part."""
        try:
            vector = self._merger.read(round_number, self._store.view(blob.digest), part)
        except OptimError as error:
            raise MalformedError(f"a payload does not decode: {error}") from error
        if isinstance(vector, SparseVector):
            self._remember((blob.digest, round_number, part), vector)

    def reduce(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> Blob:
        """One part of every contribution, summed in this order and encoded once. Raises MalformedError."""
        try:
            payloads = [self._payload(contribution.parts[part], round_number, part) for contribution in contributions]
            reduced = self._merger.reduce_part(round_number, part, payloads, self._weights(round_number, contributions))
        except OptimError as error:
            raise MalformedError(f"a contribution does not decode: {error}") from error
        return self._store.hold(reduced)

    def apply(self, state: OuterState, commit: Commit, share: Share) -> OuterState:
        """The state after a commit. `share`: what of it is applied here, its blobs all in the store; none leaves the
        state as it is. Raises MalformedError."""
        if not share:
            return state
        number, contributions = commit.round, [statement.body for statement in share]
        memory = {MEMORY: copy(state.slots[MEMORY])} if MEMORY in state.slots else {}
        try:
            payloads = [
                self._payload(blob, number, part if commit.parts else 0)
                for part, blob in enumerate(blobs_of(commit, share))
            ]
            weights = self._weights(number, contributions)
            merged = self._merger.merge(number, payloads, weights, memory.get(MEMORY))
        except OptimError as error:
            raise MalformedError(f"the commit of round {number} does not decode: {error}") from error
        plan, decay = self._program.plan(number), self._decay(self._program.steps_before(number))
        slots = {**state.slots, **memory}
        anchor, slots = self._program.moved(plan, state.anchor, slots, merged, decay, weights)
        self._read.clear()
        return OuterState(anchor, slots)

    def step_share(self, state: OuterState, round_number: int, share: Share) -> float:
        """Of a whole step, that the round made by which `state` came about."""
        usual = state.slots.get(USUAL)
        if usual is None or not share:
            return 1.0
        return share_of(self._weights(round_number, [entry.body for entry in share]), usual)

    def _payload(self, blob: Blob, round_number: int, part: int) -> Payload | Vector:
        """As `check` has read it, where there was room to keep that."""
        known = self._read.get((blob.digest, round_number, part))
        return self._store.view(blob.digest) if known is None else known

    def _remember(self, key: tuple[Digest, int, int], vector: SparseVector) -> None:
        """Until the round is applied, or another one is open; in no more memory than one dense message takes."""
        self._read = {known: its_vector for known, its_vector in self._read.items() if known[1] == key[1]}
        if sum(known.nbytes for known in self._read.values()) + vector.nbytes <= FLOAT_BYTES * self._program.numel:
            self._read[key] = vector

    def _weights(self, round_number: int, contributions: Sequence[Contribution]) -> list[float]:
        rule = self._program.plan(round_number).method.aggregate
        return [rule.weight(contribution.tokens, contribution.age) for contribution in contributions]

    def keep(self, state: OuterState) -> Blob:
        """Let others fetch the state, from where it lies."""
        return self._store.lend(*state.views())

    def load(self, blob: Blob) -> OuterState:
        raw = self._store.read(blob.digest)
        own = raw if isinstance(raw, bytearray) else bytearray(raw)
        return OuterState.from_bytes(own, self._program.numel, self._program.method)


@dataclass(frozen=True)
class Foreseen:
    """A state that is being computed before it is certain that it will be wanted: None where that cannot be done.
    `content`: what the commit decides, whoever may propose it."""

    before: OuterState
    content: Digest
    share: Share
    work: asyncio.Task[OuterState | None]

    def is_after(self, before: OuterState, commit: Commit, share: Share) -> bool:
        return self.before is before and self.content == commit.content and self.share == share


class Replica:
    """Where this peer stands: `state` belongs to the head of `chain`, `blob` is the state's name."""

    def __init__(self, chain: Chain, state: OuterState, workshop: Workshop, work: Work, aside: Work) -> None:
        self.chain = chain
        self.state = state
        self.blob = workshop.keep(state)
        self._workshop = workshop
        self._work = work
        self._aside = aside
        self._foreseen: Foreseen | None = None

    def foresee(self, commit: Commit, share: Share) -> None:
        """Begin with what `after` will be asked for, while others have still to agree on it. Of two that are foreseen
        the later one counts: what has been asked for last is what can still be decided. The same may come again, as a
        proposal and in a later view."""
        if self._foreseen and self._foreseen.is_after(self.state, commit, share):
            return
        self._forget()
        work = asyncio.create_task(self._computed(self.state, commit, share), name="foresee")
        self._foreseen = Foreseen(self.state, commit.content, share, work)

    def _forget(self) -> None:
        if self._foreseen is not None:
            self._foreseen.work.cancel()
        self._foreseen = None

    async def _computed(self, state: OuterState, commit: Commit, share: Share) -> OuterState | None:
        with suppress(PeerFault, MissingFileError, StorageError):  # whoever wants it for certain will hear why
            computed: OuterState = await self._work(self._workshop.apply, state, commit, share)
            return computed
        return None

    async def after(self, commit: Statement[Commit], share: Share) -> OuterState:
        """The state that a commit leads to. The blobs of `share` must be in the store; nothing changes here yet.

        Raises StaleError or MalformedError.
        """
        self.chain.would_lead_to([commit])
        foreseen, self._foreseen = self._foreseen, None
        if foreseen and foreseen.is_after(self.state, commit.body, share) and (known := await foreseen.work):
            return known
        state: OuterState = await self._work(self._workshop.apply, self.state, commit.body, share)
        return state

    async def advance(self, commit: Statement[Commit], state: OuterState) -> None:
        """Go to the state that `after` has computed; head, state and blob change together.

        It is a step of its own because to name a state takes as long as to read all of it, and a trainer need not wait
        for that, nor any round on this machine. Raises StaleError, and nothing changes.
        """
        blob = await self._aside(self._workshop.keep, state)
        self.chain.append(commit)
        self.state = state
        self.blob = blob

    def step_share(self, commit: Commit, share: Share) -> float:
        """Of a whole step, that the last round made."""
        return self._workshop.step_share(self.state, commit.round, share)

    async def take_over(self, head: Head, blob: Blob, commits: Sequence[Statement[Commit]]) -> None:
        """Another chain: its head, its state (in the store) and commits of it that follow one another; they are kept
        where they lead to its head. MalformedError: nothing has changed."""
        state = await self._work(self._workshop.load, blob)
        self._forget()
        self.chain.restart(head, commits if commits and commits[-1].body.round == head.round - 1 else ())
        self.state = state
        self.blob = blob
