"""Run the requests that the scheduler of one download plans, as tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from protocol.blobs.scheduler import DownloadScheduler, PieceRequest
from protocol.identity import PeerId

Receive = Callable[[DownloadScheduler, PieceRequest], Awaitable[None]]


class SchedulerRun:
    """Runs the requests of one scheduler, owned by its download."""

    def __init__(self, scheduler: DownloadScheduler, receive: Receive) -> None:
        self.scheduler = scheduler
        self.running: dict[asyncio.Task[None], PieceRequest] = {}
        self._receive = receive
        self._request_ended = asyncio.Event()  # at least one request has ended
        self._abort_error: BaseException | None = None

    def start_request(self, awaited_elsewhere: Mapping[PeerId, int], now: float, *, idle_only: bool) -> bool:
        """Start one request if that makes sense, and return whether it did.

        `awaited_elsewhere` is the number of bytes by source that other downloads await; with `idle_only`, only sources
        that owe us nothing are used.
        """
        request = self.scheduler.next_request(now, awaited_elsewhere, idle_only=idle_only)
        if request is None:
            return False
        task = asyncio.ensure_future(self._receive(self.scheduler, request))
        task.add_done_callback(self._on_request_ended)
        self.running[task] = request
        return True

    def _on_request_ended(self, _: asyncio.Task[None]) -> None:
        self._request_ended.set()

    async def wait_for_ended(self) -> list[asyncio.Task[None]]:
        """Wait until at least one request has ended, and return the ended ones."""
        await self._request_ended.wait()
        self._request_ended.clear()
        if self._abort_error:
            raise self._abort_error
        return [task for task in self.running if task.done()]

    def abort(self, error: BaseException) -> None:
        """Fail the run, because no requests are started any more."""
        self._abort_error = error
        self._request_ended.set()
