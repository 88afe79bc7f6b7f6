"""Serve the calls about microbatches."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from node.daemon.stages.refusals import as_fault
from node.daemon.stages.stage_effects import NodeStages
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.murmur_pb2 import (
    AskReply,
    Contradiction,
    ContradictReply,
    InviteReply,
    InviteRequest,
    ReleaseReply,
    ReleaseRequest,
    StageOutcome,
    StageTask,
    StepReply,
    StepStatement,
    TellReply,
)
from protocol.murmur_pb2_grpc import StagesServicer
from protocol.pipeline.messages import Outcome, Task, read_invitation, read_release
from protocol.transport.transport import UNKNOWN_CALLER, caller


class StagesService(StagesServicer):
    """Receives tasks and releases for our stage, and outcomes and invitations for our own microbatches."""

    def __init__(self, node: NodeStages, recorder: PeerDirectory) -> None:
        self._node = node
        self._recorder = recorder

    async def Ask(self, request: StageTask, context: Any) -> AskReply:  # noqa: N802
        async with self._refusing_faults(context) as sender:
            answer = self._node.answer(Task.from_wire(request, sender))
            if answer.kind == "refused":
                fault = MalformedError("a task whose inputs are not those of this stage")
                self._recorder.record_refusal(sender, fault)
            return answer.to_wire()

    async def Tell(self, request: StageOutcome, context: Any) -> TellReply:  # noqa: N802
        async with self._refusing_faults(context) as sender:
            self._node.take_outcome(sender, Outcome.from_wire(request, sender))
        return TellReply()

    async def Release(self, request: ReleaseRequest, context: Any) -> ReleaseReply:  # noqa: N802
        async with self._refusing_faults(context) as sender:
            self._node.release(sender, *read_release(request))
        return ReleaseReply()

    async def Invite(self, request: InviteRequest, context: Any) -> InviteReply:  # noqa: N802
        async with self._refusing_faults(context) as sender:
            self._node.take_invitation(sender, read_invitation(request))
        return InviteReply()

    async def State(self, request: StepStatement, context: Any) -> StepReply:  # noqa: N802
        async with self._refusing_faults(context) as sender:
            self._node.take_statement(sender, request)
        return StepReply()

    async def Contradict(self, request: Contradiction, context: Any) -> ContradictReply:  # noqa: N802
        async with self._refusing_faults(context):
            self._node.take_contradiction(request)
        return ContradictReply()

    @asynccontextmanager
    async def _refusing_faults(self, context: Any) -> AsyncIterator[PeerId]:
        """Yield the caller, if the run admits it; record an error that its request causes as its fault, and abort."""
        sender = UNKNOWN_CALLER
        try:
            sender = caller(context)
            self._node.admitted.require(sender)
            yield sender
        except Exception as error:
            fault = as_fault(error)
            self._recorder.record_refusal(sender, fault)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
            raise AssertionError("abort always raises") from error
