"""Describe how a contribution was made, so that another peer can repeat it and compare every bit.

The work between two contributions of a peer is a function of its inner state after the first one, of the anchors that
it applied meanwhile, and of its text: the seed, its key and the position decide the order of the text. A work record
names all of these. It is a blob that the contribution names, so a peer cannot change it later. The state after one
contribution is the state before the next one, and the record names the record before it, so a peer cannot invent an
inner state either.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from protocol.blobs.blob import MAX_BLOB_BYTES, Blob
from protocol.consensus.messages.contributions import MAX_WORK_RECORD_BYTES
from protocol.errors import LimitError, MalformedError
from protocol.fault_words import describe_faults
from protocol.manifest.data import MAX_SOURCES, NUMBER_BITS, PLACE_BITS
from protocol.signing import MAX_ROUND

Outcome = Literal["included", "excluded", "lost", "none"]  # of the contribution before, as its trainer learns it
MAX_TRACED_ANCHORS = 8
MAX_STEPS = 2**24
MAX_POSITION = 2 ** (NUMBER_BITS + PLACE_BITS * MAX_SOURCES) - 1
MAX_OBSTACLE_CHARACTERS = 64
MAX_THREADS = 256
HexDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
RoundNumber = Annotated[int, Field(ge=0, le=MAX_ROUND)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AppliedAnchor(_Part):
    """An anchor that the trainer applied `steps` inner steps after its last contribution, with that one's outcome."""

    steps: int = Field(ge=0, le=MAX_STEPS)
    round: RoundNumber
    outcome: Outcome


class WorkTrace(_Part):
    """The steps and anchors between two contributions, in their order.

    `start`: the round whose anchor a new trainer began with; None if it continues from its last contribution.
    `obstacle`: why nobody else can repeat the work; empty if others can.
    """

    steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    anchors: tuple[AppliedAnchor, ...] = Field(default=(), max_length=MAX_TRACED_ANCHORS)
    start: RoundNumber | None = None
    obstacle: str = Field(default="", max_length=MAX_OBSTACLE_CHARACTERS)


class Conditions(_Part):
    """Everything but the state and the anchors on which the last bit of an inner step depends.

    `device` names the kind of device and the version of torch, `text` the text that the peer trains on.
    """

    device: str = Field(default="", max_length=96)
    text: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    threads: int = Field(default=1, ge=1, le=MAX_THREADS)
    microbatch: int = Field(default=1, ge=1, le=2**20)


class BlobName(_Part):
    """The name of a blob."""

    digest: HexDigest
    size: int = Field(ge=1, le=MAX_BLOB_BYTES)

    @classmethod
    def of(cls, blob: Blob) -> Self:
        """Return the name of a blob."""
        return cls(digest=blob.name, size=blob.size)

    @property
    def blob(self) -> Blob:
        return Blob(bytes.fromhex(self.digest), self.size)


class WorkRecord(_Part):
    """The work that went into one contribution.

    `before` is the state after the contribution that `previous` describes; both are absent for the first one.
    """

    round: RoundNumber = Field(description="the round that the contribution was made for")
    position: int = Field(ge=0, le=MAX_POSITION, description="in the peer's order of the text, before the first step")
    before: BlobName | None
    after: BlobName | None
    previous: BlobName | None
    trace: WorkTrace
    conditions: Conditions

    def to_bytes(self) -> bytes:
        return self.model_dump_json().encode()

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray | memoryview) -> Self:
        """Parse a record. Raises MalformedError or LimitError."""
        if len(raw) > MAX_WORK_RECORD_BYTES:
            raise LimitError(f"a work record has at most {MAX_WORK_RECORD_BYTES} bytes")
        try:
            record = cls.model_validate_json(bytes(raw), strict=True)
        except ValidationError as error:
            raise MalformedError(f"not a work record: {describe_faults(error)}") from error
        return record

    def find_obstacle(self) -> str:
        """Return why this work cannot be repeated; empty if it can."""
        if self.trace.obstacle:
            return self.trace.obstacle
        if self.after is None:
            return "no state after it"
        if self.before is None and self.trace.start is None:
            return "no state before it"
        return ""

    @property
    def anchor_rounds(self) -> tuple[int, ...]:
        """Return the rounds whose anchors the work needs."""
        start = () if self.trace.start is None or self.before is not None else (self.trace.start,)
        return tuple(dict.fromkeys([*start, *(anchor.round for anchor in self.trace.anchors)]))
