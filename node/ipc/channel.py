"""What a daemon and its trainer say to each other: small JSON messages over a socket pair.

A frame is four bytes of length (big endian) and that many bytes of JSON, at most MAX_MESSAGE_BYTES. Everything large
lies in the arena. The daemon's first message is Config; the trainer answers Ready; then each side speaks when it
must. The end of the stream means the other side is gone.

The trainer blocks (`TrainerEnd`), the daemon does not (`DaemonEnd`). Every write has a deadline.
"""

import asyncio
import select
import socket
import time
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from node.options import TrainerOptions
from protocol.errors import MalformedError

MAX_MESSAGE_BYTES = 2 * 1024 * 1024
WRITE_SECONDS = 30.0
_LENGTH_BYTES = 4
M = TypeVar("M")

ContributionOutcome = Literal["included", "excluded", "lost", "none"]
Activity = Literal["compute", "encode", "adopt", "wait", "evaluate", "snapshot", "pause"]


class ChannelClosed(Exception):  # noqa: N818
    """The other side is gone, or does not read."""


class _IpcMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrainerConfig(_IpcMessage):
    """First message to a trainer: everything it needs to know besides the arena."""

    kind: Literal["config"] = "config"
    manifest: str = Field(description="TOML")
    base: str = Field(description="folder against which the manifest's data paths are resolved")
    blobs: str = Field(default="", description="folder of the blob store, in which earlier messages lie")
    peer_id: str
    options: TrainerOptions = TrainerOptions()
    round: int = Field(ge=0, description="whose anchor a trainer without a snapshot starts from")
    validation_tokens: int = Field(default=65_536, ge=1, description="the most one evaluation reads")


class ContributionHeader(_IpcMessage):
    """The parts of the message for `round` lie one after the other in the outbox until an Adopt tells their fate.

    Tokens, steps and mean loss count from the last message that was included. `serial` counts the trainer's messages.
    """

    kind: Literal["message"] = "message"
    serial: int = Field(default=0, ge=0)
    round: int
    sizes: tuple[int, ...]
    tokens: int
    steps: int
    loss: FiniteFloat


class RevisedOutcome(_IpcMessage):
    """An earlier message, of which another chain has another fate. `parts`: its blobs, as the store names them."""

    header: ContributionHeader
    parts: tuple[str, ...]
    outcome: ContributionOutcome


class ApplyAnchor(_IpcMessage):
    """The anchor of `round` lies in the arena; `fate` is that of the outstanding message.

    "excluded": no round has it, and none will. "lost": that is not known, so it is neither sent again nor given back.
    "none": not decided.
    """

    kind: Literal["adopt"] = "adopt"
    round: int = Field(ge=0)
    outcome: ContributionOutcome
    steps: int | None = Field(default=None, ge=1, description="to make for the round, where not all of the plan's")
    revised: tuple[RevisedOutcome, ...] = Field(default=(), description="said with every anchor; to be heeded once")


class SubmitEarly(_IpcMessage):
    """The others wait: send what there is for `round` after the step under way."""

    kind: Literal["hurry"] = "hurry"
    round: int = Field(ge=0)


class Evaluate(_IpcMessage):
    """Measure the validation loss of the anchor of `round`."""

    kind: Literal["evaluate"] = "evaluate"
    round: int = Field(ge=0)


class TakeSnapshot(_IpcMessage):
    kind: Literal["snapshot"] = "snapshot"


class Stop(_IpcMessage):
    """Write a last snapshot, say Stopped and end."""

    kind: Literal["stop"] = "stop"


class Ready(_IpcMessage):
    """The trainer trains from `step` on. A daemon that is at another round, or knows the fate of the outstanding
    message, sends Adopt (again): what it sent to a trainer that died is lost."""

    kind: Literal["ready"] = "ready"
    device: str
    step: int
    round: int
    outstanding: int | None = Field(description="round of the message on its way; it is sent again after this")


class TrainerProgress(_IpcMessage):
    """Totals since the start of the run, also over restarts; `loss` is the mean since the last Progress, in nats."""

    kind: Literal["progress"] = "progress"
    step: int
    tokens: int
    loss: FiniteFloat
    tokens_per_second: FiniteFloat
    seconds: dict[Activity, FiniteFloat]


class PauseChanged(_IpcMessage):
    """The trainer takes no inner step from here on, for this reason; with an empty one it goes on."""

    kind: Literal["pausing"] = "pausing"
    reason: str


class TrainerWarning(_IpcMessage):
    """What went wrong in the trainer and was worked around: the daemon counts it, and tells the line."""

    kind: Literal["mishap"] = "mishap"
    reason: Literal["step skipped", "out of memory", "memory not pinned", "contribution missing", "work dropped"]
    line: str


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
    """The trainer cannot go on, and starting it again would not help."""

    kind: Literal["failed"] = "failed"
    reason: str
    exit_code: int


ToTrainer = Annotated[
    TrainerConfig | ApplyAnchor | SubmitEarly | Evaluate | TakeSnapshot | Stop, Field(discriminator="kind")
]
FromTrainer = Annotated[
    Ready
    | TrainerProgress
    | ContributionHeader
    | PauseChanged
    | TrainerWarning
    | AnchorApplied
    | Evaluated
    | Snapshotted
    | Stopped
    | Failed,
    Field(discriminator="kind"),
]
_TO_TRAINER: Final[TypeAdapter[ToTrainer]] = TypeAdapter(ToTrainer)
_FROM_TRAINER: Final[TypeAdapter[FromTrainer]] = TypeAdapter(FromTrainer)


class TrainerChannel:
    """The blocking end. Raises ChannelClosed when the daemon is gone, MalformedError on bytes that are no message."""

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
        """The next message; None when none is complete in time. 0 only looks."""
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
    """The asyncio end; errors as for TrainerEnd."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket) -> "DaemonChannel":
        """Takes the socket over."""
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
        """The next message, however long that takes: the trainer's death ends the wait."""
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
            return  # the trainer died with bytes on their way


def _encode_frame(message: BaseModel) -> bytes:
    body = message.model_dump_json().encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a message of {len(body)} bytes; at most {MAX_MESSAGE_BYTES} pass the channel")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def _decode_length(prefix: bytes) -> int:
    length = int.from_bytes(prefix, "big")
    if length > MAX_MESSAGE_BYTES:
        raise MalformedError(f"a frame of {length} bytes on the channel; at most {MAX_MESSAGE_BYTES}")
    return length


def _parse_message(adapter: TypeAdapter[M], body: bytes) -> M:
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise MalformedError(f"no message of the channel: {error.errors(include_url=False)[0]['msg']}") from error
