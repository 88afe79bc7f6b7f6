"""Strangers that invent a history or a state: attacks 1, 1b, 1c, 1d and 2."""

import asyncio
import json
import struct
from typing import Any

from node.daemon.outer_state import OuterState
from node.daemon.peer_rpc import request_chain
from node.daemon.run_limits import contribution_limits
from optim.method import SMALL_SLOTS
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.certified import ChainLog
from protocol.consensus.chain import ChainHead, extend_head
from protocol.consensus.message_kinds import Acknowledgement, Basis, CommitCertificate, nested_parser
from protocol.consensus.messages import Commit
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import ChainReply
from protocol.signing import MAX_CHAIN_TOKENS
from tests.hostile.forgery import HONEST_TOKENS, Forger
from tests.hostile.stranger import Stranger

FLEET = 5  # keys of the state vote
INVENTED_ROUND = 1000
INVENTED_COMMITS = 3
NOISE = 0.5  # of a value of an invented update; an honest one has about 0.003
NUMBER = 4000.0  # about the weight of an honest round, so a step is made backwards


async def invented_history(stranger: Stranger) -> None:
    """Attack 1: announce round 1000 with many tokens, and answer with a state of noise."""
    await _announce_invention(stranger, MAX_CHAIN_TOKENS // 2)


async def history_at_the_limit(stranger: Stranger) -> None:
    """Attack 1b: the same with so many tokens that no peer on this chain can publish its next head."""
    await _announce_invention(stranger, MAX_CHAIN_TOKENS - 1)


async def _announce_invention(stranger: Stranger, tokens: int) -> None:
    forger = Forger(stranger)
    state, digest = forger.noise_state(), bytes(range(32))
    await stranger.open()
    await stranger.meet()
    honest = await ask_for_chain(stranger)
    reply = like(
        honest, stranger.peer_id, round=INVENTED_ROUND, digest=digest, chain_tokens=tokens, state=state.to_wire()
    )
    forger.chain.reply = lambda _: reply
    stranger.directory.publish(
        urgent=True, role="trainer", round=INVENTED_ROUND, digest=digest, chain_tokens=tokens, state_digest=state.digest
    )
    stranger.begin()


async def ask_for_chain(stranger: Stranger) -> ChainReply:
    """Return what an honest peer answers."""
    return await request_chain(stranger.run_id, stranger.transport.channel, stranger.victims[0], 0)


def _electorate_of(voter: PeerId, number: int) -> bytes:
    """Return the voters of a round: this key alone."""
    values = {"round": number, "voters": [voter], "attendance": {voter: 1}, "entries": [], "revoked": []}
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def like(honest: ChainReply, voter: PeerId = "", **lies: Any) -> ChainReply:
    """Return an honest reply with other values in some fields; commits only if they are given.

    `voter`: the only one of the electorate that it claims; empty: the honest electorate.
    """
    reply = ChainReply()
    reply.CopyFrom(honest)
    reply.ClearField("commits")
    if voter:
        lies["electorate"] = _electorate_of(voter, lies["round"])
    for name in lies:
        reply.ClearField(name)
    reply.MergeFrom(ChainReply(**lies))
    return reply


async def noise_in_number_slots(stranger: Stranger) -> None:
    """Attack 1c: offer the honest state as a longer chain, but with numbers that no round computes."""
    forger = Forger(stranger)
    await stranger.open()
    await stranger.meet()
    honest = await ask_for_chain(stranger)
    raw = await _fetch(stranger, forger, Blob.from_wire(honest.state))
    tampered = forger.store.put_in_memory(_with_negative_numbers(forger, raw))
    tokens, digest = MAX_CHAIN_TOKENS // 2, bytes(range(32))
    reply = like(
        honest, stranger.peer_id, round=honest.round + 5, digest=digest, chain_tokens=tokens, state=tampered.to_wire()
    )
    forger.chain.reply = lambda _: reply
    stranger.directory.publish(
        urgent=True, role="trainer", round=honest.round + 5, digest=digest, chain_tokens=tokens,
        state_digest=tampered.digest,
    )  # fmt: skip
    stranger.begin()


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


async def invented_commits(stranger: Stranger) -> None:
    """Attack 1d: continue the honest chain by commits of our own, whose sums are noise; nobody acknowledged them."""
    forger = Forger(stranger)
    await stranger.open()
    await stranger.meet()
    stranger.begin()
    while True:
        await _continue_chain(stranger, forger)
        await asyncio.sleep(1.0)


async def _continue_chain(stranger: Stranger, forger: Forger) -> None:
    """Ask for the honest head, and claim to be some rounds ahead of it."""
    honest = await ask_for_chain(stranger)
    head = ChainHead(honest.round, honest.digest, honest.chain_tokens, honest.revision)
    log = honest.log
    rule, limits = stranger.manifest.admission, contribution_limits(stranger.manifest, forger.planner)
    electorate = ChainLog.from_wire(log, rule, limits, nested_parser(stranger.run_id, limits)).electorates[-1]
    state_before = Blob.from_wire(honest.state).digest  # of the first invention; nobody reaches the others
    for _ in range(INVENTED_COMMITS):
        parts = forger.noise_payloads(head.round, NOISE)
        own = forger.sign(forger.contribution(head.round, head.digest, parts, tokens=2 * HONEST_TOKENS))
        commit = forger.sign(Commit(head.round, 0, head.digest, (own,), tuple(parts)))
        basis = Basis(state_before, electorate.digest, head.tokens)
        vote = forger.sign(Acknowledgement(head.round, 0, commit.digest, basis))
        log.commits.append(commit.signed)
        log.certificates.append(CommitCertificate.of([vote]).to_wire())
        electorate, head = electorate.after(commit.body), extend_head(head, commit.body)
    state = forger.noise_state()
    forger.chain.reply = lambda _: like(
        honest, log=log, round=head.round, digest=head.digest, chain_tokens=head.tokens, state=state.to_wire()
    )
    stranger.directory.publish(
        urgent=True, role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens,
        state_digest=state.digest,
    )  # fmt: skip


async def state_vote(stranger: Stranger) -> None:
    """Attack 2: five keys on one connection announce another state at the head that all honest peers have."""
    forger = Forger(stranger)
    state = forger.noise_state()
    await stranger.open()
    await stranger.meet()
    keys = [Identity.create() for _ in range(FLEET - 1)]
    stranger.begin()
    while True:
        honest = (await stranger.meet())[stranger.victims[0]]
        head: dict[str, Any] = {"round": honest.round, "digest": honest.digest, "chain_tokens": honest.chain_tokens}
        reply = like(await ask_for_chain(stranger), state=state.to_wire(), **head)
        forger.chain.reply = lambda _, reply=reply: reply  # type: ignore[misc]
        stranger.directory.publish(urgent=True, role="trainer", state_digest=state.digest, **head)
        records = [stranger.record_of(key, state_digest=state.digest, **head) for key in keys]
        for victim in stranger.victims:
            await stranger.push_records(victim, records)
        await asyncio.sleep(0.15)
