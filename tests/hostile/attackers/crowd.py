"""Strangers that cost time: keys that only announce themselves, false clocks, floods of records and calls, knocking."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from node.daemon.peers.peer_rpc import await_reply
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import ChainRequest, DeliverRequest, Signed
from protocol.murmur_pb2_grpc import RoundsStub
from tests.hostile.attackers.stranger import Stranger, open_together

RENEW_SECONDS = 0.3
CLOCKS = 5  # observers
CLOCK_OFFSETS = (0.0, 3600.0, -3600.0)  # seconds, by victim
FRESH_RECORDS = 8000
RECORDS_PER_CALL = 250
CALLS_A_SECOND = 26
KNOCKERS = 6
REFUSED = (UnreachableError, PeerFault)


async def announce_only(stranger: Stranger) -> None:
    """Attack 8: many keys on one connection announce themselves as trainers, and do nothing."""
    await stranger.open()
    await stranger.meet()
    keys = [Identity.create() for _ in range(int(stranger.options.get("keys", 20)))]
    stranger.begin()
    while True:
        records = list((await stranger.meet()).values())
        newest = max(records, key=lambda record: record.round)
        head = {name: getattr(newest, name) for name in ("round", "digest", "chain_tokens", "state_digest")}
        await _push_to_all(stranger, [stranger.record_of(key, **head) for key in keys])
        await asyncio.sleep(RENEW_SECONDS)


async def _push_to_all(stranger: Stranger, records: Sequence[Signed]) -> None:
    for victim in stranger.victims:
        with contextlib.suppress(*REFUSED):
            await stranger.push_records(victim, records)


async def lying_clocks(stranger: Stranger) -> None:
    """Attack 9: reachable observers tell each victim another time."""
    offsets = dict(zip(stranger.victims, CLOCK_OFFSETS, strict=True))
    observers = stranger.with_others(CLOCKS)
    for observer in observers:
        _lie_about_time(observer, offsets)
    await open_together(observers)
    stranger.begin()


def _lie_about_time(observer: Stranger, offsets: dict[PeerId, float]) -> None:
    honest_answer = observer.directory._answer_gossip

    def answer(peer: PeerId, request: Any) -> Any:
        reply = honest_answer(peer, request)
        reply.time = time.time() + offsets.get(peer, 0.0)
        return reply

    observer.directory._answer_gossip = answer  # type: ignore[method-assign]


async def fresh_keys(stranger: Stranger) -> None:
    """Attack 11: one connection brings thousands of records of new keys to one victim."""
    await stranger.open()
    await stranger.meet()
    victim, now = stranger.victims[0], time.time()
    records = [stranger.record_of(Identity.create(), role="observer", expires=now + 60.0) for _ in range(FRESH_RECORDS)]
    stranger.begin()
    pushed = refused = 0
    stranger.note(pushed=pushed)
    for start in range(0, len(records), RECORDS_PER_CALL):
        try:
            await stranger.push_records(victim, records[start : start + RECORDS_PER_CALL])
            pushed += RECORDS_PER_CALL
        except REFUSED:
            refused += 1
        stranger.note(pushed=pushed, refused=refused)
        await asyncio.sleep(1 / CALLS_A_SECOND)


async def knocking(stranger: Stranger) -> None:
    """Attack 14: records whose addresses are a third party's; it counts the connections that it gets."""
    knocks: list[float] = []

    def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knocks.append(time.monotonic())
        writer.close()

    third_parties = [await asyncio.start_server(on_connection, "127.0.0.1", 0) for _ in range(2)]
    ports = [server.sockets[0].getsockname()[1] for server in third_parties]
    await stranger.open()
    await stranger.meet()
    keys = [Identity.create() for _ in range(KNOCKERS)]
    stranger.note(knocks=0)
    stranger.begin()
    while True:
        records = []
        for key, host in zip(keys, ("ip4/127.0.0.1", "dns4/localhost") * KNOCKERS, strict=False):
            addresses = [f"/{host}/tcp/{port}/p2p/{key.peer_id}" for port in ports]
            records.append(stranger.record_of(key, addresses=addresses))
        await _push_to_all(stranger, records)
        await asyncio.sleep(RENEW_SECONDS)
        stranger.note(knocks=len(knocks))


async def log_flood(stranger: Stranger) -> None:
    """Attack 15: calls for a run that the victim does not know."""
    await stranger.open()
    await stranger.meet()
    stranger.begin()
    request, calls = DeliverRequest(run=bytes(32)), 0

    async def flood() -> None:
        nonlocal calls
        stub = RoundsStub(stranger.transport.channel(stranger.victims[0]))
        while True:
            with contextlib.suppress(*REFUSED):
                await await_reply(stranger.victims[0], lambda: stub.Deliver(request, timeout=5.0))
            calls += 1

    for _ in range(8):
        stranger.spawn(flood())
    while True:
        await asyncio.sleep(0.2)
        stranger.note(calls=calls)


async def chain_flood(stranger: Stranger) -> None:
    """Attack 15: ask for the whole chain again and again; it counts the answers."""
    await stranger.open()
    await stranger.meet()
    stranger.begin()
    request, answers = ChainRequest(run=bytes.fromhex(stranger.run_id), after_round=0), 0

    async def flood() -> None:
        nonlocal answers
        stub = RoundsStub(stranger.transport.channel(stranger.victims[0]))
        while True:
            try:
                await await_reply(stranger.victims[0], lambda: stub.Chain(request, timeout=5.0))
                answers += 1
            except REFUSED:
                await asyncio.sleep(0)

    for _ in range(8):
        stranger.spawn(flood())
    while True:
        await asyncio.sleep(0.2)
        stranger.note(answers=answers)
