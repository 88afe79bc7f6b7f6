"""Run a node from its start until the run's target or a signal, and shut it down in order.

Start: lock the folder, load the newest checkpoint, open the transport, join the gossip, and only then take part.
Shutdown: leave the directory (so that other peers stop waiting for us), stop the trainer, save, close the transport.
"""

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from node.daemon.node import Node
from node.daemon.stages.placement import StageMover, change_stage, choose_stages
from node.daemon.stored_states.stage_stores import OtherStageStore, StageStores, build_stage_stores
from node.disk_budget import choose_budget, watch_budget
from node.monitoring.display import Display
from node.monitoring.metrics import serve_metrics
from node.monitoring.training_log.recorder import recorded_metrics
from node.options import NodeOptions
from node.paths import registered
from node.processes.process import give_up_privileges, handle_stop_signals, raise_fd_limit
from node.processes.process_memory import enable_frequent_gc, trim_periodically, use_one_malloc_arena
from node.processes.workers import start_workers
from node.run_dir import RunDir
from node.trainer.site.token import describe_site
from protocol.errors import MurmurError, describe_error
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import StageManifest, stage_of
from protocol.tasks import cancel_and_wait, run_periodically

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 3.0
PUBLISH_SECONDS = 1.0  # between two updates of the changing fields of our peer record


Beside = Callable[[Node], AbstractAsyncContextManager[None]]  # runs next to the node, for example the page


@dataclass(frozen=True)
class FinishedRun:
    """The end of a run that a node has seen; `is_ours` says whether this node has the final model.

    `validation_round`: the rounds of the model that was measured, fewer than `round` if nobody measured the final one.
    `is_extended`: the organiser has moved the target meanwhile.
    """

    round: int
    tokens: int
    validation_loss: float | None
    is_ours: bool
    is_extended: bool = False
    validation_round: int | None = None


async def run_node(
    settings: NodeOptions, display: Display, beside: Beside = lambda node: nullcontext()
) -> FinishedRun | None:
    """Run a node until its target, SIGINT or SIGTERM; a second signal ends the process at once.

    Args:
        settings: the options of the node.
        display: shows the status and the log lines.
        beside: entered once the node is on the network.

    Returns the end of the run if it has reached its target, None after a signal before that.
    """
    with locked_run_dir(settings) as folder:
        folder.copy_tokenizer(settings.manifest, settings.base)
        if settings.site is not None:
            logger.info("other machines of this site: %s", describe_site(settings, folder))
        has_moved = False
        while True:
            daemon = Daemon(settings, folder, display, beside, has_moved)
            finished = await daemon.run()
            if daemon.next_stage is not None:
                change_stage(folder, daemon.next_stage, settings.manifest.pipeline.stages)
                has_moved = True
                continue
            if finished is None or not finished.is_extended:
                return finished
            logger.info("the organiser has extended the run; this node goes on")


@contextmanager
def locked_run_dir(settings: NodeOptions) -> Iterator[RunDir]:
    """Prepare the process to run for weeks, and lock the run's folder."""
    give_up_privileges()
    raise_fd_limit()
    use_one_malloc_arena()
    with RunDir(settings.folder).lock(settings.manifest) as folder:
        yield folder


class Daemon:
    """Runs one node in this process, from its start to its shutdown. `has_moved`: from another stage, just now."""

    def __init__(
        self, settings: NodeOptions, folder: RunDir, display: Display, beside: Beside, has_moved: bool = False
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._display = display
        self._beside = beside
        self._stop = asyncio.Event()
        self._keepers: StageStores | OtherStageStore | None = None
        self._has_moved = has_moved
        self._mover: StageMover | None = None
        self.next_stage: int | None = None  # to which this node moves after its end

    async def run(self) -> FinishedRun | None:
        torch.set_num_threads(1)  # leave the cores to the trainer
        loop = asyncio.get_running_loop()
        handle_stop_signals(loop, self._on_signal)
        async with AsyncExitStack() as stack:
            workers = stack.enter_context(start_workers())
            loop.set_default_executor(ThreadPoolExecutor(1 + self._settings.thread_count, thread_name_prefix="disk"))
            node = Node(self._settings, self._folder, random.Random(os.urandom(16)))
            stack.push_async_callback(node.transport.stop)
            self._display.names.learn(node.peer_id, self._settings.name)
            node.directory.subscribe(self._display.names)
            with self._display.activity("preparing the run"):
                served = await choose_stages(self._settings, self._folder, node.peer_id)
                for manifest, folder in served:
                    await node.add_replica(manifest, folder, workers)
                if len(served) == 1:  # a node that serves all stages has nothing to keep beside
                    self._keepers = build_stage_stores(node, self._folder, stage_of(manifest))
                    node.describe_kept_states = self._keepers.describe if self._keepers else None
                    self._mover = self._build_mover(node, manifest)
            with self._display.activity("connecting to the network"):
                await node.open()
            port = await stack.enter_async_context(serve_metrics(self._settings.metrics, node.metrics, node))
            enable_frequent_gc()
            self._folder.write_node_info(node.peer_id, await node.transport.addresses(), port)
            stack.enter_context(registered(self._folder.path))
            logger.info("this node is %s in run %s", node.peer_id, self._settings.manifest.run.name)
            recorded = recorded_metrics(self._folder.path, node, node.metrics, self._settings.log)
            await stack.enter_async_context(recorded)
            await stack.enter_async_context(self._beside(node))
            await self._take_part(node)
            return _end_of(node)

    def _build_mover(self, node: Node, manifest: Manifest) -> StageMover | None:
        """Return what moves this node to weaker stages; None for a host, a stage that the user named, exact steps."""
        is_pinned = self._settings.stage is not None or self._settings.stays
        if not isinstance(manifest, StageManifest) or is_pinned or manifest.pipeline.is_exact:
            return None
        chain = node.replicas[manifest.run_id].state.replicated.chain
        return StageMover(node.admitted, manifest, chain, self._has_moved)

    async def _watch_stages(self) -> None:
        """End once this node has to move to another stage."""
        if self._mover is None:
            await asyncio.Event().wait()
            return
        move = await self._mover.run()
        self.next_stage = move.target
        logger.info("moving from stage %d to stage %d, which is the weakest", move.source, move.target)

    def _on_signal(self) -> None:
        self.next_stage = None
        self._display.close()
        logger.info("Shutting down. Press Ctrl-C again to exit immediately.")
        self._stop.set()

    async def _take_part(self, node: Node) -> None:
        budget = choose_budget(self._folder.path, self._settings.disk)
        shown = self._display.show_status(node)
        watched = watch_budget(self._folder.path, budget)
        published = run_periodically(PUBLISH_SECONDS, node.publish_progress)
        loops = [node.directory.run(), node.rendezvous.run(), published, trim_periodically(), shown, watched]
        loops += [self._keepers.run()] if self._keepers else []
        loops += [node.stage_chains.run(node.own_stages)] if node.stage_chains is not None else []
        background = [asyncio.create_task(_forever(loop)) for loop in loops]
        main = asyncio.create_task(self._main(node), name="round loop")
        stopped = asyncio.create_task(self._stop.wait())
        moves = asyncio.create_task(self._watch_stages(), name="stage mover")
        failed: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait({main, stopped, moves, *background}, return_when=asyncio.FIRST_COMPLETED)
            failed = [task for task in (main, moves, *background) if task.done()]
        finally:
            await cancel_and_wait((main, stopped, moves))
            await self._leave(node, _first_error(failed))
            await cancel_and_wait(background)
        for task in failed:
            await task

    async def _main(self, node: Node) -> None:
        """Take part until the target, and stay for as long as others need us."""
        await node.run_replicas()

    async def _leave(self, node: Node, reason: str) -> None:
        """Leave the run and stop; `reason` is the error that ended the node, empty after a signal."""
        node.set_leaving(reason)
        if not reason:
            await node.drain()
        node.publish_progress()  # the last record has the last validation loss
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await node.directory.leave()
        except TimeoutError:
            logger.warning("could not tell all peers that this node leaves")
        await node.finish()
        status = node.status()
        self._folder.write_final_status(status.model_dump_json())
        if not (status.is_done or reason or self.next_stage is not None):
            logger.info("left the run after %s; the same command resumes", status.describe_round())


def _end_of(node: Node) -> FinishedRun | None:
    """Return the end of the run of the replica that was added first; None before its target."""
    replica = next(iter(node.replicas.values()))
    if (reached := replica.effects.reached) is None:
        return None
    replica.adopt_final_loss()
    status = replica.status_reporter.status()
    return FinishedRun(
        *(reached.head.round, reached.head.tokens, status.validation_loss, reached.is_ours),
        is_extended=replica.inbox.is_extended,
        validation_round=status.validation_round,
    )


def _first_error(ended: Iterable[asyncio.Task[None]]) -> str:
    """Return the error of the first failed task; empty if none failed."""
    errors = (asyncio.CancelledError() if task.cancelled() else task.exception() for task in ended)
    return next((describe_error(error) for error in errors if error is not None), "")


async def _forever(loop: Coroutine[Any, Any, None]) -> None:
    await loop
    raise MurmurError("a background task of the node ended; see the log and restart the node")
