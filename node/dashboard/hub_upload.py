"""Send the final model of a run from its host to the Hugging Face Hub, as `host.hub` of the manifest wants.

`murmur export --push` does it in a process of its own, so the page stays fast and the memory is freed.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from node.daemon.stored_states.model_archive import MIN_EXPORT_SECONDS
from node.paths import find_newest_model
from node.processes.workers import ChildResult, run_module

logger = logging.getLogger(__name__)

POLL_SECONDS = 5.0
RETRY_SECONDS = 600.0
MIN_BYTES_PER_SECOND = 250_000  # of an upload


class HubUploader:
    """Pushes the final model once; it tries again while the Hub does not take it.

    Args:
        folders: of the nodes on this machine, whose newest model is sent.
        repository: ORG/NAME.
        size: bytes of the weights.
        is_final: returns whether a round is the run's last.
    """

    def __init__(self, folders: Sequence[Path], repository: str, size: int, is_final: Callable[[int], bool]) -> None:
        self._folders = tuple(folders)
        self._repository = repository
        self._seconds = MIN_EXPORT_SECONDS + size / MIN_BYTES_PER_SECOND
        self._is_final = is_final
        self._sent_round: int | None = None
        self._not_before = 0.0
        self._failure = ""

    async def run(self) -> None:
        """Push until cancelled: again if the organiser extends the run and it ends once more."""
        while True:
            await self.push_if_final(time.monotonic())
            await asyncio.sleep(POLL_SECONDS)

    async def push_if_final(self, now: float) -> None:
        """Push the newest model if it is the final one, unless that was done or has just failed."""
        newest = find_newest_model(self._folders)
        if newest is None or newest[0] == self._sent_round or now < self._not_before or not self._is_final(newest[0]):
            return
        failure = await self._push(newest[1])
        if not failure:
            self._sent_round = newest[0]
            return
        self._not_before = now + RETRY_SECONDS
        if failure != self._failure:
            logger.warning("the model was not sent to %s, and will be in ten minutes: %s", self._repository, failure)
        self._failure = failure

    async def _push(self, folder: Path) -> str:
        """Return why the model of a node was not sent; empty if it was."""
        try:
            child = await run_module("node.cli", ["export", str(folder), "--push", self._repository], self._seconds)
        except TimeoutError:
            return f"it took longer than {self._seconds:.0f} s"
        except OSError as error:
            return f"the process cannot be started: {error.strerror}"
        return _failure_of(child)


def _failure_of(child: ChildResult) -> str:
    if child.exit_code:
        return child.last_error.removeprefix("murmur: ") or f"the process ended with exit code {child.exit_code}"
    logger.info("%s", child.output.decode(errors="replace").strip().rpartition("\n")[2])
    return ""
