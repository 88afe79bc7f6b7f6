"""Blobs in memory and the computations on them, shared by all virtual peers.

Each blob is stored once; every peer keeps track of the blobs that it holds. Computations on inputs with equal digests
have equal results, so each is done once for all peers: peers still agree only if their inputs are equal.
"""

from collections.abc import Callable, Sequence

from node.daemon.state.outer_state import OuterState, RoundCompute, SignedContributions, blobs_to_apply
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.messages.contributions import Commit, Contribution
from protocol.consensus.messages.signed import Digest
from protocol.errors import MalformedError, MissingFileError

KEPT_ROUNDS = 6
AppliedState = tuple[OuterState, Blob]


class MemoryBlobStore:
    """A blob store in memory with the methods that RoundCompute needs."""

    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}
        self._put_in_round: dict[Digest, int] = {}
        self.newest_round = 0

    def put(self, *data: Bytes) -> Blob:
        blob = Blob.of(*data)
        self._blobs.setdefault(blob.digest, b"".join(data))
        self._put_in_round[blob.digest] = self.newest_round
        return blob

    def put_in_memory(self, data: Bytes) -> Blob:
        return self.put(data)

    def lend(self, *data: Bytes) -> Blob:
        return self.put(*data)

    def read(self, digest: Digest) -> bytes:
        """Return the bytes of a blob. Raises MissingFileError if it was forgotten."""
        try:
            return self._blobs[digest]
        except KeyError as error:
            raise MissingFileError(f"blob {digest.hex()} is not kept any more") from error

    def view(self, digest: Digest) -> bytes:
        return self.read(digest)

    def forget_before(self, round_number: int) -> None:
        """Drop the blobs that were put in earlier rounds."""
        for digest in [known for known, put in self._put_in_round.items() if put < round_number]:
            del self._blobs[digest], self._put_in_round[digest]


class SharedCompute:
    """Computes each round's results once for all peers.

    `initial` is the state at the start of the run; `states_per_round` is the number of different states that may exist
    after a round.
    """

    def __init__(
        self,
        planner: RoundPlanner,
        rate_decay: Callable[[int, int, int], float],
        initial: OuterState,
        states_per_round: int,
    ) -> None:
        self._store = MemoryBlobStore()
        self._compute = RoundCompute(planner, self._store, rate_decay)
        self._states_per_round = states_per_round
        self._applied: dict[tuple[Digest, ...], AppliedState] = {}
        self._well_formed: dict[tuple[Digest, int, int], bool] = {}
        self.initial = initial, self._compute.lend_state(initial)

    def put(self, *data: Bytes) -> Blob:
        return self._store.put(*data)

    def read(self, blob: Blob) -> bytes:
        return self._store.read(blob.digest)

    def read_payloads(self, parts: Sequence[Blob]) -> list[bytes]:
        """Return the payloads of a contribution; none if any of them was forgotten."""
        try:
            return [self.read(blob) for blob in parts]
        except MissingFileError:
            return []

    def is_well_formed(self, blob: Blob, round_number: int, part: int) -> bool:
        """Return whether the blob is a valid part of a contribution."""
        key = blob.digest, round_number, part
        if key not in self._well_formed:
            try:
                self._compute.check_part(blob, round_number, part)
                self._well_formed[key] = True
            except (MalformedError, MissingFileError):  # a missing blob arrived too late to be of use
                self._well_formed[key] = False
        return self._well_formed[key]

    def reduce_part(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> Blob:
        """Reduce one part of the contributions; returns the result's blob."""
        return self._compute.reduce_part(round_number, part, contributions).blob

    def apply_commit(
        self, before: AppliedState, commit: Commit, signed_contributions: SignedContributions, tokens: int = 0
    ) -> AppliedState:
        """Return the state after a commit; `tokens` are those of the run before it."""
        counted = commit.counted_tokens
        weights = (counted[entry.sender].to_bytes(8, "big") + bytes([entry.body.age]) for entry in signed_contributions)
        key = (
            before[1].digest,
            tokens.to_bytes(8, "big"),
            *(blob.digest for blob in blobs_to_apply(commit, signed_contributions)),
            *weights,
        )
        if key not in self._applied:
            after = self._compute.apply_commit(before[0], commit, signed_contributions, tokens)
            self._applied[key] = after, self._compute.lend_state(after)
        return self._applied[key]

    def begin_round(self, round_number: int) -> None:
        """Keep only the blobs and states of recent rounds when the first peer begins a new round."""
        if round_number > self._store.newest_round:
            self._store.newest_round = round_number
            self._store.forget_before(round_number - KEPT_ROUNDS)
            while len(self._applied) > KEPT_ROUNDS * self._states_per_round:
                del self._applied[next(iter(self._applied))]
            self._well_formed.clear()
