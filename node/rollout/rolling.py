"""Roll out: let the generator draw group after group with the newest weights, sign them, and serve them to trainers.

The weights of the next round are fetched while the generator draws; it takes them between two batches, so it never
waits for them.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from node.daemon.node import Node
from node.daemon.stored_states.state_store import StateStore
from node.from_manifest import build_program
from node.monitoring.logs import sanitize
from node.rollout.generator import GeneratorProcess
from node.rollout.journal import FILE_NAME, GroupJournal
from node.rollout.messages import DrawReply, DrawRequest, GeneratorConfig
from node.rollout.outbox import MAX_TRAINERS, GroupOutbox, HeldGroup
from protocol.errors import LimitError, PeerFault, StaleError
from protocol.identity import PeerId
from protocol.murmur_pb2 import RolloutsReply, RolloutsRequest
from protocol.murmur_pb2_grpc import RolloutsServicer
from protocol.recent import RecentTable
from protocol.rollout_groups import GroupLimits, Place, page_of, require_rl, sign_group
from protocol.signing import MAX_ROUND
from protocol.transport.rate_limit import TokenBuckets
from protocol.transport.transport import UNKNOWN_CALLER, caller

logger = logging.getLogger(__name__)

TEXTS_AT_ONCE = 64  # of one request to the generator
PAUSE_SECONDS = 0.1  # between two looks whether a trainer has fetched groups
SPEED_SECONDS = 10.0  # over which tokens a second are averaged
CALLS_PER_SECOND, BURST_CALLS = 10.0, 40  # of one trainer
MAX_REASON_CHARACTERS = 200


@dataclass(frozen=True)
class GroupVerdict:
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
        self.tokens = 0
        self.device = ""
        self.verdicts = RecentTable[PeerId, GroupVerdict](MAX_TRAINERS)

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
        self.outbox.begin_round(number)
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

    async def _add(self, number: int, reply: DrawReply) -> None:
        self.device = reply.device
        made = list[HeldGroup]()
        for drawn in reply.groups:
            group = drawn.to_group(number, reply.device)
            made.append(HeldGroup(group.place, sign_group(self._node.identity, self._store.run_id, group)))
            self.tokens += group.tokens
        count = sum(len(tokens) for drawn in reply.groups for tokens in drawn.tokens)
        share = min(1.0, reply.seconds / SPEED_SECONDS)
        self._speed += max(share, 0.05) * (count / max(reply.seconds, 1e-6) - self._speed)
        await asyncio.to_thread(self._journal.append, made, [*self.outbox.groups, *made])
        self.outbox.add(made)  # only now a trainer can fetch them

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
            is_limit = isinstance(fault, LimitError)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if is_limit else grpc.StatusCode.INVALID_ARGUMENT
            await context.abort(code, str(fault))
        self._roller.verdicts[peer] = GroupVerdict(
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
