"""Allowances of callers, in front of gRPC's server and of our own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protocol import murmur_pb2_grpc
from protocol.errors import LimitError
from protocol.identity import Identity
from protocol.murmur_pb2 import ChainReply, ChainRequest, DeliverReply, DeliverRequest
from protocol.transport import call_guard
from protocol.transport.call_guard import (
    ALLOWANCES,
    FLOODED_CALLS,
    REFUSED_CALLS,
    SHARES_OF_OTHERS,
    CallGuard,
    GuardedServer,
    is_wrong_call,
)
from protocol.transport.connection_supervisor import STREAM_BURST, ConnectionSupervisor
from protocol.transport.tunnel import ConnectionLimits, TrafficCounter

METHOD = "murmur.v1.Rounds/Chain"
VOTER, STRANGER = (Identity.create().peer_id for _ in range(2))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def guard_at(clock: Clock) -> AsyncIterator[tuple[CallGuard, ConnectionSupervisor]]:
    supervisor = ConnectionSupervisor(ConnectionLimits(), TrafficCounter())
    supervisor.voters = frozenset({VOTER})
    try:
        yield CallGuard(supervisor, clock), supervisor
    finally:
        await supervisor.stop()


def count_granted(guard: CallGuard, peer: str, calls: int) -> int:
    granted = 0
    for _ in range(calls):
        try:
            guard.charge(peer, METHOD)
            granted += 1
        except LimitError:
            pass
    return granted


async def test_caller_has_a_burst_and_then_its_rate() -> None:
    clock = Clock()
    async with guard_at(clock) as (guard, _):
        assert count_granted(guard, VOTER, 1000) == ALLOWANCES[METHOD].burst
        clock.now = 10.0
        assert count_granted(guard, VOTER, 1000) == min(10 * ALLOWANCES[METHOD].rate, ALLOWANCES[METHOD].burst)


async def test_strangers_together_leave_the_allowance_of_a_voter() -> None:
    async with guard_at(Clock()) as (guard, supervisor):
        granted = sum(count_granted(guard, f"stranger {number}", 1000) for number in range(100))
        assert granted == SHARES_OF_OTHERS * ALLOWANCES[METHOD].burst
        assert count_granted(guard, VOTER, 1000) == ALLOWANCES[METHOD].burst
        # The control: while nobody has a vote, everybody who is known has an allowance of its own.
        supervisor.voters = frozenset()
        assert count_granted(guard, "another", 1000) == ALLOWANCES[METHOD].burst


async def test_caller_of_wrong_calls_is_answered_no_more_until_they_decay() -> None:
    clock = Clock()
    async with guard_at(clock) as (guard, _):
        for _ in range(int(REFUSED_CALLS.burst)):
            guard.charge(STRANGER, "murmur.v1.Rounds/Deliver")
            guard.charge_refused(STRANGER)
        for method in ALLOWANCES:
            with pytest.raises(LimitError, match="wrong calls"):
                guard.charge(STRANGER, method)
        guard.charge(VOTER, METHOD)
        clock.now = 5.0
        guard.charge(STRANGER, METHOD)


def test_codes_of_wrong_calls() -> None:
    assert is_wrong_call(grpc.StatusCode.INVALID_ARGUMENT) and is_wrong_call(3)
    for code in (None, 0, grpc.StatusCode.NOT_FOUND, 5, grpc.StatusCode.RESOURCE_EXHAUSTED, 8):
        assert not is_wrong_call(code)


def test_every_method_of_the_protocol_has_an_allowance() -> None:
    class Names:
        def __init__(self) -> None:
            self.methods: set[str] = set()

        def add_generic_rpc_handlers(self, handlers: object) -> None:
            pass

        def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
            self.methods |= {f"{service}/{name}" for name in handlers}

    names = Names()
    for title in ("Membership", "Rounds", "Blobs", "Rollouts", "Carriers", "Stages", "Steering", "Runs"):
        servicer = getattr(murmur_pb2_grpc, f"{title}Servicer")()
        getattr(murmur_pb2_grpc, f"add_{title}Servicer_to_server")(servicer, names)
    assert names.methods == ALLOWANCES.keys()


class CountingRounds(murmur_pb2_grpc.RoundsServicer):
    """Counts the calls that reach it; refuses every Deliver as wrong."""

    def __init__(self) -> None:
        self.chains = self.deliveries = 0

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        self.chains += 1
        return ChainReply(round=self.chains)

    async def Deliver(self, request: DeliverRequest, context: Any) -> DeliverReply:  # noqa: N802
        self.deliveries += 1
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "another run")
        raise AssertionError("abort raises")


@asynccontextmanager
async def serve(rounds: CountingRounds, folder: Path, is_guarded: bool) -> AsyncIterator[grpc.aio.Channel]:
    """Serve behind a guard or, as a control, without one; the caller's address is that of a bridge."""
    async with guard_at(Clock()) as (guard, _):
        server, path = grpc.aio.server(), folder / "server.sock"
        murmur_pb2_grpc.add_RoundsServicer_to_server(rounds, GuardedServer(server, guard) if is_guarded else server)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            yield channel
        await server.stop(None)


async def count_answers(channel: grpc.aio.Channel, method: str, calls: int) -> dict[grpc.StatusCode, int]:
    stub, answers = murmur_pb2_grpc.RoundsStub(channel), dict[grpc.StatusCode, int]()
    for _ in range(calls):
        try:
            await getattr(stub, method)(ChainRequest() if method == "Chain" else DeliverRequest(), timeout=5)
            code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            code = error.code()
        answers[code] = answers.get(code, 0) + 1
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("is_guarded", [True, False])
async def test_calls_above_the_allowance_do_not_reach_the_servicer(
    tmp_path: Path, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_guard, "caller", lambda context: STRANGER)
    rounds = CountingRounds()
    async with serve(rounds, tmp_path, is_guarded) as channel:
        answers = await count_answers(channel, "Chain", 100)
        await count_answers(channel, "Deliver", 200)
    if is_guarded:
        assert rounds.chains == ALLOWANCES[METHOD].burst
        assert answers[grpc.StatusCode.RESOURCE_EXHAUSTED] == 100 - rounds.chains
        assert rounds.deliveries <= REFUSED_CALLS.burst
    else:  # the control
        assert (rounds.chains, rounds.deliveries) == (100, 200)


async def test_caller_that_goes_on_is_cut_and_opens_no_stream_for_a_while() -> None:
    async with guard_at(Clock()) as (guard, supervisor):
        assert supervisor.may_open_stream(STRANGER)
        for _ in range(int(FLOODED_CALLS.burst) + 1):
            guard.record_refusal(STRANGER, METHOD, LimitError("too many calls"))
        assert not supervisor.may_open_stream(STRANGER) and supervisor.may_open_stream(VOTER)
        assert supervisor.refusals["cut for flooding"] == 1


async def test_strangers_share_a_rate_of_bytes_and_of_new_streams() -> None:
    async with guard_at(Clock()) as (_, supervisor):
        opened = sum(supervisor.may_open_stream(f"stranger {n}") for _ in range(100) for n in range(100))
        assert opened <= 8 * STREAM_BURST + 100  # the control: 10,000 were tried
        assert sum(supervisor.may_open_stream(VOTER) for _ in range(20)) == 20
        assert supervisor._limiters_of(STRANGER).download is supervisor._strangers_limiter
        assert supervisor._limiters_of(VOTER).download is None
