"""The answer of a peer that is asked for its chain, against a real server: the checks, the pages, the contacts."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from node.daemon.peers.chain_sync import ChainReader, ChainSyncClient
from node.loop.peers.catch_up import SyncOffer, best_head
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.blobs.blob import Blob
from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainHead, ChainLog
from protocol.electorate import OPEN
from protocol.errors import ForgedError, LimitError, MalformedError, PeerFault, UnreachableError
from protocol.murmur_pb2 import ChainLog as WireLog
from protocol.murmur_pb2 import ChainReply, ChainRequest
from protocol.murmur_pb2_grpc import RoundsServicer, add_RoundsServicer_to_server
from tests.node.small_run import (
    PEERS,
    RUN_ID,
    STATE_BYTES,
    TERMS,
    certified,
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
STRANGER = "stranger"  # does not answer for this run


class ScriptedRounds(RoundsServicer):
    """Shows the chain of a replica, with changes."""

    def __init__(self, chain: Chain, state: Blob) -> None:
        self.chain = chain
        self.state = state
        self.page = 64
        self.changes: dict[str, Any] = {}
        self.asked: list[int] = []

    async def Deliver(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise AssertionError("nothing is delivered here")

    async def Chain(self, request: ChainRequest, context: Any) -> ChainReply:  # noqa: N802
        self.asked.append(request.after_round)
        head = self.chain.head
        log = self.chain.log_since(min(request.after_round, head.round)) or self.chain.log
        fields: dict[str, Any] = {"round": head.round, "digest": head.digest, "chain_tokens": head.tokens}
        fields |= {"state": self.state.to_wire()}
        fields |= {"log": ChainLog(log.electorate, log.commits[: self.page]).to_wire()}
        return ChainReply(**(fields | self.changes))


class ChainSyncSetup:
    def __init__(self, folder: Path) -> None:
        self.store = store_in(folder / "blobs")
        self.theirs = replica_in(self.store)
        self.mine = replica_in(self.store)
        self.answer = ScriptedRounds(self.theirs.chain, self.theirs.blob)
        self.channel: grpc.aio.Channel
        self.nobody = grpc.aio.insecure_channel(f"unix:{folder / 'nobody'}")
        self.witnesses: tuple[str, ...] = ()

    def stage_witnesses(self) -> tuple[str, ...]:
        return self.witnesses

    async def ask(self, contacts: tuple[str, ...] = (), since: int = 2**24) -> SyncOffer:
        reader = ChainReader(RUN_ID, TERMS, lambda peer: self.channel if peer != STRANGER else self.nobody, OPEN)
        client = ChainSyncClient(reader, self.mine.chain, contacts, cast(Any, self), STATE_BYTES, has_shared_state=True)
        return await client.ask(THEM, since)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ChainSyncSetup]:
    made = ChainSyncSetup(tmp_path)
    await grown(made.theirs, made.store, 3)
    made.answer = ScriptedRounds(made.theirs.chain, made.theirs.blob)
    start = lambda server: add_RoundsServicer_to_server(made.answer, server)  # noqa: E731
    async with serve_locally(tmp_path / "s", start) as made.channel:
        yield made


async def test_commits_come_with_their_certificates_and_the_state(world: ChainSyncSetup) -> None:
    offer = await world.ask()
    assert offer.chain.head == world.theirs.chain.head and offer.state == world.theirs.blob
    assert offer.chain.log == world.theirs.chain.log and offer.chain.state == world.theirs.blob.digest
    assert world.answer.asked == [0], "three commits continue our chain, and need nothing before them"


async def test_pages_are_put_together(world: ChainSyncSetup) -> None:
    world.answer.page = 1
    assert (await world.ask()).chain.log == world.theirs.chain.log and world.answer.asked == [0, 1, 2]
    world.answer.page = 0
    assert not (await world.ask()).chain.log.commits


async def test_another_chain_is_asked_from_as_far_back_as_ours_is_kept(world: ChainSyncSetup) -> None:
    await grown(world.mine, world.store, 2, peer=2)
    offer = await world.ask()
    assert world.answer.asked == [2, 0] and len(offer.chain.log.commits) == 3


async def test_shorter_chain_is_asked_from_far_enough_back_to_show_its_commits(world: ChainSyncSetup) -> None:
    head = world.mine.chain.head
    world.mine.chain.switch_to(replace(head, round=MAX_KEPT_COMMITS + 10, digest=bytes(32)), world.mine.chain.log)
    offer = await world.ask()
    assert world.answer.asked == [MAX_KEPT_COMMITS + 10, 0] and len(offer.chain.log.commits) == 3


async def test_contacts_have_a_word_only_where_no_voters_are_known(world: ChainSyncSetup) -> None:
    assert (await world.ask()).word is None, "there is none to ask"
    assert (await world.ask(contacts=("friend",))).word is True
    world.mine.chain.switch_to(world.theirs.chain.head, world.theirs.chain.log)
    await grown(world.theirs, world.store, 1)
    world.answer.chain, world.answer.state = world.theirs.chain, world.theirs.blob
    assert (await world.ask(contacts=("friend",))).word is None, "the voters can certify it"


async def test_peers_of_a_stage_have_a_word_where_no_contact_knows_its_chain(world: ChainSyncSetup) -> None:
    contacts = (STRANGER,)  # it serves another stage
    assert (await world.ask(contacts)).word is None, "control: nobody vouches for it"
    world.witnesses = ("member", STRANGER, "keeper")
    assert (await world.ask(contacts)).word is True


async def test_lies_are_refused(world: ChainSyncSetup) -> None:
    chain = world.theirs.chain
    head, whole = chain.head, chain.log.to_wire()
    first, second, third = whole.commits
    one, two, three = whole.certificates

    def log(commits: list[Any], certificates: list[Any], electorate: bytes = whole.electorate) -> WireLog:
        return WireLog(electorate=electorate, commits=commits, certificates=certificates)

    forged = third.__class__.FromString(third.SerializeToString())
    forged.signature = bytes(64)
    stolen = three.__class__.FromString(three.SerializeToString())
    stolen.signatures[0] = bytes(64)
    others = three.__class__.FromString(three.SerializeToString())
    others.voters = bytes(32)
    contribution = stated(PEERS[1], contribution_of(head, [Blob.of(b"x")])).signed
    elsewhere = certified(chain, commit_of(head, {2: Blob.of(b"x" * 8)}))
    richer = chain.log.electorate.after(elsewhere.body).to_bytes()
    cases: list[tuple[dict[str, Any], type[PeerFault]]] = [
        ({"log": log([first, third], [one, three])}, MalformedError),  # a gap
        ({"log": log([second, first, third], [two, one, three])}, MalformedError),
        ({"log": log([first, second, third], [one, two])}, MalformedError),  # without its certificate
        ({"log": log([first, second, third], [one, three, two])}, MalformedError),  # with those of others
        ({"log": log([first, second, forged], [one, two, three])}, ForgedError),
        ({"log": log([first, second, third], [one, two, stolen])}, ForgedError),
        ({"log": log([first, second, third], [one, two, others])}, ForgedError),  # other voters than they signed
        ({"log": log([first, second, third], [one, two, three], richer)}, MalformedError),
        ({"log": log([first, second, third], [one, two, three], b"{}")}, MalformedError),
        ({"log": log([contribution], [one])}, MalformedError),
        ({"log": log([first] * 65, [one] * 65)}, LimitError),
        ({"digest": bytes(32)}, MalformedError),  # the commits lead elsewhere
        ({"digest": b"short"}, MalformedError),
        ({"round": 2**60}, MalformedError),
        ({"chain_tokens": 2**61}, MalformedError),
        ({"state": Blob.of(b"small").to_wire()}, MalformedError),
        ({"state": Blob(bytes(32), STATE_BYTES + 1).to_wire()}, MalformedError),
    ]
    for changes, fault in cases:
        world.answer.changes = changes
        with pytest.raises(fault):
            await world.ask()


async def test_unreachable_and_refusing_peers_differ(world: ChainSyncSetup, tmp_path: Path) -> None:
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/nobody") as channel:
        world.channel = channel
        with pytest.raises(UnreachableError):
            await world.ask()
    with pytest.raises(UnreachableError, match="closed"):
        await world.ask()
    async with serve_locally(tmp_path / "other", lambda server: None) as channel:
        world.channel = channel
        with pytest.raises(LimitError, match="refused the call"):
            await world.ask()


def test_head_of_most_voters_is_asked_about_first() -> None:
    low, high = ChainHead(4, bytes([8]) * 32, 400), ChainHead(1000, bytes([9]) * 32, 2**59)
    peers = {"a": PeerState(low), "b": PeerState(low), "liar": PeerState(high), "liar too": PeerState(high)}
    heads = SwarmSnapshot(peers).peers_by_head
    assert best_head(heads, frozenset("ab"))[0] == low
    assert best_head(heads)[0] == high, "the control: by tokens alone, claims would come first"
