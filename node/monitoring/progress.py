"""One line on a terminal that shows how far a long command is."""

from collections.abc import Iterable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteProgress:
    """Counts bytes on standard error while it is entered, and leaves nothing behind; silent without a terminal."""

    def __init__(self, action: str, total: int, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(
            TextColumn("{task.description}"), *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._progress.add_task(action, total=total or None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, count: int) -> None:
        """Count `count` bytes as done."""
        self._progress.advance(self._task, count)

    def count(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the chunks, each counted when the next one is asked for."""
        for chunk in chunks:
            yield chunk
            self.advance(len(chunk))
