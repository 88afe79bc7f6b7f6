"""The event log of a run: on disk, in the state, and as a stream to subscribers.

The file holds one JSON line per event and only grows. A host that was killed may leave a partial last line, which the
next start cuts off; every line before it is complete.

A subscriber that reads too slowly is disconnected; it connects again and names the last event that it received.
"""

import asyncio
import contextlib
import json
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from node.dashboard.events import (
    MAX_EVENT_BYTES,
    DashboardEvent,
    HostRestarted,
    LoggedEvent,
    LogOpened,
    PeersUpdated,
    read_event,
)
from node.dashboard.json_views import log_line_values
from node.dashboard.state import RunState, apply_event, newest_line
from protocol.errors import LimitError, MissingFileError, StorageError

EVENT_FILE_NAME = "events.jsonl"


class EventFile:
    """The event file, open for appending; methods raise StorageError if the disk refuses."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    @classmethod
    def open(cls, path: Path) -> "EventFile":
        """Open or create the file, and cut off a partial last line."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("ab") as file:
                file.truncate(whole_lines_size(path))
            return cls(path.open("ab", buffering=0), path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another --dir") from error

    def append(self, event: LoggedEvent) -> None:
        """Write one event as one line."""
        line = event.model_dump_json().encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; free some space") from error
        if written != len(line):  # the next start cuts the partial line off
            raise StorageError(f"cannot write {self._path}: no space left; free some space")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[LoggedEvent]:
    """Yield the events of all complete lines.

    Raises MissingFileError if the file cannot be read, DataError for a line that is not an event.
    """
    try:
        with path.open("rb") as file:
            line_number = 0
            while (line := file.readline(MAX_EVENT_BYTES + 1)).endswith(b"\n"):
                line_number += 1
                yield read_event(line, f"{path}, line {line_number}")
            if len(line) > MAX_EVENT_BYTES:
                read_event(line, f"{path}, line {line_number + 1}")
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; name an event log of `murmur host`") from error


def whole_lines_size(path: Path) -> int:
    """Return the size in bytes up to the end of the last complete line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - MAX_EVENT_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


logger = logging.getLogger(__name__)

MAX_KEPT_MESSAGES = 2048  # for subscribers that reconnect
MAX_KEPT_BYTES = 2 << 20  # limit on the total size of the kept messages
MAX_SUBSCRIBERS = 512
MAX_QUEUED_MESSAGES = 256  # messages that a subscriber may lag behind


class Subscriber:
    """The message queue of one reader; `has_overflowed` means that it read too slowly and gets no more messages."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self.has_overflowed = False

    def push(self, message: bytes) -> None:
        """Queue the message, or mark the subscriber as overflowed if its queue is full."""
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.has_overflowed = True


class EventLog:
    """Records events: appends them to the file, applies them to `state`, and sends them to subscribers.

    `file` is `None` for a replay, which records nothing.
    """

    def __init__(self, file: EventFile | None, past: Iterable[LoggedEvent] = ()) -> None:
        self._file = file
        self.state = RunState()
        self._kept_messages: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._subscribers: set[Subscriber] = set()
        for event in past:
            self._apply(event)

    @classmethod
    def open(cls, path: Path, opened: LogOpened) -> "EventLog":
        """Continue the event log at `path`, or begin one with `opened`."""
        file = EventFile.open(path)
        self = cls(file, read_events(path))
        if self.state.facts is None:
            self.record(opened)
        else:
            self.record(HostRestarted(at=opened.at, facts=opened.facts))
        return self

    def record(self, event: DashboardEvent) -> None:
        """Store, apply and send one event. Raises StorageError if the file cannot be written."""
        if self._file is not None and not isinstance(event, PeersUpdated):
            self._file.append(event)
        message = self._apply(event)
        if message is not None:
            self._send(message)

    def broadcast(self, name: str, values: dict[str, Any]) -> None:
        """Send a message of momentary figures to all subscribers; it is not an event and is not kept."""
        if self._subscribers:
            self._send(encode_message(name, values, None))

    @property
    def subscriber_count(self) -> int:
        return len(self._subscribers)

    def messages_since(self, index: int) -> list[bytes] | None:
        """Return the messages of the durable events from `index` on; `None` if some of them are no longer kept."""
        if not 0 <= index <= self.state.index:
            return None
        missed = [message for kept_index, message in self._kept_messages if kept_index >= index]
        return missed if len(missed) == self.state.index - index else None

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[Subscriber]:
        """Yield a subscriber that receives all messages inside the context. Raises LimitError if there are too many."""
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise LimitError(f"there are already {MAX_SUBSCRIBERS} subscribers; try again later")
        subscriber = Subscriber()
        self._subscribers.add(subscriber)
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _send(self, message: bytes) -> None:
        for subscriber in list(self._subscribers):
            subscriber.push(message)
            if subscriber.has_overflowed:
                self._subscribers.discard(subscriber)
                logger.info("disconnected a reader of the event stream that was too slow")

    def _apply(self, event: DashboardEvent) -> bytes | None:
        """Apply the event to the state; returns the message of a durable event."""
        index = self.state.index
        self.state = apply_event(self.state, event)
        if isinstance(event, PeersUpdated):
            return None
        line = newest_line(self.state)
        logged = {"line": log_line_values(line)} if line else {}
        message = encode_message(event.kind, {**event.model_dump(mode="json"), **logged}, index)
        self._keep_message(index, message)
        return message

    def _keep_message(self, index: int, message: bytes) -> None:
        self._kept_messages.append((index, message))
        self._kept_bytes += len(message)
        while len(self._kept_messages) > MAX_KEPT_MESSAGES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept_messages.popleft()[1])


def encode_message(name: str, values: dict[str, Any], index: int | None) -> bytes:
    """Return one server-sent event; compact JSON contains no line breaks."""
    data = json.dumps(values, separators=(",", ":"), allow_nan=False)
    head = "" if index is None else f"id: {index}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode()


async def stream_messages(subscriber: Subscriber, keepalive_seconds: float) -> AsyncIterator[bytes]:
    """Yield the subscriber's messages, and a comment after `keepalive_seconds` without one.

    The comment reveals connections whose reader is gone.
    """
    while not (subscriber.has_overflowed and subscriber.queue.empty()):
        try:
            async with asyncio.timeout(keepalive_seconds):
                message = await subscriber.queue.get()
        except TimeoutError:
            yield b": still here\n\n"
        else:
            yield message
