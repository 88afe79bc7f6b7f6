"""The events of a run on disk: one JSON line each, only ever appended to.

A host that was killed may leave a torn last line; it is cut off at the next start. Everything before it is whole.

Takes events in: to the disk, into the state, and out to everyone who listens.

A listener that reads too slowly is cut off rather than waited for; it comes again and names the last event it got.
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
from node.dashboard.state import RunState, apply_event, log_text_of
from protocol.errors import LimitError, MissingFileError, StorageError

EVENT_FILE_NAME = "events.jsonl"


class EventFile:
    """Open for appending; raises StorageError where the disk refuses."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path

    @classmethod
    def open(cls, path: Path) -> "EventFile":
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("ab") as file:
                file.truncate(whole_lines_size(path))
            return cls(path.open("ab", buffering=0), path)
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}; choose another --dir") from error

    def append(self, event: LoggedEvent) -> None:
        line = event.model_dump_json().encode() + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise StorageError(f"cannot write {self._path}: {error.strerror}; free some space") from error
        if written != len(line):  # the next start cuts the torn line off
            raise StorageError(f"cannot write {self._path}: no space left; free some space")

    def close(self) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[LoggedEvent]:
    """All whole lines. MissingFileError where there is no file, DataError for a line that is no event."""
    try:
        with path.open("rb") as file:
            number = 0
            while (line := file.readline(MAX_EVENT_BYTES + 1)).endswith(b"\n"):
                number += 1
                yield read_event(line, f"{path}, line {number}")
            if len(line) > MAX_EVENT_BYTES:
                read_event(line, f"{path}, line {number + 1}")
    except OSError as error:
        raise MissingFileError(f"cannot read {path}: {error.strerror}; name a journal of `murmur host`") from error


def whole_lines_size(path: Path) -> int:
    """Up to the end of the last whole line."""
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

MAX_KEPT_MESSAGES = 2048  # for those who come again,
MAX_KEPT_BYTES = 2 << 20  # and of them no more than this
MAX_SUBSCRIBERS = 512
MAX_QUEUED_MESSAGES = 256  # messages that a listener may lag


class Subscriber:
    """`overflowed`: it read too slowly and gets nothing more."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        self.has_overflowed = False

    def push(self, message: bytes) -> None:
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.has_overflowed = True


class EventLog:
    """`journal`: None for a picture that is only looked at."""

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
        """Goes on with the journal that lies there, or begins one."""
        journal = EventFile.open(path)
        self = cls(journal, read_events(path))
        if self.state.facts is None:
            self.record(opened)
        else:
            self.record(HostRestarted(at=opened.at))
        return self

    def record(self, event: DashboardEvent) -> None:
        """Raises StorageError where the journal cannot be written."""
        if self._file is not None and not isinstance(event, PeersUpdated):
            self._file.append(event)
        message = self._apply(event)
        if message is not None:
            self._send(message)

    def broadcast(self, name: str, values: dict[str, Any]) -> None:
        """A message of the moment to all listeners: no event, and nowhere kept."""
        if self._subscribers:
            self._send(encode_message(name, values, None))

    @property
    def subscriber_count(self) -> int:
        return len(self._subscribers)

    def messages_since(self, index: int) -> list[bytes] | None:
        """The messages of the durable events from `index` on; None where some of them are not kept."""
        if not 0 <= index <= self.state.index:
            return None
        missed = [message for number, message in self._kept_messages if number >= index]
        return missed if len(missed) == self.state.index - index else None

    @contextlib.contextmanager
    def subscribe(self) -> Iterator[Subscriber]:
        """Raises LimitError when there are too many."""
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise LimitError(f"{MAX_SUBSCRIBERS} listen already; try again later")
        listener = Subscriber()
        self._subscribers.add(listener)
        try:
            yield listener
        finally:
            self._subscribers.discard(listener)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _send(self, message: bytes) -> None:
        for listener in list(self._subscribers):
            listener.push(message)
            if listener.has_overflowed:
                self._subscribers.discard(listener)
                logger.info("a reader of the events was too slow and is cut off")

    def _apply(self, event: DashboardEvent) -> bytes | None:
        """The message of a durable event."""
        index, before = self.state.index, self.state
        self.state = apply_event(before, event)
        if isinstance(event, PeersUpdated):
            return None
        message = encode_message(event.kind, _values_with_text(event, before), index)
        self._keep_message(index, message)
        return message

    def _keep_message(self, index: int, message: bytes) -> None:
        self._kept_messages.append((index, message))
        self._kept_bytes += len(message)
        while len(self._kept_messages) > MAX_KEPT_MESSAGES or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept_messages.popleft()[1])


def _values_with_text(event: LoggedEvent, before: RunState) -> dict[str, Any]:
    said = log_text_of(before, event)
    return {**event.model_dump(mode="json"), **({"text": said.text, "tone": said.tone} if said else {})}


def encode_message(name: str, values: dict[str, Any], index: int | None) -> bytes:
    """One server-sent event. JSON has no line breaks of its own."""
    data = json.dumps(values, separators=(",", ":"), allow_nan=False)
    head = "" if index is None else f"id: {index}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode()


async def stream_messages(subscriber: Subscriber, keepalive_seconds: float) -> AsyncIterator[bytes]:
    """What comes, and after each `pause` seconds without news a comment: it finds out who has gone."""
    while not (subscriber.has_overflowed and subscriber.queue.empty()):
        try:
            async with asyncio.timeout(keepalive_seconds):
                message = await subscriber.queue.get()
        except TimeoutError:
            yield b": still here\n\n"
        else:
            yield message
