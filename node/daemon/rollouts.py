"""Fetch groups of rollout peers for the trainer of a replica, and hand them out oldest first.

`protocol.rollout_intake` decides; here are the calls. Every peer is asked by one call at a time, and each call has a
deadline, so a slow or dead peer delays nobody else.
"""

import asyncio
import base64
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from node.daemon.node_network import NodeNetwork
from node.daemon.peers.peer_rpc import await_reply, call_by_best_channel
from node.daemon.peers.swarm_view import SwarmView
from node.daemon.state.replica_state import ReplicaState
from node.monitoring.status import LearningSample, LearningStatus, MakerStatus
from node.monitoring.status_reporter import StatusReporter
from node.processes.workers import BackgroundTasks, FaultSink
from node.trainer.ipc.channel import AnchorApplied, FromTrainer, Ready, ToTrainer
from node.trainer.ipc.rollout_messages import GroupVerdict, RolloutFound, RolloutsJudged, RolloutsWanted
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.murmur_pb2 import RolloutsReply, RolloutsRequest
from protocol.murmur_pb2_grpc import RolloutsStub
from protocol.recent import RecentTable
from protocol.rollout_groups import (
    CALL_SECONDS,
    MAX_REASON_CHARACTERS,
    GroupLimits,
    Place,
    check_page,
    groups_of_round,
    open_group,
    require_rl,
    share_round,
)
from protocol.rollout_intake import MAX_MAKERS, RolloutIntake
from protocol.tasks import run_periodically

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
SHOWN_ROUNDS = 200
SHOWN_SAMPLES = 8
MAX_CALLS = 16  # at once


@dataclass
class MakerFigures:
    """The fate of one maker's groups at this trainer."""

    taken: int = 0
    refused: int = 0
    reason: str = ""
    reward: float = 0.0  # sum over groups


@dataclass
class RolloutFigures:
    """The figures of learning from rollouts since the start of this process.

    Attributes:
        groups, answers, tokens: that were learned from.
        reward: mean score of the answers of the newest step, and so on for the other numbers.
        fates: groups by their fate (`RolloutIntake.counts`), with those that were "skipped" or "unchecked".
        ages: groups by age in rounds.
    """

    groups: int = 0
    answers: int = 0
    tokens: int = 0
    reward: float | None = None
    length: float = 0.0
    entropy: float = 0.0
    mismatch: float = 0.0
    effective: float = 1.0
    clipped: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    ages: Counter[int] = field(default_factory=Counter)
    by_round: RecentTable[int, tuple[float, int]] = field(default_factory=lambda: RecentTable(SHOWN_ROUNDS))
    samples: deque[LearningSample] = field(default_factory=lambda: deque(maxlen=SHOWN_SAMPLES))

    def add(self, judged: RolloutsJudged, round_number: int) -> None:
        """Add the groups of one step of a round."""
        self.samples.extend(LearningSample(**each.model_dump()) for each in judged.samples)
        valid = [each for each in judged.verdicts if not each.refusal]
        self.fates["skipped"] += judged.skipped
        self.fates["unchecked"] += sum(each.is_unchecked for each in judged.verdicts)
        self.ages.update(each.age for each in valid)
        self.groups += len(valid)
        self.answers += sum(each.answers for each in valid)
        self.tokens += sum(each.tokens for each in valid)
        if valid:
            total, count = self.by_round.get(round_number, (0.0, 0))
            self.by_round[round_number] = (total + sum(each.reward for each in valid), count + len(valid))
            self.reward = sum(each.reward for each in valid) / len(valid)
            self.length = sum(each.tokens for each in valid) / sum(each.answers for each in valid)
            self.entropy, self.mismatch = judged.entropy, judged.mismatch
            self.effective, self.clipped = judged.effective, judged.clipped


class RolloutFeed:
    """The pool of one trainer, filled by calls to rollout peers."""

    def __init__(
        self,
        node: NodeNetwork,
        state: ReplicaState,
        view: SwarmView,
        send: Callable[[ToTrainer], Awaitable[bool]],
        faults: FaultSink,
        status: StatusReporter,
    ) -> None:
        rl = require_rl(state.manifest)
        self._rl = rl
        self._run_id = state.run_id
        self._transport = node.transport
        self._state = state
        self._view = view
        self._send = send
        self._background = BackgroundTasks(faults)
        self._status = status
        # Those of the maker: a smaller bound would refuse honest groups in runs whose rounds grow or overlap.
        self._limits = GroupLimits.of(state.manifest, state.planner.max_steps)
        self.intake = RolloutIntake(state.run_id, node.peer_id, self._capacity(0), rl.max_age)
        self.figures = RolloutFigures()
        self.makers = RecentTable[PeerId, MakerFigures](MAX_MAKERS)
        self._seen_round = -1
        self._came_in: int | None = None  # the round in which others shared the groups without this trainer
        self._applied = 0  # the round whose weights the trainer has
        self._demand = 0  # groups that the trainer can take
        self._is_ready = False
        self._asked = set[PeerId]()

    def start(self) -> None:
        """Fetch groups from now on."""
        self._background.spawn(run_periodically(POLL_SECONDS, self._poll))

    def stop(self) -> None:
        """End all calls."""
        self._background.cancel_all()

    def on_trainer_message(self, message: FromTrainer) -> None:
        """Take note of a message of the trainer."""
        match message:
            case Ready():
                self.intake.restart({maker: Place(number, serial) for maker, number, serial in message.learned})
                self._applied, self._demand, self._is_ready = message.round, 0, True
            case AnchorApplied():
                self._applied = message.round
            case RolloutsWanted():
                self._demand += message.count
                self._background.spawn(self._hand_out())
            case RolloutsJudged():
                self._judge(message)

    async def _poll(self) -> None:
        """Ask all rollout peers that are not being asked, and hand out what is there."""
        self._follow_chain()
        rl_begins = max(0, self._rl.start_round - 1)
        if not self._is_ready or self._state.replicated.chain.round < rl_begins or self._is_early():
            return
        for maker, since in self.intake.wanted(self._view.rollout_peers()).items():
            if maker not in self._asked and len(self._asked) < MAX_CALLS:
                self._asked.add(maker)
                self._background.spawn(self._fetch(maker, since))
        await self._hand_out()

    def _follow_chain(self) -> None:
        """Show the pool the newest round, and who shares the groups of each."""
        chain, me = self._state.replicated.chain, self.intake.me
        if chain.round == self._seen_round:
            return
        is_first, self._seen_round = self._seen_round < 0, chain.round
        self.intake.capacity = self._capacity(chain.round)
        newest, shared = dict[PeerId, int](), frozenset[PeerId]()
        for entry in chain.log.commits:
            number = entry.body.round + 1
            newest |= dict.fromkeys((contribution.sender for contribution in entry.body.contributions), number)
            shared = share_round(number, newest, ())
            if number >= chain.round - self._rl.max_age and not self.intake.sharers(number):
                self.intake.begin_round(number, shared)
        if is_first and shared and me not in shared:
            self._came_in = chain.round
        else:
            live = {*self._view.trainers(), me}
            self.intake.begin_round(chain.round, share_round(chain.round, newest, live))

    def _capacity(self, round_number: int) -> int:
        return groups_of_round(self._rl, self._state.planner.plan(round_number).steps)

    def _is_early(self) -> bool:
        """Return whether the groups of the round are shared among others that live; the next round's are ours too."""
        round_number = self._state.replicated.chain.round
        if self._came_in != round_number:
            return False
        if self.intake.sharers(round_number) & set(self._view.other_trainers()):
            return True
        self._came_in = None
        self.intake.begin_round(round_number, self._view.trainers())
        return False

    async def _hand_out(self) -> None:
        groups = self.intake.take(self._demand, self._applied)
        self._demand -= len(groups)
        for each in groups:
            body = each.group.to_wire().SerializeToString(deterministic=True)
            await self._send(RolloutFound(maker=each.maker, body=base64.b64encode(body)))

    async def _fetch(self, maker: PeerId, since: Place) -> None:
        try:
            reply = await self._call(maker, since)
            check_page(reply.groups, since)
            for signed in reply.groups:
                self.intake.offer(open_group(signed, self._run_id, maker, self._limits))
                if self.intake.is_full:
                    break
        except UnreachableError as error:
            logger.debug("no rollouts of %s: %s", maker, error)
        except PeerFault as fault:
            self._strike(maker, str(fault), is_proof=False)
        finally:
            self._asked.discard(maker)
        await self._hand_out()

    async def _call(self, maker: PeerId, since: Place) -> RolloutsReply:
        clock = asyncio.get_running_loop().time
        deadline, figures = clock() + CALL_SECONDS, self.makers.get(maker, MakerFigures())
        request = RolloutsRequest(
            run=bytes.fromhex(self._run_id),
            round=since.round,
            serial=since.serial,
            taken=figures.taken,
            refused=figures.refused,
            reason=figures.reason,
        )

        async def call(channel: Any, seconds: float) -> RolloutsReply:
            stub = RolloutsStub(channel)
            return await await_reply(maker, lambda: stub.Groups(request, timeout=seconds))

        return await call_by_best_channel(self._transport, maker, call, lambda: deadline - clock())

    def _judge(self, judged: RolloutsJudged) -> None:
        self.figures.add(judged, self._applied)
        for verdict in judged.verdicts:
            figures = self.makers.setdefault(verdict.maker, MakerFigures())
            if not verdict.refusal:
                figures.taken += 1
                figures.reward += verdict.reward
            elif not verdict.is_unchecked:
                self._strike(verdict.maker, _describe(verdict), is_proof=verdict.is_proof)

    def status(self) -> LearningStatus:
        """Return the figures for people."""
        figures, intake = self.figures, self.intake
        makers = {
            maker: MakerStatus(
                taken=each.taken,
                refused=each.refused,
                reason=each.reason,
                reward=each.reward / each.taken if each.taken else None,
            )
            for maker, each in self.makers.items()
        }
        return LearningStatus(
            waiting=intake.waiting,
            groups=figures.groups,
            answers=figures.answers,
            tokens=figures.tokens,
            reward=figures.reward,
            length=figures.length,
            entropy=figures.entropy,
            mismatch=figures.mismatch,
            effective=figures.effective,
            clipped=figures.clipped,
            fates={fate: count for fate, count in (intake.counts + figures.fates).items() if count},
            ages={str(age): count for age, count in sorted(figures.ages.items())},
            rewards={str(number): total / count for number, (total, count) in figures.by_round.items()},
            makers=makers,
            samples=tuple(figures.samples),
        )

    def _strike(self, maker: PeerId, reason: str, *, is_proof: bool) -> None:
        figures = self.makers.setdefault(maker, MakerFigures())
        figures.refused += 1
        figures.reason = reason[:MAX_REASON_CHARACTERS]
        if self.intake.strike(maker, reason, is_proof=is_proof):
            line = f"no rollouts of {maker} any more: {reason}"
            self._status.record_recovered("rollouts refused", line)


def _describe(verdict: GroupVerdict) -> str:
    return f"group {verdict.serial} of round {verdict.round}: {verdict.refusal}"
