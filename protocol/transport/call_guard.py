"""Allow each caller a number of calls of every service, and of all services after refused calls.

A guard stands between a server and its servicers. It charges each call before the servicer sees it, so a call above the
allowance costs no work, no disk access and no log line. The allowance of a method is the same for every caller. Keys
are free, so all callers without standing share 16 such allowances; a caller has standing if it has a vote or, while
nobody has one, if its record is known. A call that a servicer refuses as wrong is charged to the caller too: a caller
that goes on with wrong calls is answered no more until the charge has decayed.
"""

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from protocol.errors import LimitError, MalformedError
from protocol.identity import PeerId
from protocol.transport.connection_supervisor import ConnectionSupervisor
from protocol.transport.grpc_bridge import UNKNOWN_CALLER, caller
from protocol.transport.rate_limit import SharedTokenBuckets, TokenBuckets

logger = logging.getLogger(__name__)

SHARES_OF_OTHERS = 16  # allowances of a method that all callers without standing have together


@dataclass(frozen=True)
class Allowance:
    """The calls of one method that a caller may make at once, and a second in the long run."""

    burst: float
    rate: float


ALLOWANCES: Mapping[str, Allowance] = {  # by method; the slowest of honest needs, with room
    "murmur.v1.Membership/Gossip": Allowance(128, 64),  # see also MAX_CALLS_PER_HEARTBEAT
    "murmur.v1.Rounds/Deliver": Allowance(512, 128),
    "murmur.v1.Rounds/Chain": Allowance(16, 2),  # a reply has up to half a megabyte
    "murmur.v1.Blobs/Pieces": Allowance(512, 128),
    "murmur.v1.Blobs/Fetch": Allowance(1024, 512),  # a megabyte each
    "murmur.v1.Stages/Ask": Allowance(2048, 512),
    "murmur.v1.Stages/Tell": Allowance(2048, 512),
    "murmur.v1.Stages/Release": Allowance(256, 64),
    "murmur.v1.Stages/Invite": Allowance(512, 128),
    "murmur.v1.Stages/State": Allowance(256, 64),
    "murmur.v1.Stages/Contradict": Allowance(256, 64),
    "murmur.v1.Rollouts/Groups": Allowance(64, 8),  # pages of groups, asked for twice a second
    "murmur.v1.Carriers/Carry": Allowance(128, 32),
    "murmur.v1.Steering/Revisions": Allowance(16, 2),
    "murmur.v1.Runs/Manifest": Allowance(8, 0.5),
    "murmur.v1.Runs/DialBack": Allowance(4, 0.1),
}
DEFAULT_ALLOWANCE = Allowance(16, 2)
REFUSED_CALLS = Allowance(64, 1)  # calls that a servicer refuses as wrong
FLOODED_CALLS = Allowance(256, 8)  # calls above the allowance, and calls that their caller cancels
WRONG_CALL_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class HandlerSink(Protocol):
    """The part of a server that generated code registers handlers with."""

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None: ...
    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None: ...


class CallGuard:
    """The allowances of all callers of one node, over all of its servers.

    `supervisor` says who has standing, and counts refused calls.
    """

    def __init__(self, supervisor: ConnectionSupervisor, clock: Callable[[], float] = time.monotonic) -> None:
        self._supervisor = supervisor
        self._clock = clock
        self._own = {name: TokenBuckets(allowed.burst, allowed.rate) for name, allowed in ALLOWANCES.items()}
        self._others = {name: _shared_buckets(allowed) for name, allowed in ALLOWANCES.items()}
        self._refused = TokenBuckets(REFUSED_CALLS.burst, REFUSED_CALLS.rate)
        self._floods = TokenBuckets(FLOODED_CALLS.burst, FLOODED_CALLS.rate)

    def charge(self, peer: PeerId, method: str) -> None:
        """Charge a call. Raises LimitError if the caller has used up its allowance for now."""
        now = self._clock()
        if self._refused.tokens_left(peer, now) < 1:
            raise LimitError("too many wrong calls; retry later")
        if self._supervisor.has_standing(peer):
            is_granted = self._own_buckets(method).try_take(peer, now)
        else:
            is_granted = self._other_buckets(method).charge(peer, now) is None
        if not is_granted:
            raise LimitError("too many calls; retry later")

    def charge_refused(self, peer: PeerId) -> None:
        """Charge a call that a servicer refused as wrong."""
        self._refused.try_take(peer, self._clock())

    def charge_flood(self, peer: PeerId) -> None:
        """Charge a call that was refused or cancelled, and cut a caller that goes on with them."""
        if not self._floods.try_take(peer, self._clock()):
            self._supervisor.ban(peer)

    def record_refusal(self, peer: PeerId, method: str, fault: LimitError) -> None:
        """Count and log a call above the allowance."""
        self._supervisor.refusals[fault.metric_label] += 1
        logger.debug("refusing a call of %s to %s: %s", peer, method, fault)
        self.charge_flood(peer)

    def _own_buckets(self, method: str) -> TokenBuckets:
        if method not in self._own:
            self._own[method] = TokenBuckets(DEFAULT_ALLOWANCE.burst, DEFAULT_ALLOWANCE.rate)
        return self._own[method]

    def _other_buckets(self, method: str) -> SharedTokenBuckets:
        if method not in self._others:
            self._others[method] = _shared_buckets(DEFAULT_ALLOWANCE)
        return self._others[method]


def _shared_buckets(allowed: Allowance) -> SharedTokenBuckets:
    overall = TokenBuckets(SHARES_OF_OTHERS * allowed.burst, SHARES_OF_OTHERS * allowed.rate)
    return SharedTokenBuckets(TokenBuckets(allowed.burst, allowed.rate), overall)


class GuardedServer:
    """Registers servicers with a server behind a guard, for grpc's generated code."""

    def __init__(self, server: HandlerSink, guard: CallGuard) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """Ignore them: they duplicate the registered handlers."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the handlers of a service, each behind the guard."""
        guard = self._guard
        guarded = {name: _guard_handler(handler, f"{service}/{name}", guard) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, guarded),))
        self._server.add_registered_method_handlers(service, guarded)


def _guard_handler(handler: Any, method: str, guard: CallGuard) -> Any:
    behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler

    async def serve(request: Any, context: Any) -> Any:
        peer = await _admit(context, method, guard)
        try:
            answer = behaviour(request, context)
            if inspect.isawaitable(answer):
                return await answer
            async for reply in answer:
                await context.write(reply)
        except asyncio.CancelledError:
            guard.charge_flood(peer)
            raise
        finally:
            if peer != UNKNOWN_CALLER and is_wrong_call(context.code()):
                guard.charge_refused(peer)

    return make(serve, handler.request_deserializer, handler.response_serializer)


async def _admit(context: Any, method: str, guard: CallGuard) -> PeerId:
    """Charge a call, and return its caller; a call without an identity is left to the servicer, which refuses it."""
    try:
        peer = caller(context)
    except MalformedError:
        peer = UNKNOWN_CALLER
    try:
        guard.charge(peer, method)
    except LimitError as fault:
        guard.record_refusal(peer, method, fault)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault))
    return peer


def is_wrong_call(code: Any) -> bool:
    """Return whether a servicer ended a call as wrong; gRPC gives the code as a number, and None for success."""
    return code in WRONG_CALL_CODES or code in [wrong.value[0] for wrong in WRONG_CALL_CODES]
