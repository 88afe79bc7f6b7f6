"""Pass events to the round loop one by one, and verify peers' messages before they become events."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from node.daemon.peers.peer_rpc import MAX_BATCH_BYTES, Outbox
from node.loop.actions import Answer
from node.loop.events import LoopEvent, MessagesReceived
from node.loop.stage_events import StageEvent
from node.monitoring.status_reporter import StatusReporter
from protocol.audits import FINDING_KIND
from protocol.consensus.events import MisbehaviourSeen
from protocol.consensus.messages.briefs.codec import restore
from protocol.consensus.messages.briefs.seen import SeenMessages
from protocol.consensus.messages.contributions import ContributionLimits
from protocol.consensus.messages.kinds import parse, signed_round
from protocol.errors import LimitError, PeerFault
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.murmur_pb2 import Brief, Signed

logger = logging.getLogger(__name__)

MAX_DECISION_REPLY_BYTES = 768 * 1024  # in one reply; larger decisions go through the outbox


class EventHandler(Protocol):
    def handle(self, event: LoopEvent | StageEvent) -> None: ...


class FindingReceiver(Protocol):
    def receive(self, signed: Signed) -> None:
        """Take the finding of another auditor. Raises PeerFault."""


class Inbox:
    """Queues events for one handler, which handles them at once unless it is already handling one.

    An event posted while another one is handled (a peer turns out unreachable during a send) waits until the actions of
    that one are done.
    """

    def __init__(self) -> None:
        self._events = deque[LoopEvent | StageEvent]()
        self._handler: EventHandler | None = None
        self._is_draining = False
        self._fault: BaseException | None = None
        self._ended = asyncio.Event()
        self._may_leave = asyncio.Event()
        self.is_extended = False  # whether it leaves because the run goes on

    def attach(self, handler: EventHandler) -> None:
        self._handler = handler

    def post(self, event: LoopEvent | StageEvent) -> None:
        self._events.append(event)
        if self._is_draining or self._handler is None:
            return
        self._is_draining = True
        try:
            while self._events:
                self._handler.handle(self._events.popleft())
        except Exception as error:
            logger.exception("the round loop failed")
            self.fail(error)
        finally:
            self._is_draining = False
            self._events.clear()

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
        self.auditor: FindingReceiver | None = None  # None: the run has no audits

    def receive(self, sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        """Verify and post the messages that `sender` delivered; return messages that it seems to lack.

        The sender need not have signed all of them.
        """
        messages, faults = [], list[PeerFault]()
        for signed in envelopes:
            try:
                if signed.kind == FINDING_KIND and self.auditor is not None:
                    self.auditor.receive(signed)
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

    def answer(self, answer: Answer, outbox: Outbox) -> None:
        """Send a decision in the reply if it is small enough, else through the outbox."""
        if sum(signed.ByteSize() for signed in answer.messages) <= MAX_DECISION_REPLY_BYTES:
            self._reply += answer.messages
            return
        for signed in answer.messages:
            outbox.send([answer.peer], signed)
