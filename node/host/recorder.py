"""Takes events in: to the disk, into the state, and out to everyone who listens.

A listener that reads too slowly is cut off rather than waited for; it comes again and names the last event it got.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

from node.host.events import Durable, Event, Moved, Opened, Started
from node.host.journal import Journal, read_events
from node.host.state import State, apply, said_of
from protocol.errors import LimitError

logger = logging.getLogger(__name__)

KEPT_MESSAGES = 2048  # for those who come again,
KEPT_BYTES = 2 << 20  # and of them no more than this
MAX_LISTENERS = 512
MAX_BEHIND = 256  # messages that a listener may lag


class Listener:
    """`overflowed`: it read too slowly and gets nothing more."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes] = asyncio.Queue(MAX_BEHIND)
        self.overflowed = False

    def push(self, message: bytes) -> None:
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.overflowed = True


class Recorder:
    """`journal`: None for a picture that is only looked at."""

    def __init__(self, journal: Journal | None, past: Iterable[Durable] = ()) -> None:
        self._journal = journal
        self.state = State()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._listeners: set[Listener] = set()
        for event in past:
            self._fold(event)

    @classmethod
    def at(cls, path: Path, opened: Opened) -> "Recorder":
        """Goes on with the journal that lies there, or begins one."""
        journal = Journal.open(path)
        self = cls(journal, read_events(path))
        if self.state.facts is None:
            self.record(opened)
        else:
            self.record(Started(at=opened.at))
        return self

    def record(self, event: Event) -> None:
        """Raises StorageError where the journal cannot be written."""
        if self._journal is not None and not isinstance(event, Moved):
            self._journal.append(event)
        message = self._fold(event)
        if message is not None:
            self._send(message)

    def tell(self, name: str, values: dict[str, Any]) -> None:
        """A message of the moment to all listeners: no event, and nowhere kept."""
        if self._listeners:
            self._send(message_of(name, values, None))

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def since(self, index: int) -> list[bytes] | None:
        """The messages of the durable events from `index` on; None where some of them are not kept."""
        if not 0 <= index <= self.state.index:
            return None
        missed = [message for number, message in self._kept if number >= index]
        return missed if len(missed) == self.state.index - index else None

    @contextlib.contextmanager
    def listen(self) -> Iterator[Listener]:
        """Raises LimitError when there are too many."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise LimitError(f"{MAX_LISTENERS} listen already; try again later")
        listener = Listener()
        self._listeners.add(listener)
        try:
            yield listener
        finally:
            self._listeners.discard(listener)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _send(self, message: bytes) -> None:
        for listener in list(self._listeners):
            listener.push(message)
            if listener.overflowed:
                self._listeners.discard(listener)
                logger.info("a reader of the events was too slow and is cut off")

    def _fold(self, event: Event) -> bytes | None:
        """The message of a durable event."""
        index, before = self.state.index, self.state
        self.state = apply(before, event)
        if isinstance(event, Moved):
            return None
        message = message_of(event.kind, _told(event, before), index)
        self._keep(index, message)
        return message

    def _keep(self, index: int, message: bytes) -> None:
        self._kept.append((index, message))
        self._kept_bytes += len(message)
        while len(self._kept) > KEPT_MESSAGES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])


def _told(event: Durable, before: State) -> dict[str, Any]:
    said = said_of(before, event)
    return {**event.model_dump(mode="json"), **({"text": said.text, "tone": said.tone} if said else {})}


def message_of(name: str, values: dict[str, Any], index: int | None) -> bytes:
    """One server-sent event. JSON has no line breaks of its own."""
    data = json.dumps(values, separators=(",", ":"), allow_nan=False)
    head = "" if index is None else f"id: {index}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode()


async def messages(listener: Listener, pause: float) -> AsyncIterator[bytes]:
    """What comes, and after each `pause` seconds without news a comment: it finds out who has gone."""
    while not (listener.overflowed and listener.queue.empty()):
        try:
            async with asyncio.timeout(pause):
                message = await listener.queue.get()
        except TimeoutError:
            yield b": still here\n\n"
        else:
            yield message
