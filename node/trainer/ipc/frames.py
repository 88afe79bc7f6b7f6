"""Frames of JSON on a stream: a length (4 bytes, big endian) and that many bytes, at most MAX_MESSAGE_BYTES."""

import select
import socket
import threading
import time
from typing import Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from protocol.errors import MalformedError
from protocol.fault_words import describe_faults

MAX_MESSAGE_BYTES: Final = 2 * 1024 * 1024
WRITE_SECONDS: Final = 30.0
LENGTH_BYTES: Final = 4
M = TypeVar("M")


class ChannelClosed(Exception):  # noqa: N818
    """The other process is gone or does not read."""


class FrameSocket:
    """The blocking end of a stream of frames.

    Several threads may send.

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
    """Return the message in a frame. Raises MalformedError if it is none."""
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        raise MalformedError(f"not a message of the channel: {describe_faults(error)}") from error
