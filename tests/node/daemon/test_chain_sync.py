"""What a peer's answer must be before we go its way, against a real server; and whom we hold for ahead."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from node.daemon.chain_sync import MAX_COMMITS, ChainReader, ChainSyncClient
from node.daemon.swarm_view import peer_state
from node.loop.catch_up import SyncPlan, best_head
from node.loop.swarm_snapshot import SwarmSnapshot
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead
from protocol.errors import ForgedError, LimitError, MalformedError, PeerFault, StaleError, UnreachableError
from protocol.murmur_pb2 import ChainReply, ChainRequest, PeerRecord
from protocol.murmur_pb2_grpc import RoundsServicer, add_RoundsServicer_to_server
from protocol.signing import MAX_ROUND
from tests.node.small_run import (
    PEERS,
    RUN_ID,
    STATE_BYTES,
    TERMS,
    commit_of,
    contribution_of,
    grown,
    replica_in,
    stated,
    store_in,
)
from tests.protocol.local_server import serve_locally

pytestmark = pytest.mark.slow

THEM = PEERS[3].peer_id
Ask = Callable[..., Any]


class ScriptedRounds(RoundsServicer):
    """Says what the test puts here."""

    def __init__(self) -> None:
        self.reply = ChainReply()
        self.asked: list[int] = []

    async def Deliver(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("nothing is delivered here")

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        self.asked.append(request.after_round)
        return self.reply


class ChainSyncSetup:
    def __init__(self, folder: Path, answer: ScriptedRounds, channel: grpc.aio.Channel) -> None:
        self.store = store_in(folder / "blobs")
        self.theirs = replica_in(self.store)
        self.mine = replica_in(self.store)
        self.answer = answer
        self.channel = channel

    def scout(self, chain: Chain | None = None) -> ChainSyncClient:
        reader = ChainReader(RUN_ID, TERMS, lambda _: self.channel)
        return ChainSyncClient(reader, chain or self.mine.chain, STATE_BYTES)

    def say(self, after: int = 0, **changes: Any) -> None:
        """The truth about their chain, with changes."""
        head = self.theirs.chain.head
        commits = self.theirs.chain.commits_since(after) or ()
        fields: dict[str, Any] = {"round": head.round, "digest": head.digest, "chain_tokens": head.tokens}
        fields |= {"state": self.theirs.blob.to_wire(), "commits": [commit.signed for commit in commits]}
        self.answer.reply = ChainReply(**(fields | changes))

    async def way(self, replay: bool = True, since: int = MAX_ROUND) -> SyncPlan:
        return await self.scout().plan_sync(THEM, replay, since)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ChainSyncSetup]:
    answer = ScriptedRounds()
    async with serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(answer, server)) as channel:
        made = ChainSyncSetup(tmp_path, answer, channel)
        await grown(made.theirs, made.store, 3)
        yield made


async def test_commits_that_continue_our_chain_are_replayed(world: ChainSyncSetup) -> None:
    world.say()
    way = await world.way()
    assert way.state is None and way.head == world.theirs.chain.head and len(way.commits) == 3
    assert world.answer.asked == [0]


async def test_otherwise_or_if_asked_for_the_state_is_taken_over(world: ChainSyncSetup) -> None:
    world.say()
    assert (await world.way(replay=False)).state == world.theirs.blob
    await grown(world.mine, world.store, 1, peer=2)  # another chain
    world.say(after=1)
    way = await world.way()
    assert way.state == world.theirs.blob and len(way.commits) == 2
    world.say(after=3)
    assert (await world.way()).commits == ()


async def test_another_chain_is_asked_from_where_our_message_was_first_offered(world: ChainSyncSetup) -> None:
    await grown(world.mine, world.store, 2, peer=2)
    world.say()
    way = await world.way(since=1)
    assert world.answer.asked == [2, 1] and way.state == world.theirs.blob and len(way.commits) == 3
    world.answer.asked.clear()
    assert (await world.way(since=2)).state and world.answer.asked == [2], "they said all that matters"


async def test_the_first_of_many_commits_are_a_way_too(world: ChainSyncSetup) -> None:
    commits = world.theirs.chain.commits_since(0)
    assert commits is not None
    world.say(commits=[commit.signed for commit in commits[:2]])
    way = await world.way()
    assert way.head.round == 2 and way.state is None
    assert len((await world.way(replay=False)).commits) == 2


async def test_lies_are_refused(world: ChainSyncSetup) -> None:
    head, (first, second, third) = world.theirs.chain.head, world.theirs.chain.commits_since(0) or ()
    forged = third.signed.__class__.FromString(third.signed.SerializeToString())
    forged.signature = bytes(64)
    other = commit_of(ChainHead(2, second.body.base, 0), {2: Blob.of(b"x" * 8)}).signed
    contribution = stated(PEERS[1], contribution_of(head, [Blob.of(b"x")])).signed
    elsewhere = stated(PEERS[1], contribution_of(head, [Blob.of(b"x")]), "ab" * 32).signed
    cases: list[tuple[dict[str, Any], type[PeerFault]]] = [
        ({"commits": [first.signed, third.signed]}, MalformedError),  # a gap
        ({"commits": [second.signed, first.signed]}, MalformedError),
        ({"commits": [first.signed, second.signed, other]}, MalformedError),
        ({"commits": [first.signed, second.signed, forged]}, ForgedError),
        ({"commits": [contribution]}, MalformedError),
        ({"commits": [elsewhere]}, PeerFault),
        ({"commits": [first.signed] * (MAX_COMMITS + 1)}, MalformedError),
        ({"digest": bytes(32)}, MalformedError),  # the commits lead elsewhere
        ({"digest": b"short"}, MalformedError),
        ({"round": 2}, MalformedError),  # the commits go beyond
        ({"round": 2**60}, MalformedError),
        ({"chain_tokens": 0, "digest": bytes([255]) * 32, "commits": []}, StaleError),  # not ahead of us
        ({"state": Blob.of(b"small").to_wire()}, MalformedError),
        ({"state": Blob(bytes(32), STATE_BYTES + 1).to_wire()}, MalformedError),
        ({"state": None}, PeerFault),
    ]
    for changes, fault in cases:
        world.say(**changes)
        with pytest.raises(fault):
            await world.way(replay=False)


async def test_who_does_not_answer_is_unreachable_and_who_refuses_is_not(world: ChainSyncSetup, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as channel:
        world.channel = channel
        with pytest.raises(UnreachableError):
            await world.way()
    with pytest.raises(UnreachableError, match="closed"):
        await world.way()
    async with serve_locally(tmp_path / "other", lambda server: None) as channel:
        world.channel = channel
        with pytest.raises(LimitError, match="refused the call"):
            await world.way()


def test_ahead_is_who_has_a_preferred_chain() -> None:
    mine = ChainHead(3, bytes([5]) * 32, 300)
    records = {
        "more": PeerRecord(round=2, digest=bytes([9]) * 32, chain_tokens=301),
        "more too": PeerRecord(round=2, digest=bytes([9]) * 32, chain_tokens=301),
        "most": PeerRecord(round=4, digest=bytes([8]) * 32, chain_tokens=400),
        "less": PeerRecord(round=9, digest=bytes([1]) * 32, chain_tokens=299),
        "same": PeerRecord(round=3, digest=mine.digest, chain_tokens=300),
        "lower digest": PeerRecord(round=3, digest=bytes([4]) * 32, chain_tokens=300),
        "none": PeerRecord(round=9, chain_tokens=999),
    }
    found = SwarmSnapshot({peer: peer_state(record) for peer, record in records.items()}).preferred_heads(mine)
    assert {tuple(peers) for peers in found.values()} == {("more", "more too"), ("most",), ("lower digest",)}
    assert best_head(found) == (ChainHead(4, bytes([8]) * 32, 400), ["most"])
