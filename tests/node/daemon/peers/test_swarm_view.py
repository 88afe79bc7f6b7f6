"""The directory through a participant's eyes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.daemon.peers import swarm_view
from node.daemon.peers.swarm_view import SwarmView
from node.monitoring.status import NodeStatus
from protocol.consensus.chain import Chain, ChainHead, ChainLog, genesis_head
from protocol.consensus.events import MembershipChanged
from protocol.electorate import OPEN, Electorate
from protocol.membership.peer_table import MembershipEvent, MembershipListener, PeerJoined, PeerLeft
from protocol.murmur_pb2 import PeerRecord
from tests.node.small_run import RUN_ID, admitted_of, grown, replica_in, store_in

VOTERS = Electorate(OPEN, 3, frozenset({"a", "b"}))


class FakeStatus:
    """In the place of a StatusReporter."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def status(self) -> NodeStatus:
        return NodeStatus(peer_id="me", run="small", run_id=RUN_ID, **self.fields)


class FakeDirectory:
    peer_id = "me"

    def __init__(self) -> None:
        self.records: dict[str, PeerRecord] = {"me": PeerRecord(role="trainer")}
        self.published: dict[str, object] = {}
        self.tell: Callable[[MembershipEvent], None] = lambda event: None

    def live(self) -> dict[str, PeerRecord]:
        return self.records

    def subscribe(self, listener: MembershipListener) -> None:
        self.tell = lambda event: listener.on_membership_changed([event])

    def set_voters(self, voters: frozenset[str]) -> None:
        self.voters = voters

    def publish(self, **fields: object) -> None:
        self.published = fields


def members_of(directory: FakeDirectory) -> SwarmView:
    return SwarmView(admitted_of(directory), FakeStatus(), True, random.Random(0))


def membership(view: SwarmView, chain: Chain | None = None) -> MembershipChanged:
    return view.snapshot().membership("me", chain or Chain.from_genesis(RUN_ID))


def test_records_are_of_the_others_in_random_order() -> None:
    directory = FakeDirectory()
    directory.records |= {str(number): PeerRecord(role="trainer") for number in range(8)}
    members = members_of(directory)
    orders = {tuple(members.other_records()) for _ in range(20)}
    assert len(orders) > 10 and {frozenset(order) for order in orders} == {frozenset(map(str, range(8)))}


def test_observers_do_not_train() -> None:
    directory = FakeDirectory()
    directory.records |= {"a": PeerRecord(role="trainer"), "b": PeerRecord(role="observer")}
    members = members_of(directory)
    assert sorted(members.trainers()) == ["a", "me"]
    assert members.is_trainer("a") and not members.is_trainer("b") and not members.is_trainer("nobody")


async def test_at_this_round_are_those_who_stand_here_or_are_about_to_arrive(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    await grown(replica, store, 1)
    before = replica.chain.digest
    await grown(replica, store, 1)
    directory = FakeDirectory()
    for peer, digest in {"here": replica.chain.digest, "near": before, "far": genesis_head(RUN_ID).digest}.items():
        directory.records[peer] = PeerRecord(role="trainer", digest=digest)
    directory.records["watches"] = PeerRecord(role="observer", digest=replica.chain.digest)
    assert membership(members_of(directory), replica.chain).peers == {"me", "here", "near"}


async def test_contributor_to_the_last_commit_is_at_this_round_while_its_record_lags(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    await grown(replica, store, 3)
    kept = replica.chain.commits_since(2)
    assert kept is not None
    included, directory = kept[0].body.contributions[0].sender, FakeDirectory()
    records = {
        "behind": PeerRecord(role="trainer", round=1, digest=bytes([1]) * 32),
        "on another chain": PeerRecord(role="trainer", round=3, digest=bytes([2]) * 32),
    }
    for text, record in records.items():
        directory.records = {"me": PeerRecord(role="trainer"), included: record, "stranger": record}
        expected = {"me", included} if text == "behind" else {"me"}
        assert membership(members_of(directory), replica.chain).peers == expected


def test_who_said_good_bye_has_departed_until_it_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm_view, "MAX_LEFT_PEERS", 2)
    directory = FakeDirectory()
    members = members_of(directory)
    directory.tell(PeerLeft("a", "left"))
    directory.tell(PeerLeft("b", "expired"))
    assert membership(members).departed == {"a"}
    directory.tell(PeerJoined("a", PeerRecord()))
    assert membership(members).departed == frozenset()
    for peer in "cde":
        directory.tell(PeerLeft(peer, "left"))
    assert membership(members).departed == {"d", "e"}


def test_whose_process_has_ended_is_known_to_be_dead_until_it_joins_again() -> None:
    directory = FakeDirectory()
    members = members_of(directory)
    directory.tell(PeerLeft("a", "ended"))
    directory.tell(PeerLeft("b", "unreachable"))
    found = membership(members)
    assert found.ended == {"a"} and found.departed == frozenset(), "it may come back with what it voted for"
    directory.tell(PeerJoined("a", PeerRecord()))
    assert membership(members).ended == frozenset()


def test_who_rests_is_at_this_round_and_known_to_rest() -> None:
    directory = FakeDirectory()
    directory.records["a"] = PeerRecord(role="trainer", digest=genesis_head(RUN_ID).digest, resting=True)
    directory.records["far"] = PeerRecord(role="trainer", digest=bytes(32), resting=True)
    live = membership(members_of(directory))
    assert live.peers == {"a", "me"} and live.resting == {"a"}
    assert not any(membership(members_of(FakeDirectory())).resting)


def test_who_rests_has_no_turn_in_measuring() -> None:
    directory = FakeDirectory()
    directory.records |= {"a": PeerRecord(role="trainer", resting=True), "z": PeerRecord(role="trainer")}
    members = members_of(directory)
    assert [members.is_our_turn_to_evaluate(number) for number in range(4)] == [True, False] * 2


def test_the_trainers_take_turns_in_measuring() -> None:
    directory = FakeDirectory()
    directory.records |= {"a": PeerRecord(role="trainer"), "z": PeerRecord(role="trainer")}
    members = members_of(directory)
    assert [members.is_our_turn_to_evaluate(number) for number in range(6)] == [False, True, False] * 2
    directory.records.clear()
    assert not members.is_our_turn_to_evaluate(0)


def test_holders_are_those_of_the_state_that_most_have() -> None:
    directory, head = FakeDirectory(), ChainHead(3, bytes(32), 0)
    mine, right, wrong = (bytes([number]) * 32 for number in (1, 2, 0))
    for peer, state in {"a": right, "b": right, "c": wrong, "d": mine, "e": b""}.items():
        directory.records[peer] = PeerRecord(role="trainer", digest=head.digest, state_digest=state)
    directory.records["elsewhere"] = PeerRecord(role="trainer", digest=bytes([1]) * 32, state_digest=wrong)
    for number in range(5):  # keys without a vote
        name = f"stranger {number}"
        directory.records[name] = PeerRecord(role="trainer", digest=head.digest, state_digest=wrong)
    members, voters = members_of(directory), frozenset("abcde")
    assert sorted(members.snapshot().state_holders("me", head, mine, voters)) == ["a", "b"]
    del directory.records["b"]
    # If equally many have each, the lower digest counts, as in the vote.
    assert "c" in members.snapshot().state_holders("me", head, mine, voters)
    assert members.snapshot().state_holders("me", ChainHead(4, bytes([7]) * 32, 0), mine, voters) == []


def test_the_head_is_announced_at_once() -> None:
    directory = FakeDirectory()
    members_of(directory).announce_head(Chain(ChainHead(3, bytes(32), 7), ChainLog(VOTERS)), bytes([1]) * 32)
    assert directory.voters == {"a", "b"}
    assert directory.published == FakeStatus().status().record_fields() | {
        "urgent": True, "round": 3, "digest": bytes(32), "chain_tokens": 7, "state_digest": bytes([1]) * 32
    }  # fmt: skip


def test_our_own_progress_goes_out_with_a_new_head() -> None:
    directory = FakeDirectory()
    members = SwarmView(admitted_of(directory), FakeStatus(step=40), True, random.Random(0))
    members.announce_head(Chain(ChainHead(3, bytes(32), 7), ChainLog(VOTERS)), bytes([1]) * 32)
    assert directory.published["step"] == 40 and directory.published["round"] == 3


def test_alone_is_who_knows_of_others_and_sees_none() -> None:
    directory = FakeDirectory()
    first = SwarmView(admitted_of(directory), FakeStatus(), False, random.Random(0))
    assert not first.is_isolated(), "whoever begins a run waits for nobody"
    assert members_of(directory).is_isolated(), "whoever was sent to somebody does"
    directory.records["a"] = PeerRecord(role="trainer")
    first.on_membership_changed([PeerJoined("a", directory.records["a"])])
    assert not first.is_isolated()
    del directory.records["a"]
    assert first.is_isolated()


def test_the_other_trainers_are_without_ourselves_and_those_who_watch() -> None:
    directory = FakeDirectory()
    directory.records |= {"a": PeerRecord(role="trainer"), "b": PeerRecord(role="observer")}
    assert members_of(directory).other_trainers() == ["a"]


def at(*addresses: str, role: str = "trainer") -> PeerRecord:
    return PeerRecord(role=role, addresses=addresses)


def test_hidden_peers_are_beyond_reach_of_one_another_while_somebody_can_be_called() -> None:
    directory = FakeDirectory()
    relayed = "/ip4/8.8.8.8/tcp/1/p2p/{}/p2p-circuit/p2p/x"
    at_home = "/ip4/192.168.1.2/tcp/1/p2p/x"
    directory.records = {"me": at(relayed.format("c")), "a": at(at_home, relayed.format("d")), "b": at(at_home)}
    members = members_of(directory)
    assert members.unreachable_peers() == {"me", "a"} and members.relay_candidates("a") == ["b"]
    directory.records |= {name: at("/ip4/8.8.8.8/tcp/1/p2p/x") for name in "cd"}
    directory.records |= {"host": at("/ip4/8.8.8.8/tcp/1/p2p/x", role="observer"), "mute": at()}
    assert members.relay_candidates("a")[0] == "d" and set(members.relay_candidates("a")) == {"b", "c", "d"}, (
        "its relay first"
    )
    assert members.relay_candidates("gone") != []
    directory.records["me"] = at("/ip4/8.8.4.4/tcp/1/p2p/x")
    assert members.unreachable_peers() == frozenset(), "we can be called: it can bring us anything"
    directory.records = {"me": at(relayed.format("c")), "a": at(relayed.format("c"))}
    assert members.unreachable_peers() == frozenset(), "nobody could carry"
