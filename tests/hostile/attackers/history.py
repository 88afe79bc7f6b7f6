"""Strangers that invent a history or a state: attacks 1, 1b, 1c, 1d and 2."""

import asyncio
import contextlib
import itertools
import struct
from dataclasses import replace
from typing import Any

from node.daemon.peers.peer_rpc import request_chain
from node.daemon.state.outer_state import OuterState
from optim.method import SMALL_SLOTS
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.chain import ChainHead, ChainLog
from protocol.consensus.messages.kinds import nested_parser
from protocol.errors import PeerFault, UnreachableError
from protocol.identity import Identity
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS
from tests.hostile.attackers.forgery import Forger
from tests.hostile.attackers.stranger import Stranger

KEYS = 4  # beside the attacker's own, in the vote about a state
INVENTED_ROUND = 1000
INVENTED_COMMITS = 3
ASK_SECONDS = 0.2  # less than a round of the victims
ROOM_TOKENS = 1_000_000  # that remain up to the limit, so that the invented rounds fit
NUMBER = 4000.0  # about the weight of an honest round, so a step is made backwards


async def invented_history(stranger: Stranger) -> None:
    """Attack 1: a chain of our own from round 1000 on, with many tokens; its state is noise."""
    await _show_own_chain(stranger, MAX_CHAIN_TOKENS // 2)


async def history_at_the_limit(stranger: Stranger) -> None:
    """Attack 1b: the same with so many tokens that no peer on this chain can publish a later head."""
    await _show_own_chain(stranger, MAX_CHAIN_TOKENS - ROOM_TOKENS)


async def _show_own_chain(stranger: Stranger, tokens: int) -> None:
    forger = Forger(stranger)
    state = forger.noise_state()
    await stranger.open()
    await stranger.meet()
    honest = await ask_for_chain(stranger)
    voters = replace(_log_of(stranger, honest).electorates[-1], round=INVENTED_ROUND)
    start = ChainHead(INVENTED_ROUND, bytes(range(32)), tokens)
    log, head = forger.invent_rounds(ChainLog(voters), start, state.digest, INVENTED_COMMITS)
    _show(stranger, forger, honest, log, head, state)
    stranger.begin()


async def noise_in_number_slots(stranger: Stranger) -> None:
    """Attack 1c: continue the honest chain; the state is the honest one, but with numbers that no round computes."""
    forger = Forger(stranger)
    await stranger.open()
    await stranger.meet()
    honest = await ask_for_chain(stranger)
    raw = await _fetch(stranger, forger, Blob.from_wire(honest.state))
    tampered = forger.store.put_in_memory(_with_negative_numbers(forger, raw))
    log, head = forger.invent_rounds(_log_of(stranger, honest), _head_of(honest), honest.state.digest, INVENTED_COMMITS)
    _show(stranger, forger, honest, log, head, tampered)
    stranger.begin()


async def invented_commits(stranger: Stranger) -> None:
    """Attack 1d: continue each head of the honest chain at once, by commits whose sums are noise."""
    forger = Forger(stranger)
    state, newest = forger.noise_state(), 0
    await stranger.open()
    await stranger.meet()
    stranger.begin()
    for victim in itertools.cycle(stranger.victims):  # by turns: each of them answers two questions a second
        with contextlib.suppress(UnreachableError, PeerFault):
            honest = await request_chain(stranger.run_id, stranger.transport.channel, victim, 0)
            if honest.round > newest:
                newest = honest.round
                log, head = forger.invent_rounds(
                    _log_of(stranger, honest), _head_of(honest), honest.state.digest, INVENTED_COMMITS
                )
                _show(stranger, forger, honest, log, head, state)
        await asyncio.sleep(ASK_SECONDS)


async def state_vote(stranger: Stranger) -> None:
    """Attack 2: five keys on one connection announce another state at the head that all honest peers have."""
    forger = Forger(stranger)
    state = forger.noise_state()
    await stranger.open()
    await stranger.meet()
    keys = [Identity.create() for _ in range(KEYS)]
    stranger.begin()
    while True:
        honest = await ask_for_chain(stranger)
        _show(stranger, forger, honest, _log_of(stranger, honest), _head_of(honest), state)
        fields = _record_fields(_head_of(honest), state)
        records = [stranger.record_of(key, **fields) for key in keys]
        for victim in stranger.victims:
            await stranger.push_records(victim, records)
        await asyncio.sleep(0.5)


async def ask_for_chain(stranger: Stranger) -> ChainReply:
    """Return what an honest peer answers."""
    return await request_chain(stranger.run_id, stranger.transport.channel, stranger.victims[0], 0)


def _log_of(stranger: Stranger, reply: ChainReply) -> ChainLog:
    open_nested = nested_parser(stranger.run_id, stranger.limits)
    return ChainLog.from_wire(reply.log, stranger.manifest.admission, stranger.limits, open_nested)


def _head_of(reply: ChainReply) -> ChainHead:
    return ChainHead(reply.round, reply.digest, reply.chain_tokens, reply.revision)


def _record_fields(head: ChainHead, state: Blob) -> dict[str, Any]:
    return {
        "role": "trainer", "round": head.round, "digest": head.digest, "chain_tokens": head.tokens,
        "state_digest": state.digest,
    }  # fmt: skip


def _show(stranger: Stranger, forger: Forger, honest: ChainReply, log: ChainLog, head: ChainHead, state: Blob) -> None:
    """Announce a head, and answer questions for its chain with this log and state."""
    reply = ChainReply()
    reply.CopyFrom(honest)
    reply.log.CopyFrom(log.to_wire())
    reply.round, reply.digest, reply.chain_tokens = head.round, head.digest, head.tokens
    reply.state.CopyFrom(state.to_wire())
    forger.chain.reply = lambda _: reply
    stranger.directory.publish(urgent=True, **_record_fields(head, state))


async def _fetch(stranger: Stranger, forger: Forger, blob: Blob) -> bytearray:
    downloader = Downloader(forger.store, stranger.transport.bulk, stranger.directory._rng)
    await downloader.fetch(blob, lambda: stranger.victims, 10.0)
    return forger.store.read(blob.digest)


def _with_negative_numbers(forger: Forger, raw: bytearray) -> bytes:
    """Return a state in which the slots that are numbers, such as the usual weight of a round, are negative."""
    method, numel = forger.planner.method, forger.planner.numel
    OuterState.from_bytes(raw, numel, method)
    offset = 4 * numel
    for name in method.slots:
        size = method.slot_numel(name, numel)
        if name in SMALL_SLOTS:
            struct.pack_into(f"<{size}f", raw, offset, *[-NUMBER] * size)
        offset += 4 * size
    return bytes(raw)
