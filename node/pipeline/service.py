"""Serve the calls about microbatches."""

from typing import Any, Protocol, TypeVar

import grpc

from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import (
    AskReply,
    InviteReply,
    InviteRequest,
    ReleaseReply,
    ReleaseRequest,
    StageOutcome,
    StageTask,
    TellReply,
)
from protocol.murmur_pb2_grpc import StagesServicer
from protocol.pipeline.messages import Answer, Outcome, Task, read_invitation, read_release
from protocol.transport.transport import UNKNOWN_CALLER, caller

Reply = TypeVar("Reply")


class StagePeer(Protocol):
    """The part of a node that serves a stage and owns microbatches."""

    def answer(self, task: Task) -> Answer:
        """Answer a task at once."""

    def take_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        """Take the outcome of a task of ours."""

    def release(self, peer: PeerId, run: RunId, serials: tuple[int, ...]) -> None:
        """Forget microbatches of a peer that have ended."""

    def take_invitation(self, peer: PeerId, run: RunId) -> None:
        """Send forwards to a peer that has room again."""


class RefusalRecorder(Protocol):
    def record_refusal(self, peer: PeerId, fault: PeerFault, /) -> None:
        """Count and log a refused call."""


class StagesService(StagesServicer):
    """Serves tasks for our stage; outcomes of our own microbatches, and invitations to send them; and releases."""

    def __init__(self, peer: StagePeer, recorder: RefusalRecorder) -> None:
        self._peer = peer
        self._recorder = recorder

    async def Ask(self, request: StageTask, context: Any) -> AskReply:  # noqa: N802
        sender = UNKNOWN_CALLER
        try:
            sender = caller(context)
            return self._peer.answer(Task.from_wire(request, sender)).to_wire()
        except PeerFault as fault:
            raise await self._refuse(sender, fault, context) from fault

    async def Tell(self, request: StageOutcome, context: Any) -> TellReply:  # noqa: N802
        sender = UNKNOWN_CALLER
        try:
            sender = caller(context)
            self._peer.take_outcome(sender, Outcome.from_wire(request))
        except PeerFault as fault:
            raise await self._refuse(sender, fault, context) from fault
        return TellReply()

    async def Release(self, request: ReleaseRequest, context: Any) -> ReleaseReply:  # noqa: N802
        sender = UNKNOWN_CALLER
        try:
            sender = caller(context)
            self._peer.release(sender, *read_release(request))
        except PeerFault as fault:
            raise await self._refuse(sender, fault, context) from fault
        return ReleaseReply()

    async def Invite(self, request: InviteRequest, context: Any) -> InviteReply:  # noqa: N802
        sender = UNKNOWN_CALLER
        try:
            sender = caller(context)
            self._peer.take_invitation(sender, read_invitation(request))
        except PeerFault as fault:
            raise await self._refuse(sender, fault, context) from fault
        return InviteReply()

    async def _refuse(self, sender: PeerId, fault: PeerFault, context: Any) -> AssertionError:
        self._recorder.record_refusal(sender, fault)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
        return AssertionError("abort always raises")
