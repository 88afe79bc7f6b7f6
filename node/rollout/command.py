"""Run a rollout peer: a node without a trainer, which follows the chain and serves the groups of its generator.

It takes part in no round: its record says `rollout`, so nobody counts it as a trainer, and no round waits for it. Like
a host, it holds the newest state and serves it to others. The weights of the next round are fetched while the generator
draws; it takes them between two batches, so it never waits for them.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from node.daemon.lifecycle import FinishedRun, locked_run_dir
from node.daemon.node import Node
from node.daemon.peers.swarm_view import find_newest_validation
from node.daemon.receipts.commit_log import record_chain
from node.daemon.services import abort_refused
from node.daemon.stored_states.announcing import WholeRunAnnouncer
from node.daemon.stored_states.state_store import StateStore, StorePlan, build_state_store
from node.dashboard.observer_node import gossiping, open_node, stop_on_signal
from node.from_manifest import build_method, build_program, topology_class
from node.monitoring.display import Display
from node.monitoring.logs import sanitize
from node.monitoring.metrics import serve_metrics
from node.monitoring.status import NodeStatus, first_status
from node.monitoring.training_log.recorder import recorded_metrics
from node.options import NodeOptions
from node.paths import registered
from node.processes.process_memory import enable_frequent_gc, trim_periodically
from node.processes.workers import start_workers
from node.rollout.generator import DrawReply, DrawRequest, GeneratorConfig, GeneratorProcess
from node.rollout.outbox import FILE_NAME, MAX_TRAINERS, GroupJournal, GroupOutbox, HeldGroup
from node.run_dir import RunDir
from protocol.errors import LimitError, MurmurError, PeerFault, StaleError, UsageError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import RolloutsReply, RolloutsRequest
from protocol.murmur_pb2_grpc import RolloutsServicer, add_RolloutsServicer_to_server
from protocol.recent import RecentTable
from protocol.rollout_groups import (
    MAX_REASON_CHARACTERS,
    GroupLimits,
    Place,
    groups_of_round,
    page_of,
    require_rl,
    sign_group,
)
from protocol.signing import MAX_ROUND
from protocol.tasks import cancel_and_wait
from protocol.transport.rate_limit import TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 64  # of one request to the generator
PAUSE_SECONDS = 0.1  # between two looks whether a trainer has fetched groups
SPEED_SECONDS = 10.0  # over which tokens a second are averaged
CALLS_PER_SECOND, BURST_CALLS = 10.0, 40  # of one trainer
HANDOVER_SECONDS = 5.0  # for the trainers to see that we hold the final state


@dataclass(frozen=True)
class TrainerVerdict:
    """The groups of ours that a trainer has learned from, those that its checks refused, and why."""

    taken: int
    refused: int
    reason: str


class Roller:
    """The groups of a rollout peer, from the weights to the trainers.

    Raises StorageError if the journal cannot be read.
    """

    def __init__(self, node: Node, store: StateStore) -> None:
        manifest = node.options.manifest
        rl, planner = require_rl(manifest), build_program(manifest)
        self._node = node
        self._store = store
        self._rl = rl
        self._planner = planner
        self.limits = GroupLimits.of(manifest, planner.max_steps)
        self._journal = GroupJournal(node.run_dir.path / FILE_NAME, manifest.run_id)
        held = self._journal.load(node.peer_id, self.limits)
        self.outbox = GroupOutbox(self.limits.serials, rl.max_age, held)
        self.generator = GeneratorProcess(
            GeneratorConfig(
                manifest=manifest.to_toml(),
                base=node.options.base,
                maker=node.peer_id,
                device=node.options.device,
                threads=node.options.thread_count,
            )
        )
        self._speed = 0.0
        self.has_made = asyncio.Event()  # since it was cleared
        self.tokens = 0
        self.device = ""
        self.verdicts = RecentTable[PeerId, TrainerVerdict](MAX_TRAINERS)

    async def run(self) -> None:
        """Make groups until cancelled. Raises MurmurError once the generator fails again and again."""
        try:
            while True:
                if not await self._make_batch():
                    await self._wait_for_change()
        finally:
            await self.generator.stop()

    async def _wait_for_change(self) -> None:
        """Wait for new weights or for a trainer that fetches groups."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSE_SECONDS):
                await self._store.changed.wait()
        self._store.changed.clear()

    async def _make_batch(self) -> bool:
        """Make some groups with the newest weights; returns whether there was anything to make."""
        state, number = self._store.blob, self._store.chain.round
        if state is None or self._store.is_complete or not self._rl.has_begun(number):
            return False
        self.outbox.begin_round(
            number, groups_of_round(self._rl, self._planner.plan(number).steps), self._share_of_waiting()
        )
        places = self.outbox.next_places(max(1, TEXTS_AT_ONCE // self._rl.group)) if self.outbox.round == number else []
        if not places:
            return False
        path = self._store.blobs.path(state.digest)
        reply = await self.generator.draw(
            DrawRequest(round=number, state=path, serials=tuple(place.serial for place in places))
        )
        if reply.lacks_state:
            return False
        await self._add(number, reply)
        return True

    def _share_of_waiting(self) -> float:
        """Return the number of trainers over that of rollout peers, at most 1."""
        others = {
            peer: record.role for peer, record in self._node.admitted.records().items() if peer != self._node.peer_id
        }
        roles = Counter(others.values())
        return min(1.0, max(1, roles["trainer"]) / (1 + roles["rollout"]))

    async def _add(self, number: int, reply: DrawReply) -> None:
        self.device = reply.device
        groups = [drawn.to_group(number, reply.device) for drawn in reply.groups]
        identity, run_id = self._node.identity, self._store.run_id
        made = [HeldGroup(group.place, sign_group(identity, run_id, group)) for group in groups]
        count = sum(group.tokens for group in groups)
        self.tokens += count
        share = min(1.0, reply.seconds / SPEED_SECONDS)
        self._speed += max(share, 0.05) * (count / max(reply.seconds, 1e-6) - self._speed)
        await asyncio.to_thread(self._journal.append, made, [*self.outbox.groups, *made])
        self.outbox.add(made)  # only now a trainer can fetch them
        self.has_made.set()

    def status_fields(self) -> Mapping[str, object]:
        """Return the fields of the status that describe the groups."""
        reasons = [verdict.reason for verdict in self.verdicts.values() if verdict.reason]
        return {
            "tokens": self.tokens,
            "tokens_per_second": self._speed,
            "device": self.device,
            "trainer_restarts": self.generator.deaths,
            "trainer_trouble": self.generator.trouble,
            "absence": reasons[-1] if reasons else "",
        }

    def counts(self) -> Mapping[str, int]:
        """Count the groups by outcome, with the numbers that trainers report."""
        return {
            "groups made": self.outbox.made,
            "groups waiting": self.outbox.waiting,
            "groups taken": sum(verdict.taken for verdict in self.verdicts.values()),
            "groups refused": sum(verdict.refused for verdict in self.verdicts.values()),
        }

    def describe_wait(self) -> str:
        """Return why no groups are made; empty if they are."""
        number = self._store.chain.round
        if not self._rl.has_begun(number):
            return f"the run learns text until round {self._rl.start_round}"
        if self.outbox.round == number and not self.outbox.next_places(1):
            return "its groups wait for a trainer" if self.outbox.waiting else "the round has enough of its groups"
        return ""


class RolloutsService(RolloutsServicer):
    """Serves the groups to the trainers of the run."""

    def __init__(self, node: Node, roller: Roller) -> None:
        self._node = node
        self._roller = roller
        self._run = bytes.fromhex(node.options.run_id)
        self._buckets = TokenBuckets(BURST_CALLS, CALLS_PER_SECOND)

    async def Groups(self, request: RolloutsRequest, context: Any) -> RolloutsReply:  # noqa: N802
        peer = UNKNOWN_CALLER
        try:
            peer = caller(context)
            self._check(peer, request)
        except PeerFault as fault:
            self._node.directory.record_refusal(peer, fault)
            await abort_refused(context, fault)
        self._roller.verdicts[peer] = TrainerVerdict(
            request.taken, request.refused, sanitize(request.reason[:MAX_REASON_CHARACTERS])
        )
        waiting = list(self._roller.outbox.serve(peer, Place(request.round, request.serial)))
        page = page_of(waiting)
        return RolloutsReply(groups=page, more=len(page) < len(waiting))

    def _check(self, peer: PeerId, request: RolloutsRequest) -> None:
        if request.run != self._run:
            raise StaleError(f"{peer} requests rollouts of another run")
        record = self._node.admitted.records().get(peer)
        if record is None or record.role != "trainer":
            raise StaleError(f"{peer} requests rollouts and is not a trainer of the run")
        if max(request.round, request.serial, request.taken, request.refused) > MAX_ROUND:
            raise LimitError(f"{peer} requests rollouts with numbers that are out of range")
        if not self._buckets.try_take(peer, time.monotonic()):
            raise LimitError(f"{peer} requests rollouts too often")


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
        target = store.steering.manifest_at(chain.round).target
        newest = find_newest_validation(node.admitted.records().values())
        return {
            **node.status_fields(),
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
            "bytes_received_by_kind": {"blobs": store.bytes_received, **node.directory.traffic.received},
            "refusals": dict(node.metrics.refusals),
            "setbacks": dict(node.metrics.recovered_errors),
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
    stop = stop_on_signal(display)
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
    figures = _publish_figures(node, status, roller)
    loops = store.run(), roller.run(), figures, trim_periodically(), display.show_status(status)
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


async def _publish_figures(node: Node, status: RolloutStatus, roller: Roller) -> None:
    """Update the figures of our record after each batch of groups; its renewals carry them to the page."""
    while True:
        await roller.has_made.wait()
        roller.has_made.clear()
        node.directory.update(**status.status().record_fields())


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
