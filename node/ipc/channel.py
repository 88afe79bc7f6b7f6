"""Exchange small JSON messages between a daemon and its trainer over a socket pair.

A frame is a length (4 bytes, big endian) and that many bytes of JSON, at most MAX_MESSAGE_BYTES. Everything large is in
shared memory. The daemon sends TrainerConfig first and the trainer answers Ready; afterwards both sides send at any
time. The end of the stream means that the other process is gone.

The trainer's end blocks (TrainerChannel), the daemon's does not (DaemonChannel). Every write has a deadline.
"""

import asyncio
import select
import socket
import time
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from node.data.skipped_rows import SkipReason
from node.ipc.activation_memory import SlotSizes
from node.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    MicrobatchDrawn,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from node.options import TrainerOptions
from protocol.audits.work import Conditions, Outcome, WorkTrace
from protocol.errors import MalformedError
from protocol.fault_words import describe_faults
from protocol.manifest import TrainSection

MAX_MESSAGE_BYTES = 2 * 1024 * 1024
WRITE_SECONDS = 30.0
_LENGTH_BYTES = 4
M = TypeVar("M")

ContributionOutcome = Outcome
Activity = Literal["compute", "encode", "adopt", "wait", "idle", "evaluate", "snapshot", "pause"]


class ChannelClosed(Exception):  # noqa: N818
    """The other process is gone or does not read."""


class _IpcMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageConfig(_IpcMessage):
    """The stage that a trainer serves, and the slots of the activation memory that it inherits."""

    stage: int = Field(ge=0)
    slots: SlotSizes


class TrainerConfig(_IpcMessage):
    """The first message to a trainer: everything it needs apart from the shared memory."""

    kind: Literal["config"] = "config"
    manifest: str = Field(description="TOML")
    base: str = Field(description="folder against which the manifest's data paths are resolved")
    blobs: str = Field(default="", description="folder of the blob store, which holds earlier contributions")
    peer_id: str
    options: TrainerOptions = TrainerOptions()
    round: int = Field(ge=0, description="round whose anchor a trainer without a snapshot starts from")
    train: TrainSection | None = Field(default=None, description="in that round, if the organiser has revised it")
    validation_tokens: int = Field(default=65_536, ge=1, description="most tokens that one evaluation reads")
    stage: StageConfig | None = Field(default=None, description="None: the trainer has the whole model")


class ContributionHeader(_IpcMessage):
    """A contribution to `round`; its parts are in the outbox, one after another, until its outcome arrives.

    Tokens, steps and mean loss count from the last included contribution. `serial` counts the trainer's contributions.
    `trace` and `conditions` are for audits (`node.audits`).
    """

    kind: Literal["message"] = "message"
    serial: int = Field(default=0, ge=0)
    round: int
    sizes: tuple[int, ...]
    tokens: int
    steps: int
    loss: FiniteFloat
    trace: WorkTrace = WorkTrace()
    conditions: Conditions = Conditions()


class RevisedOutcome(_IpcMessage):
    """An earlier contribution whose outcome differs on another chain; `parts` are its blobs' names in the store."""

    header: ContributionHeader
    parts: tuple[str, ...]
    outcome: ContributionOutcome


class ApplyAnchor(_IpcMessage):
    """The anchor of `round` is in shared memory; `outcome` is that of the outstanding contribution.

    "excluded": no round has it, and none will. "lost": the outcome is unknown, so it is neither sent again nor returned
    to the residual. "none": not decided yet.
    """

    kind: Literal["adopt"] = "adopt"
    round: int = Field(ge=0)
    outcome: ContributionOutcome
    steps: int | None = Field(default=None, ge=1, description="inner steps for the round, if fewer than planned")
    revised: tuple[RevisedOutcome, ...] = Field(default=(), description="repeated with every anchor; applied once")
    train: TrainSection | None = Field(default=None, description="from this anchor on; None: as before")


class SetResting(_IpcMessage):
    """Make no steps until further notice, or go on: the organiser has paused the run, or resumed it."""

    kind: Literal["rest"] = "rest"
    is_resting: bool


class SubmitEarly(_IpcMessage):
    """Other peers are waiting: submit the contribution to `round` after the current step."""

    kind: Literal["hurry"] = "hurry"
    round: int = Field(ge=0)


class Evaluate(_IpcMessage):
    """Measure the validation loss of the anchor of `round`."""

    kind: Literal["evaluate"] = "evaluate"
    round: int = Field(ge=0)


class TakeSnapshot(_IpcMessage):
    kind: Literal["snapshot"] = "snapshot"


class Stop(_IpcMessage):
    """Write a last snapshot, send Stopped and exit."""

    kind: Literal["stop"] = "stop"


class Ready(_IpcMessage):
    """The trainer trains from `step` on.

    A daemon that is at another round, or knows the outcome of the outstanding contribution, sends ApplyAnchor again,
    because messages to a trainer that died are lost.
    """

    kind: Literal["ready"] = "ready"
    device: str
    step: int
    round: int
    outstanding: int | None = Field(
        description="round of the outstanding contribution, which follows this message again"
    )


class DeviceUse(_IpcMessage):
    """The use of an accelerator by all programs; memory in bytes."""

    share: float | None = Field(default=None, ge=0, le=1, description="of the time; None: the driver does not say")
    memory: int = Field(ge=0)
    memory_total: int = Field(ge=0)


class TrainerProgress(_IpcMessage):
    """Totals since the start of the run, over restarts; `loss` is the mean since the last message, in nats.

    Learning rate and gradient norm, before clipping, are those of the newest step.
    """

    kind: Literal["progress"] = "progress"
    step: int
    tokens: int
    loss: FiniteFloat
    tokens_per_second: FiniteFloat
    seconds: dict[Activity, FiniteFloat]
    learning_rate: FiniteFloat = 0.0
    gradient_norm: FiniteFloat = 0.0
    device_use: DeviceUse | None = None


class PauseChanged(_IpcMessage):
    """The trainer pauses for this reason; an empty reason means that it resumes."""

    kind: Literal["pausing"] = "pausing"
    reason: str


class TrainerWarning(_IpcMessage):
    """An error from which the trainer recovered; the daemon counts it and logs the line."""

    kind: Literal["mishap"] = "mishap"
    reason: Literal["step skipped", "out of memory", "memory not pinned", "contribution missing", "work dropped"]
    line: str


class RowsSkipped(_IpcMessage):
    """Rows of the text that could not be used since the last message, by reason; the daemon logs the lines."""

    kind: Literal["skipped"] = "skipped"
    counts: dict[SkipReason, PositiveInt]
    lines: tuple[str, ...]


class AnchorApplied(_IpcMessage):
    kind: Literal["adopted"] = "adopted"
    round: int


class Evaluated(_IpcMessage):
    kind: Literal["evaluated"] = "evaluated"
    round: int
    loss: FiniteFloat
    tokens: int


class Snapshotted(_IpcMessage):
    kind: Literal["snapshotted"] = "snapshotted"
    step: int


class Stopped(_IpcMessage):
    kind: Literal["stopped"] = "stopped"


class Failed(_IpcMessage):
    """The trainer cannot continue, and a restart would not help."""

    kind: Literal["failed"] = "failed"
    reason: str
    exit_code: int


class Crashed(_IpcMessage):
    """An unexpected error ends the trainer; a restart may help."""

    kind: Literal["crashed"] = "crashed"
    reason: str = Field(description="one line: error, file and line")
    exit_code: int = Field(description="code of the error that ends the node if the trainer crashes so again")


ToTrainer = Annotated[
    TrainerConfig
    | ApplyAnchor
    | SetResting
    | SubmitEarly
    | Evaluate
    | TakeSnapshot
    | DrawMicrobatch
    | ComputeStage
    | TakeStageStep
    | Stop,
    Field(discriminator="kind"),
]
FromTrainer = Annotated[
    Ready
    | TrainerProgress
    | ContributionHeader
    | PauseChanged
    | TrainerWarning
    | RowsSkipped
    | AnchorApplied
    | Evaluated
    | Snapshotted
    | MicrobatchDrawn
    | StageComputed
    | StageStepped
    | Stopped
    | Failed
    | Crashed,
    Field(discriminator="kind"),
]
_TO_TRAINER: Final[TypeAdapter[ToTrainer]] = TypeAdapter(ToTrainer)
_FROM_TRAINER: Final[TypeAdapter[FromTrainer]] = TypeAdapter(FromTrainer)


class TrainerChannel:
    """The trainer's blocking end.

    Raises ChannelClosed when the daemon is gone, and MalformedError for bytes that are not a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()

    def send(self, message: FromTrainer) -> None:
        self._socket.settimeout(WRITE_SECONDS)
        try:
            self._socket.sendall(_encode_frame(message))
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, timeout_seconds: float = 0.0) -> ToTrainer | None:
        """Return the next message, or None if none is complete in time; 0 only polls."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            body = self._next_body()
            if body is not None:
                return _parse_message(_TO_TRAINER, body)
            readable, _, _ = select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            self._fill_buffer()

    def close(self) -> None:
        self._socket.close()

    def _fill_buffer(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the daemon closed the channel")
        self._buffer += data

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + _decode_length(bytes(self._buffer[:_LENGTH_BYTES]))
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return body


class DaemonChannel:
    """The daemon's asyncio end; it raises the same errors as TrainerChannel."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket) -> "DaemonChannel":
        """Open the channel and take ownership of the socket."""
        connection.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connection, limit=MAX_MESSAGE_BYTES))

    async def send(self, message: ToTrainer) -> None:
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                self._writer.write(_encode_frame(message))
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise ChannelClosed(f"the trainer does not read: {error}") from error

    async def receive(self) -> FromTrainer:
        """Wait for the next message without a deadline; the death of the trainer ends the wait."""
        try:
            length = _decode_length(await self._reader.readexactly(_LENGTH_BYTES))
            return _parse_message(_FROM_TRAINER, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed("the trainer closed the channel") from error

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the trainer died before it read everything


def _encode_frame(message: BaseModel) -> bytes:
    body = message.model_dump_json().encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a message of {len(body)} bytes is too long for the channel; at most {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _decode_length(prefix: bytes) -> int:
    length = int.from_bytes(prefix, "big")
    if length > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a frame of {length} bytes is too long for the channel; at most {MAX_MESSAGE_BYTES}")
    return length


def _parse_message(adapter: TypeAdapter[M], body: bytes) -> M:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise MalformedError(f"not a message of the channel: {describe_faults(error)}") from error
