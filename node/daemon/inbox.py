"""Pass events to the round loop one by one, and verify peers' messages before they become events.

The node verifies all messages of a call at once, one signature after another, and everything else waits meanwhile: a
roster of a thousand takes a fifth of a second. So it limits the bytes per peer, because signatures fill them. A member
may send as much as the leader of the largest possible round, which repeats its roster or its proposal at every
retransmission, and much more in a burst. Unknown peers share a small quota, because creating an identity costs nothing;
it suffices for the messages of a new peer before its record is known. A refused call costs one retransmission.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from node.daemon.peers.peer_rpc import MAX_BATCH_BYTES, Outbox
from node.loop.actions import SendReply
from node.loop.events import LoopEvent, MessagesReceived
from node.loop.stage_events import StageEvent
from node.monitoring.status_reporter import StatusReporter
from protocol.audits import FINDING_KIND
from protocol.consensus.events import MisbehaviourSeen
from protocol.consensus.messages.briefs import SeenMessages, restore
from protocol.consensus.messages.contributions import MAX_CONTRIBUTIONS, ContributionLimits
from protocol.consensus.messages.kinds import parse, signed_round
from protocol.consensus.state import RETRANSMITS_PER_TIMEOUT
from protocol.errors import LimitError, PeerFault
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Brief, Signed
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets

logger = logging.getLogger(__name__)

MAX_DECISION_REPLY_BYTES = 768 * 1024  # in one reply; larger decisions go through the outbox
CONTRIBUTION_BYTES, PART_BYTES = 320, 48  # size of a signed one, rounded up
MIN_CALL_BYTES = 1024  # least charge of a call
MIN_MESSAGE_BYTES = 256  # least charge of a message
MEMBER_BURST_MESSAGES = 8  # of the largest size: those of a round, and earlier decisions
MIN_MEMBER_RATE = 64 * 1024
ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE = 1024 * 1024, 128 * 1024  # of all unknown peers together
UNKNOWN_PEER_RATE = 8 * 1024


class Inbox:
    """Queues events for one handler, which gets them at once unless it is already handling one.

    An event posted while another one is handled (a peer turns out unreachable during a send) waits until the actions of
    that one are done.
    """

    def __init__(self) -> None:
        self._events = deque[LoopEvent | StageEvent]()
        self._handle: Callable[[LoopEvent], None] | None = None
        self._handle_stage: Callable[[StageEvent], None] | None = None
        self._is_draining = False
        self._fault: BaseException | None = None
        self._ended = asyncio.Event()
        self._may_leave = asyncio.Event()
        self.is_extended = False  # whether it leaves because the run goes on

    def attach(self, handle: Callable[[LoopEvent], None]) -> None:
        self._handle = handle

    def attach_stage(self, handle: Callable[[StageEvent], None]) -> None:
        """Pass the events of the stage of a pipeline to its own handler."""
        self._handle_stage = handle

    def post(self, event: LoopEvent | StageEvent) -> None:
        self._events.append(event)
        if self._is_draining or (self._handle is None and self._handle_stage is None):
            return
        self._is_draining = True
        try:
            while self._events:
                self._pass(self._events.popleft())
        except Exception as error:
            logger.exception("the round loop failed")
            self.fail(error)
        finally:
            self._is_draining = False
            self._events.clear()

    def _pass(self, event: LoopEvent | StageEvent) -> None:
        if isinstance(event, StageEvent):
            assert self._handle_stage is not None
            self._handle_stage(event)
        else:
            assert self._handle is not None
            self._handle(event)

    def fail(self, error: BaseException) -> None:
        """Record an error in our own code; the node ends with the first one."""
        self._fault = self._fault or error
        self._ended.set()
        self._may_leave.set()

    def end(self) -> None:
        """Record that the run is over."""
        self._ended.set()

    def leave(self, is_extended: bool = False) -> None:
        """Record that nobody needs this node any more, or that the run goes on beyond its end."""
        self.is_extended = is_extended
        self._may_leave.set()

    async def wait_until_ended(self) -> None:
        """Wait until the run is over. Raises the first recorded error."""
        await self._wait_for(self._ended)

    async def wait_until_left(self) -> None:
        """Wait until nobody needs this node any more. Raises the first recorded error."""
        await self._wait_for(self._may_leave)

    async def _wait_for(self, event: asyncio.Event) -> None:
        await event.wait()
        if self._fault is not None:
            raise self._fault


class MessageReceiver:
    """Verifies the messages that peers deliver to one replica, and collects the replies."""

    def __init__(
        self, run_id: RunId, limits: ContributionLimits, seen: SeenMessages, inbox: Inbox, status: StatusReporter
    ) -> None:
        self._run_id = run_id
        self._limits = limits
        self._seen = seen
        self._inbox = inbox
        self._status = status
        self._reply: list[Signed] = []
        self.on_finding: Callable[[Signed], None] | None = None  # None: the run has no audits

    def receive(self, sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        """Verify and post the messages that `sender` delivered; return messages that it seems to lack.

        The sender need not have signed all of them.
        """
        messages, faults = [], list[PeerFault]()
        for signed in envelopes:
            try:
                if signed.kind == FINDING_KIND and self.on_finding is not None:
                    self.on_finding(signed)
                else:
                    messages.append(parse(signed, self._run_id, self._limits))
                    self._seen.record(signed)
            except PeerFault as fault:
                faults.append(fault)
                self._accuse_signer(signed)
        if faults:
            self._status.record_refusal(sender, *faults)
        self._inbox.post(MessagesReceived(sender, tuple(messages)))
        reply, self._reply = self._reply, []
        return reply

    def _accuse_signer(self, signed: Signed) -> None:
        """Report the signer of a refused statement; an envelope that it did not sign says nothing about it."""
        if (number := signed_round(signed, self._run_id)) is not None:
            self._inbox.post(MisbehaviourSeen(signed.peer, number))

    def restore(self, sender: PeerId, briefs: Iterable[Brief]) -> tuple[list[Signed], list[int]]:
        """Return the messages of the briefs that `sender` delivered, and the places of those that we cannot restore."""
        restored, unresolved, size = list[Signed](), list[int](), 0
        try:
            for place, brief in enumerate(briefs):
                signed = restore(brief, self._seen)
                if signed is None:
                    unresolved.append(place)
                    continue
                size += signed.ByteSize()
                if size > MAX_BATCH_BYTES:
                    raise LimitError(f"{sender} delivers briefs of more than {MAX_BATCH_BYTES} bytes in one call")
                restored.append(signed)
        except PeerFault as fault:
            self._status.record_refusal(sender, fault)
        return restored, unresolved

    def answer(self, answer: SendReply, outbox: Outbox) -> None:
        """Send a decision in the reply if it is small enough, else through the outbox."""
        if sum(signed.ByteSize() for signed in answer.messages) <= MAX_DECISION_REPLY_BYTES:
            self._reply += answer.messages
            return
        for signed in answer.messages:
            outbox.send([answer.peer], signed)


class InboundQuota:
    """Limits the bytes that each peer delivers; `max_parts` is the most parts of a contribution."""

    def __init__(self, max_parts: int, leader_timeout: float) -> None:
        contribution = CONTRIBUTION_BYTES + max_parts * PART_BYTES
        largest = min(MAX_BATCH_BYTES, MAX_CONTRIBUTIONS * contribution)
        rate = max(MIN_MEMBER_RATE, largest * RETRANSMITS_PER_TIMEOUT / leader_timeout)
        self._members = TokenBuckets(MEMBER_BURST_MESSAGES * largest, rate)
        per_peer = TokenBuckets(2 * contribution + 16 * MIN_CALL_BYTES, UNKNOWN_PEER_RATE)
        self._unknown_peers = SharedTokenBuckets(per_peer, TokenBuckets(ALL_UNKNOWN_BURST_BYTES, ALL_UNKNOWN_RATE))

    def charge(self, peer: PeerId, sizes: list[int], is_member: bool, now: float) -> None:
        """Charge a call with messages of these sizes. Raises LimitError if it exceeds the quota for now."""
        size = max(MIN_CALL_BYTES, sum(max(MIN_MESSAGE_BYTES, size) for size in sizes))
        if is_member:
            if not self._members.try_take(peer, now, size):
                raise LimitError(f"{peer} delivers more than a leader needs to; retry later")
        elif lack := self._unknown_peers.charge(peer, now, size):
            excess = f"delivers {size} bytes" if lack == "caller" else "delivers while too many unknown peers do"
            raise LimitError(f"{peer} {excess} and is not known as a member; retry later")
