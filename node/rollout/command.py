"""Run a rollout peer: a node without a trainer, which follows the chain and serves what its generator draws.

It takes part in no round: its record says `rollout`, so nobody counts it as a trainer, and no round waits for it. Like
a host, it holds the newest state and serves it to others.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from node.daemon.lifecycle import FinishedRun, locked_run_dir
from node.daemon.node import Node
from node.daemon.peers.swarm_view import find_newest_validation
from node.daemon.receipts.commit_log import record_chain
from node.daemon.stored_states.announcing import WholeRunAnnouncer
from node.daemon.stored_states.state_store import StateStore, StorePlan, build_state_store
from node.dashboard.observer_node import gossiping, open_node
from node.from_manifest import build_method, topology_class
from node.monitoring.display import Display
from node.monitoring.metrics import serve_metrics
from node.monitoring.status import NodeStatus, first_status
from node.monitoring.training_log.recorder import recorded_metrics
from node.options import NodeOptions
from node.paths import registered
from node.processes.process import handle_stop_signals
from node.processes.process_memory import enable_frequent_gc, trim_periodically
from node.processes.workers import start_workers
from node.rollout.rolling import Roller, RolloutsService
from node.run_dir import RunDir
from protocol.errors import MurmurError, UsageError
from protocol.manifest.run import Manifest
from protocol.murmur_pb2_grpc import add_RolloutsServicer_to_server
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

HANDOVER_SECONDS = 5.0  # for the trainers to see that we hold the final state


def require_followable(manifest: Manifest) -> None:
    """Raise UsageError if nobody can follow the run without a trainer."""
    if manifest.rl is None:  # so its model has code here, and is not cut
        raise UsageError("--role rollout: the run does not learn from scores (its manifest has no [rl]); leave it out")
    if not topology_class(build_method(manifest)).has_shared_state:
        raise UsageError("--role rollout: peers of this run have weights of their own, which nobody can follow")


class RolloutStatus:
    """The answer of a rollout peer to `murmur status`."""

    def __init__(self, node: Node, store: StateStore, roller: Roller) -> None:
        self._node = node
        self._store = store
        self._roller = roller
        options = node.options
        first = first_status(options.manifest, node.peer_id, options.name)
        self._constant = first.model_copy(update={"since": time.time()})
        self.leaving = ""

    def status(self) -> NodeStatus:
        """Return the current status."""
        return self._constant.model_copy(update=dict(self._fields()))

    def _fields(self) -> Mapping[str, object]:
        node, store, chain = self._node, self._store, self._store.chain
        transport, own = node.transport, node.directory.live().get(node.peer_id)
        target = store.steering.manifest_at(chain.round).target
        other = node.directory.other_node_with_our_key()
        newest = find_newest_validation(node.admitted.records().values())
        return {
            **self._roller.status_fields(),
            "phase": self._phase(),
            "reason": self.leaving or self._reason(),
            "round": chain.round,
            "chain_tokens": chain.tokens,
            "target_rounds": target.rounds,
            "target_tokens": target.tokens,
            "digest": chain.digest.hex() if chain.round else "",
            "state_digest": store.blob.name if store.blob is not None else "",
            "trust": str(node.trust_point or ""),
            "unsaved": store.error,
            "validation_loss": newest.validation_loss if newest else None,
            "validation_round": newest.validation_round if newest else None,
            "peers": len(node.directory.live()),
            "key_conflict": other.describe() if other else "",
            "bytes_sent": transport.bytes_sent,
            "bytes_received": transport.bytes_received,
            "bytes_sent_by_kind": {"blobs": node.blob_service.total_bytes_served, **node.directory.traffic.sent},
            "bytes_received_by_kind": {"blobs": store.bytes_received, **node.directory.traffic.received},
            "direct_port": transport.direct_port,
            "paths": transport.bulk.describe_paths(),
            "bytes_fetched_by_path": dict(transport.bulk.bytes_received),
            "direct_refusals": dict(transport.direct_refusals),
            "refusals": dict(node.metrics.refusals),
            "setbacks": dict(node.metrics.recovered_errors),
            "addresses": tuple(own.addresses) if own else (),
            "rollouts": {
                "rounds applied": store.replayed,
                "states fetched": store.fetched,
                **self._roller.counts(),
            },
        }

    def _reason(self) -> str:
        if self._store.blob is None:
            return "looking for the newest state of the run"
        return self._roller.describe_wait()

    def _phase(self) -> str:
        if self._store.is_complete:
            return "done"
        if self.leaving:
            return "leaving"
        return "joining" if self._store.blob is None else "rolling out"


async def run_rollout_peer(settings: NodeOptions, display: Display) -> FinishedRun | None:
    """Follow the run and serve rollouts until its target, SIGINT or SIGTERM; see `run_node`."""
    with locked_run_dir(settings) as folder:
        folder.copy_tokenizer(settings.manifest, settings.base)
        async with AsyncExitStack() as stack:
            return await _run(settings, folder, display, stack)


async def _run(settings: NodeOptions, folder: RunDir, display: Display, stack: AsyncExitStack) -> FinishedRun | None:
    workers = stack.enter_context(start_workers())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2, thread_name_prefix="disk"))
    stop = asyncio.Event()

    def on_signal() -> None:
        display.close()
        logger.info("Shutting down. Press Ctrl-C again to exit immediately.")
        stop.set()

    handle_stop_signals(asyncio.get_running_loop(), on_signal)
    with display.activity("connecting to the network"):
        node = await stack.enter_async_context(open_node(settings, folder))
        plan = StorePlan(announcer=WholeRunAnnouncer(node.directory), follower=workers.compute)
        store = build_state_store(node, settings.manifest, folder, plan)
        node.metrics.add_refusal_counter(store)
        node.directory.subscribe(display.names)
        roller = Roller(node, store)
        node.more_services.append(partial(add_RolloutsServicer_to_server, RolloutsService(node, roller)))
        await node.open("rollout")
    status = RolloutStatus(node, store, roller)
    port = await stack.enter_async_context(serve_metrics(settings.metrics, node.metrics, status))
    enable_frequent_gc()
    folder.write_node_info(node.peer_id, await node.transport.addresses(), port)
    stack.enter_context(registered(folder.path))
    logger.info("this node is %s in run %s", node.peer_id, settings.manifest.run.name)
    await stack.enter_async_context(recorded_metrics(folder.path, status, node.metrics, settings.log))
    await stack.enter_async_context(record_chain(store.chain, settings.manifest, folder.path))
    loops = store.run(), roller.run(), trim_periodically(), display.show_status(status)
    await _follow(node, store, loops, status, stop)
    folder.write_final_status(status.status().model_dump_json())
    return _end_of(store, status)


async def _follow(
    node: Node, store: StateStore, loops: Iterable[Coroutine[Any, Any, None]], status: RolloutStatus,
    stop: asyncio.Event,
) -> None:  # fmt: skip
    """Gossip and follow until a signal comes, the run is over, or a task fails."""
    endless = [asyncio.create_task(loop) for loop in loops]
    ending = [asyncio.create_task(stop.wait()), asyncio.create_task(_wait_until_over(store))]
    try:
        async with gossiping(node) as network:
            done, _ = await asyncio.wait({*endless, *ending, *network}, return_when=asyncio.FIRST_COMPLETED)
            status.leaving = "" if store.is_complete else "stopped"
            for task in done:
                await task
                if task not in ending:
                    raise MurmurError("a background task of the node ended; see the log and restart the node")
    finally:
        await cancel_and_wait((*endless, *ending))


async def _wait_until_over(store: StateStore) -> None:
    """Wait until the run is over, and for the trainers to see that this node holds the final state."""
    await store.completed.wait()
    await asyncio.sleep(HANDOVER_SECONDS)


def _end_of(store: StateStore, status: RolloutStatus) -> FinishedRun | None:
    if not store.is_complete:
        logger.info("left the run after %s; the same command resumes", status.status().describe_round())
        return None
    last, head = status.status(), store.chain.head
    return FinishedRun(
        head.round, head.tokens, last.validation_loss, is_ours=True, validation_round=last.validation_round
    )
