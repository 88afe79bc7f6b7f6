"""Blobs in memory, and the arithmetic on them.

All bytes lie here once; which peer holds which is the peers' own affair. A computation whose inputs have the same
digests has the same result, so each is done once for all peers: they still agree only if their inputs did.
"""

from collections.abc import Callable, Sequence

from node.daemon.outer_state import OuterState, RoundCompute, SignedContributions, blobs_to_apply
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.messages import Commit, Contribution, Digest
from protocol.errors import MalformedError, MissingFileError

KEPT_ROUNDS = 6
AppliedState = tuple[OuterState, Blob]


class MemoryBlobStore:
    """What a Workshop asks of a store."""

    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}
        self._put_in_round: dict[Digest, int] = {}
        self.newest_round = 0  # the newest

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
        """MissingFileError where it is forgotten."""
        try:
            return self._blobs[digest]
        except KeyError as error:
            raise MissingFileError(f"blob {digest.hex()} is not kept any more") from error

    def view(self, digest: Digest) -> bytes:
        return self.read(digest)

    def forget_before(self, number: int) -> None:
        """Drop what was put before that round."""
        for digest in [known for known, put in self._put_in_round.items() if put < number]:
            del self._blobs[digest], self._put_in_round[digest]


class SharedCompute:
    """`initial` is the state that every run begins with; `replicas`: how many different ones there may be after a
    round."""

    def __init__(
        self, planner: RoundPlanner, rate_decay: Callable[[int], float], initial: OuterState, states_per_round: int
    ) -> None:
        self._store = MemoryBlobStore()
        self._compute = RoundCompute(planner, self._store, rate_decay)
        self._states_per_round = states_per_round
        self._applied: dict[tuple[Digest, ...], AppliedState] = {}
        self._well_formed: dict[tuple[Digest, int, int], bool] = {}
        self.initial = initial, self._compute.lend_state(initial)

    def put(self, data: bytes) -> Blob:
        return self._store.put(data)

    def read(self, blob: Blob) -> bytes:
        return self._store.read(blob.digest)

    def read_payloads(self, parts: Sequence[Blob]) -> list[bytes]:
        """Of a message; none at all where it is forgotten."""
        try:
            return [self.read(blob) for blob in parts]
        except MissingFileError:
            return []

    def is_well_formed(self, blob: Blob, round_number: int, part: int) -> bool:
        key = blob.digest, round_number, part
        if key not in self._well_formed:
            try:
                self._compute.check_part(blob, round_number, part)
                self._well_formed[key] = True
            except (MalformedError, MissingFileError):  # or it has travelled for longer than anybody wants it
                self._well_formed[key] = False
        return self._well_formed[key]

    def reduce_part(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> Blob:
        return self._compute.reduce_part(round_number, part, contributions)

    def apply_commit(
        self, before: AppliedState, commit: Commit, signed_contributions: SignedContributions
    ) -> AppliedState:
        weights = (entry.body.tokens.to_bytes(8, "big") + bytes([entry.body.age]) for entry in signed_contributions)
        key = (before[1].digest, *(blob.digest for blob in blobs_to_apply(commit, signed_contributions)), *weights)
        if key not in self._applied:
            after = self._compute.apply_commit(before[0], commit, signed_contributions)
            self._applied[key] = after, self._compute.lend_state(after)
        return self._applied[key]

    def begin_round(self, round_number: int) -> None:
        """A round begins somewhere: keep what the last few may still ask for."""
        if round_number > self._store.newest_round:
            self._store.newest_round = round_number
            self._store.forget_before(round_number - KEPT_ROUNDS)
            while len(self._applied) > KEPT_ROUNDS * self._states_per_round:
                del self._applied[next(iter(self._applied))]
            self._well_formed.clear()
