"""The service and the calls to it: who may ask what, what fits into an answer, and how calls fail."""

import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from node.daemon import services
from node.daemon.inbox import InboundQuota
from node.daemon.peers import peer_rpc
from node.daemon.peers.chain_sync import ServedChain
from node.daemon.peers.peer_rpc import deliver, request_chain
from node.daemon.services import MAX_MESSAGES_PER_CALL, RoundsService
from node.daemon.state.outer_state import ReplicatedState
from node.daemon.state.replica_state import MAX_OFFERS, OFFER_SECONDS, OfferedStates
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.loop.steering import unsteered
from protocol.consensus.chain import Chain
from protocol.consensus.messages.briefs import BriefCache, SeenMessages, restore
from protocol.errors import LimitError, MalformedError, PeerFault
from protocol.identity import PeerId
from protocol.murmur_pb2 import Brief, Contribution, Roster, Signed
from protocol.murmur_pb2_grpc import add_RoundsServicer_to_server
from protocol.traffic import ControlTraffic
from tests.node.daemon.peers.fake_channels import FixedChannels
from tests.node.small_run import PEERS, RUN_ID, grown, replica_in, store_in
from tests.protocol.local_server import serve_locally

pytestmark = pytest.mark.slow

CALLER = PEERS[2].peer_id
THEM = PEERS[3].peer_id


class FakeLoop:
    """In the place of the loop and of what checks its messages."""

    def __init__(self) -> None:
        self.known = True
        self.seen = SeenMessages()
        self.taken: list[tuple[PeerId, int]] = []
        self.answers = [Signed(kind="answer")]
        self.refused: list[tuple[PeerId, str]] = []

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        self.refused.append((peer, fault.metric_label))

    def is_known(self, peer: PeerId) -> bool:
        return self.known

    def restore(self, sender: PeerId, briefs: Iterable[Brief]) -> tuple[list[Signed], list[int]]:
        found = [restore(brief, self.seen) for brief in briefs]
        unresolved = [place for place, signed in enumerate(found) if signed is None]
        return [signed for signed in found if signed is not None], unresolved

    def receive(self, sender: PeerId, envelopes: Iterable[Signed]) -> list[Signed]:
        self.taken.append((sender, len(list(envelopes))))
        return self.answers


class RoundsServiceSetup:
    def __init__(
        self, channel: grpc.aio.Channel, replica: ReplicatedState, driver: FakeLoop, service: RoundsService
    ) -> None:
        self.channel = channel
        self.replica = replica
        self.driver = driver
        self.service = service
        self.offered: OfferedStates = service._replicas[RUN_ID].state.offered_states

    def to_them(self, _: PeerId) -> grpc.aio.Channel:
        return self.channel

    async def deliver(self, count: int = 1, run_id: str = RUN_ID) -> list[Signed]:
        return list(await deliver(run_id, FixedChannels(self.channel), THEM, [Signed(kind="x")] * count, 5.0))


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoundsServiceSetup]:
    monkeypatch.setattr(services, "caller", lambda context: CALLER)
    store = store_in(tmp_path / "blobs")
    replica, driver = replica_in(store), FakeLoop()
    await grown(replica, store, 3)
    fake: Any = driver
    peers = SimpleNamespace(receiver=fake, quota=InboundQuota(1, 5.0), traffic=ControlTraffic())
    served: Any = SimpleNamespace(loop=fake, peers=peers, state=SimpleNamespace(offered_states=OfferedStates()))
    chain = ServedChain(replica.chain, lambda: replica.blob, unsteered())
    service = RoundsService({RUN_ID: served}, {RUN_ID: chain}, driver.record_refusal)
    async with serve_locally(tmp_path / "s", lambda server: add_RoundsServicer_to_server(service, server)) as channel:
        yield RoundsServiceSetup(channel, replica, driver, service)


async def test_statements_go_to_the_driver_under_the_callers_name(world: RoundsServiceSetup) -> None:
    assert await world.deliver(3) == [Signed(kind="answer")]
    assert world.driver.taken == [(CALLER, 3)]


async def test_roster_goes_as_a_brief_and_in_full_to_a_peer_that_lacks_a_contribution(
    world: RoundsServiceSetup,
) -> None:
    said = Contribution(codec="c" * 300).SerializeToString()
    contributions = [Signed(kind="contribution", peer=peer.peer_id, body=said) for peer in PEERS]
    body = Roster(round=1, contributions=contributions).SerializeToString()
    roster = Signed(kind="roster", peer=CALLER, body=body, signature=bytes(64))
    brief_cache, sent = BriefCache(SeenMessages()), []
    for _ in range(2):
        traffic = ControlTraffic()
        await deliver(RUN_ID, FixedChannels(world.channel), THEM, [roster], 5.0, brief_cache, traffic)
        sent.append(traffic.sent["roster"])
        for contribution in contributions:
            world.driver.seen.record(contribution)
    assert world.driver.taken == [(CALLER, 0), (CALLER, 1), (CALLER, 1)]  # first the brief, and then the roster
    brief = brief_cache.brief_of(roster)
    assert brief is not None
    assert sent == [brief.ByteSize() + roster.ByteSize() + 6, brief.ByteSize() + 3]


async def test_too_many_another_run_and_no_identity_are_refused(
    world: RoundsServiceSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await world.deliver(MAX_MESSAGES_PER_CALL)

    def nobody(context: object) -> PeerId:
        raise MalformedError("a call without an identity")

    with pytest.raises(LimitError, match="65 messages in one call"):
        await world.deliver(MAX_MESSAGES_PER_CALL + 1)
    with pytest.raises(LimitError, match="another run"):
        await world.deliver(run_id="ab" * 32)
    monkeypatch.setattr(services, "caller", nobody)
    with pytest.raises(LimitError, match="without an identity"):
        await world.deliver()
    with pytest.raises(LimitError, match="without an identity"):
        await request_chain(RUN_ID, world.to_them, THEM, 0)
    assert len(world.driver.taken) == 1
    nameless = [("somebody unknown", "malformed")] * 2
    assert world.driver.refused == [(CALLER, "limit"), (CALLER, "stale"), *nameless]


async def test_a_stranger_may_say_a_little_and_a_flood_is_one_line(
    world: RoundsServiceSetup, caplog: pytest.LogCaptureFixture
) -> None:
    refused, calls_made = 0, 60
    world.driver.known = False
    for _ in range(calls_made):
        try:
            await world.deliver()
        except LimitError as error:
            assert "resource_exhausted" in str(error) and "not known as a member" in str(error)
            refused += 1
    assert refused and len(world.driver.taken) == calls_made - refused >= 16
    assert world.service.refusals == {"limit": refused} and world.driver.refused == []
    assert caplog.text.count("not known as a member") == 1
    world.driver.known = True
    await world.deliver()  # the control: as soon as it is one


async def test_a_member_says_far_more_but_not_any_amount(world: RoundsServiceSetup) -> None:
    for _ in range(200):
        await world.deliver()
    assert len(world.driver.taken) == 200
    whole = [Signed(kind="x", body=bytes(700_000))]
    with pytest.raises(LimitError, match="more than a leader"):
        for _ in range(20):
            await deliver(RUN_ID, FixedChannels(world.channel), THEM, whole, 5.0)


async def test_a_host_serves_a_chain_but_takes_no_messages(tmp_path: Path, world: RoundsServiceSetup) -> None:
    genesis = Chain.from_genesis(RUN_ID)
    served = ServedChain(genesis, lambda: None, unsteered())  # before its first state
    service = RoundsService({}, {RUN_ID: served}, world.driver.record_refusal)
    async with serve_locally(tmp_path / "h", lambda server: add_RoundsServicer_to_server(service, server)) as channel:
        reply = await request_chain(RUN_ID, lambda peer: channel, THEM, 0)
        assert (reply.round, reply.digest, reply.state.size) == (0, genesis.digest, 0)
        with pytest.raises(LimitError, match="another run"):
            await deliver(RUN_ID, FixedChannels(channel), THEM, [Signed(kind="x")], 5.0)


async def test_the_chain_with_its_head_and_state(world: RoundsServiceSetup) -> None:
    chain = world.replica.chain
    reply = await request_chain(RUN_ID, world.to_them, THEM, 1)
    assert (reply.round, reply.digest, reply.chain_tokens) == (3, chain.digest, chain.tokens)
    assert reply.state == world.replica.blob.to_wire()
    assert list(reply.log.commits) == [entry.commit.signed for entry in chain.commits_since(1) or ()]
    assert [len(decision.peers) for decision in reply.log.certificates] == [1, 1]
    for after_round in (3, 4, 2**63):
        assert not (await request_chain(RUN_ID, world.to_them, THEM, after_round)).log.commits


async def test_a_state_that_a_peer_may_need_counts_as_requested(world: RoundsServiceSetup) -> None:
    """Control: a peer a few rounds behind, such as the host of a page, needs none."""
    for after_round in (3, 2, 0):
        await request_chain(RUN_ID, world.to_them, THEM, after_round)
    assert not world.offered.recent(time.monotonic())
    await request_chain(RUN_ID, world.to_them, THEM, 4)
    now = time.monotonic()
    assert world.offered.recent(now) == {world.replica.blob.digest}
    assert not world.offered.recent(now + OFFER_SECONDS)
    for number in range(2 * MAX_OFFERS):
        world.offered.show(bytes([number]), RETAINED_ROUNDS + 1, now)
    assert len(world.offered.recent(now)) == MAX_OFFERS


async def test_of_many_commits_the_oldest_that_fit(world: RoundsServiceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = world.replica.chain.commits_since(0) or ()
    sizes = [entry.commit.signed.ByteSize() + entry.certificate.to_wire().ByteSize() for entry in entries]
    monkeypatch.setattr(services, "MAX_REPLY_BYTES", sizes[0] + sizes[1])
    reply = await request_chain(RUN_ID, world.to_them, THEM, 0)
    assert list(reply.log.commits) == [entry.commit.signed for entry in entries[:2]]


async def test_a_decision_of_many_acknowledgements_is_taken_but_not_any_number(world: RoundsServiceSetup) -> None:
    world.driver.answers = [Signed(kind="answer")] * 200
    assert len(await world.deliver()) == 200
    world.driver.answers = [Signed(kind="answer")] * (peer_rpc.MAX_REPLY_MESSAGES + 1)
    with pytest.raises(LimitError, match="replied with"):
        await world.deliver()
