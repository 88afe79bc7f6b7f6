"""Exchange small messages between a daemon and its trainer over a socket pair; everything large is in shared memory.

A frame is a length (4 bytes, big endian) and that many bytes of JSON, at most MAX_MESSAGE_BYTES. The daemon sends
TrainerConfig first and the trainer answers Ready; afterwards both sides send at any time. The end of the stream means
that the other process is gone.

The trainer's end blocks (TrainerChannel), the daemon's does not (DaemonChannel). Every write has a deadline.
"""

import asyncio
import select
import socket
import threading
import time
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, TypeAdapter, ValidationError

from node.data.skipped_rows import SkipReason
from node.monitoring.status import DeviceUse
from node.options import SiteShard, TrainerOptions
from node.step_settings import StepSettings
from node.trainer.ipc.activation_memory import SlotSizes
from node.trainer.ipc.rollout_messages import RolloutFound, RolloutsJudged, RolloutsWanted
from node.trainer.ipc.stage_messages import (
    ComputeStage,
    DrawMicrobatch,
    DropStageSum,
    MicrobatchDrawn,
    StageComputed,
    StageStepped,
    TakeStageStep,
)
from protocol.audits import Conditions, Outcome, WorkTrace
from protocol.errors import MalformedError
from protocol.fault_words import describe_faults
from protocol.rollout_credits import Credits

ContributionOutcome = Outcome
Activity = Literal["compute", "encode", "adopt", "wait", "idle", "evaluate", "snapshot", "pause"]
MAX_MESSAGE_BYTES: Final = 2 * 1024 * 1024
WRITE_SECONDS: Final = 30.0
LENGTH_BYTES: Final = 4
M = TypeVar("M")


class ChannelClosed(Exception):  # noqa: N818
    """The other process is gone or does not read."""


class FrameSocket:
    """The blocking end of a stream of frames; several threads may send.

    It raises ChannelClosed when the other process is gone, and MalformedError for bytes that are not a message.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._sending = threading.Lock()

    def send(self, message: BaseModel) -> None:
        frame = encode_frame(message)
        try:
            with self._sending:
                self._socket.settimeout(WRITE_SECONDS)
                self._socket.sendall(frame)
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive_as(self, adapter: TypeAdapter[M], timeout_seconds: float | None) -> M | None:
        """Return the next message, or None if none is complete in time; 0 only polls, None waits for it."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            body = self._next_body()
            if body is not None:
                return parse_message(adapter, body)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._socket], [], [], left)[0]:
                return None
            self._fill_buffer()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _fill_buffer(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("the other process closed the channel")
        self._buffer += data

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + decode_length(bytes(self._buffer[:LENGTH_BYTES]))
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return body


def encode_frame(message: BaseModel) -> bytes:
    """Return the frame of a message. Raises MalformedError if it is too long."""
    body = message.model_dump_json().encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a message of {len(body)} bytes is too long for the channel; at most {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode_length(prefix: bytes) -> int:
    """Return the length of a frame's body. Raises MalformedError if it is above MAX_MESSAGE_BYTES."""
    length = int.from_bytes(prefix, "big")
    if length > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a frame of {length} bytes is too long for the channel; at most {MAX_MESSAGE_BYTES}")
    return length


def parse_message(adapter: TypeAdapter[M], body: bytes) -> M:
    """Return the message in a frame. Raises MalformedError for anything else."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise MalformedError(f"not a message of the channel: {describe_faults(error)}") from error


class _IpcMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageConfig(_IpcMessage):
    """The stage that a trainer serves, and the slots of the activation memory that it inherits."""

    stage: int = Field(ge=0)
    slots: SlotSizes


class SiteConfig(_IpcMessage):
    """The address at which a trainer's rank 0 waits for other machines of its site (node.trainer.site)."""

    host: str
    port: int = Field(ge=1, le=65535)
    key: str = Field(description="file of the site's key")
    shard: SiteShard = "machine"
    gather_seconds: float = Field(default=5.0, ge=0, description="time that a start waits for machines that come back")


class TrainerConfig(_IpcMessage):
    """The first message to a trainer: everything it needs apart from the shared memory."""

    kind: Literal["config"] = "config"
    manifest: str = Field(description="TOML")
    base: str = Field(description="folder to which the manifest's data paths are relative")
    blobs: str = Field(default="", description="folder of the blob store with earlier contributions")
    peer_id: str
    options: TrainerOptions = TrainerOptions()
    round: int = Field(ge=0, description="round from whose anchor a trainer without a snapshot starts")
    settings: StepSettings | None = Field(default=None, description="settings of the steps in that round")
    validation_tokens: int = Field(default=65_536, ge=1, description="most tokens that one evaluation reads")
    stage: StageConfig | None = Field(default=None, description="None: the trainer has the whole model")
    exact_step: int = Field(default=0, ge=0, description="step of that round, where steps are exact")
    site: SiteConfig | None = Field(default=None, description="None: all ranks are on this machine")
    halvings: int = Field(default=0, ge=0, le=64, description="of the microbatch, after memory ran out")
    start: int = Field(default=0, ge=0, description="number of the trainer's starts under this daemon")


class ContributionHeader(_IpcMessage):
    """A contribution to `round`; its parts are in the outbox, one after another, until its outcome arrives.

    Tokens, steps and mean loss count from the last included contribution. `serial` counts the trainer's contributions.
    `trace` and `conditions` are for audits (`node.daemon.audits`). `ledger`: of an exact step, in hexadecimal.
    `credits`: of the makers of rollouts that the steps learned from.
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
    ledger: str = ""
    credits: Credits = ()


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
    steps: int | None = Field(default=None, ge=1, description="inner steps for the round; None: as planned")
    revised: tuple[RevisedOutcome, ...] = Field(default=(), description="repeated with every anchor; applied once")
    settings: StepSettings | None = Field(default=None, description="from this anchor on; None: as before")
    exact_step: int = Field(default=0, ge=0, description="that the round makes, where steps are exact")
    is_other_chain: bool = Field(default=False, description="the anchor is of another chain")
    base: str = Field(default="", pattern="^[0-9a-f]*$", description="digest of the chain of the anchor")


class SetResting(_IpcMessage):
    """Stop making steps, or continue: the organiser has paused or resumed the run."""

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
    device_kind: str = Field(default="", description="on all devices of a kind a pass of a stage has the same bits")
    ranks: int = Field(default=1, ge=1, description="devices that train together")
    step: int
    round: int
    outstanding: int | None = Field(
        description="round of the outstanding contribution, which follows this message again"
    )
    ledger: str = Field(default="", description="microbatches of a stage since the last contribution")
    contributed: str = Field(default="", description="microbatches in the last contribution")
    exact_step: int = 0
    evaluates: bool = Field(default=True, description="answers Evaluate")
    start: int = Field(default=0, ge=0, description="as in its config")
    learned: tuple[tuple[str, int, int], ...] = Field(
        default=(), description="the place after the last rollout group of each maker: peer id, round, serial"
    )


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
    device_use: DeviceUse | None = Field(default=None, description="of all accelerators together")
    cards: tuple[DeviceUse, ...] = Field(default=(), description="by rank, if several train together")


class PauseChanged(_IpcMessage):
    """The trainer pauses for this reason; an empty reason means that it resumes."""

    kind: Literal["pausing"] = "pausing"
    reason: str


class TrainerWarning(_IpcMessage):
    """An error from which the trainer recovered; the daemon counts it and logs `line`."""

    kind: Literal["mishap"] = "mishap"
    reason: Literal[
        "step skipped",
        "out of memory",
        "memory not pinned",
        "not compiled",
        "no bf16",
        "machine refused",
        "contribution missing",
        "work dropped",
    ]
    line: str


class RowsSkipped(_IpcMessage):
    """Rows of the text that could not be used since the last message, by reason; the daemon logs the lines."""

    kind: Literal["skipped"] = "skipped"
    counts: dict[SkipReason, PositiveInt]
    lines: tuple[str, ...]


class AnchorApplied(_IpcMessage):
    kind: Literal["adopted"] = "adopted"
    round: int
    exact_step: int = 0
    base: str = Field(default="", pattern="^[0-9a-f]*$", description="as in ApplyAnchor")
    evaluation_share: FiniteFloat = Field(default=0.0, description="share of the time that validations have taken")


class Evaluated(_IpcMessage):
    kind: Literal["evaluated"] = "evaluated"
    round: int
    loss: FiniteFloat
    tokens: int
    by_source: dict[str, FiniteFloat] = Field(default={}, description="losses of a mixture by source")


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
    exit_code: int = Field(description="exit code of the node if this crash repeats")
    halve: bool = Field(default=False, description="start again with microbatches of half the size")


class Regrouping(_IpcMessage):
    """The trainer ends without a crash, to start again with other ranks; its state is in the shared memory."""

    kind: Literal["regrouping"] = "regrouping"
    reason: str


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
    | DropStageSum
    | RolloutFound
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
    | RolloutsWanted
    | RolloutsJudged
    | Stopped
    | Failed
    | Crashed
    | Regrouping,
    Field(discriminator="kind"),
]


_TO_TRAINER: Final[TypeAdapter[ToTrainer]] = TypeAdapter(ToTrainer)


_FROM_TRAINER: Final[TypeAdapter[FromTrainer]] = TypeAdapter(FromTrainer)


class TrainerChannel(FrameSocket):
    """The trainer's blocking end."""

    def receive(self, timeout_seconds: float = 0.0) -> ToTrainer | None:
        """Return the next message, or None if none is complete in time; 0 only polls."""
        return self.receive_as(_TO_TRAINER, timeout_seconds)


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
                self._writer.write(encode_frame(message))
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            raise ChannelClosed(f"the trainer does not read: {error}") from error

    async def receive(self) -> FromTrainer:
        """Wait for the next message without a deadline; the death of the trainer ends the wait."""
        try:
            length = decode_length(await self._reader.readexactly(LENGTH_BYTES))
            return parse_message(_FROM_TRAINER, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosed("the trainer closed the channel") from error

    def abort(self) -> None:
        """Close the channel without sending what is buffered."""
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # the trainer died before it read everything
