"""Blobs in memory, and the arithmetic on them.

All bytes lie here once; which peer holds which is the peers' own affair. A computation whose inputs have the same
digests has the same result, so each is done once for all peers: they still agree only if their inputs did.
"""

from collections.abc import Callable, Sequence

from node.daemon.replica import OuterState, Share, Workshop, blobs_of
from optim.program import Program
from protocol.blobs.blob import Blob, Bytes
from protocol.errors import MalformedError, MissingFileError
from protocol.rounds.statements import Commit, Contribution, Digest

KEPT_ROUNDS = 6
Applied = tuple[OuterState, Blob]


class MemoryStore:
    """What a Workshop asks of a store."""

    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}
        self._rounds: dict[Digest, int] = {}
        self.round = 0  # the newest

    def put(self, *data: Bytes) -> Blob:
        blob = Blob.of(*data)
        self._blobs.setdefault(blob.digest, b"".join(data))
        self._rounds[blob.digest] = self.round
        return blob

    def hold(self, data: Bytes) -> Blob:
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
        for digest in [known for known, put in self._rounds.items() if put < number]:
            del self._blobs[digest], self._rounds[digest]


class Vault:
    """`initial` is the state that every run begins with; `replicas`: how many different ones there may be after a
    round."""

    def __init__(self, program: Program, decay: Callable[[int], float], initial: OuterState, replicas: int) -> None:
        self._store = MemoryStore()
        self._workshop = Workshop(program, self._store, decay)
        self._replicas = replicas
        self._applied: dict[tuple[Digest, ...], Applied] = {}
        self._checked: dict[tuple[Digest, int, int], bool] = {}
        self.initial = initial, self._workshop.keep(initial)

    def put(self, data: bytes) -> Blob:
        return self._store.put(data)

    def read(self, blob: Blob) -> bytes:
        return self._store.read(blob.digest)

    def payloads(self, parts: Sequence[Blob]) -> list[bytes]:
        """Of a message; none at all where it is forgotten."""
        try:
            return [self.read(blob) for blob in parts]
        except MissingFileError:
            return []

    def is_well_formed(self, blob: Blob, round_number: int, part: int) -> bool:
        key = blob.digest, round_number, part
        if key not in self._checked:
            try:
                self._workshop.check(blob, round_number, part)
                self._checked[key] = True
            except (MalformedError, MissingFileError):  # or it has travelled for longer than anybody wants it
                self._checked[key] = False
        return self._checked[key]

    def reduce(self, round_number: int, part: int, contributions: Sequence[Contribution]) -> Blob:
        return self._workshop.reduce(round_number, part, contributions)

    def apply(self, before: Applied, commit: Commit, share: Share) -> Applied:
        weights = (entry.body.tokens.to_bytes(8, "big") + bytes([entry.body.age]) for entry in share)
        key = (before[1].digest, *(blob.digest for blob in blobs_of(commit, share)), *weights)
        if key not in self._applied:
            after = self._workshop.apply(before[0], commit, share)
            self._applied[key] = after, self._workshop.keep(after)
        return self._applied[key]

    def enter(self, number: int) -> None:
        """A round begins somewhere: keep what the last few may still ask for."""
        if number > self._store.round:
            self._store.round = number
            self._store.forget_before(number - KEPT_ROUNDS)
            while len(self._applied) > KEPT_ROUNDS * self._replicas:
                del self._applied[next(iter(self._applied))]
            self._checked.clear()
