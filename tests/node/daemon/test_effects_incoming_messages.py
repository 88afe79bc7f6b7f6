"""Which messages the round loop takes: early ones, those of strangers, forged ones."""

from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import NO_ROSTER
from protocol.consensus.messages.kinds import Inventory
from protocol.murmur_pb2 import Signed
from tests.node.daemon.loopback_network import HEAD, LoopbackNetwork
from tests.node.small_run import PEERS, contribution_of, stated


async def test_early_statements_wait_and_one_peer_cannot_crowd_out_another(table: LoopbackNetwork) -> None:
    honest, chatty = PEERS[1], PEERS[2]
    early = stated(honest, contribution_of(HEAD, table[1].parts()))
    flood = [stated(chatty, Inventory(0, view, NO_ROSTER, ())).signed for view in range(1, 40)]
    peer = table[0]
    peer.receiver.receive(honest.peer_id, [early.signed])
    peer.receiver.receive(chatty.peer_id, flood)
    assert len(peer.session._buffer._early) == 2 and not peer.loop.conduct.excluded
    peer.begin()
    assert honest.peer_id in peer.machine._knowledge.contributions


async def test_early_contributions_that_contradict_each_other_exclude_their_sender(table: LoopbackNetwork) -> None:
    honest, liar = PEERS[1], PEERS[2]
    early = stated(honest, contribution_of(HEAD, table[1].parts()))
    flood = [stated(liar, contribution_of(HEAD, table[2].parts(seed))).signed for seed in range(1, 40)]
    peer = table[0]
    peer.receiver.receive(honest.peer_id, [early.signed])
    peer.receiver.receive(liar.peer_id, flood[:1])
    assert not peer.loop.conduct.excluded, "one contribution contradicts nothing"
    peer.receiver.receive(liar.peer_id, flood)
    assert peer.loop.conduct.excluded == {liar.peer_id}
    assert len(peer.session._buffer._early) <= 2
    peer.begin()
    assert set(peer.machine._knowledge.contributions) == {honest.peer_id}


async def test_early_statements_of_strangers_and_of_far_rounds_are_dropped(table: LoopbackNetwork) -> None:
    peer = table[0]
    far = stated(PEERS[1], contribution_of(ChainHead(1, bytes(32), 0), table[1].parts()))
    stranger = stated(PEERS[5], contribution_of(HEAD, table[1].parts()))
    peer.receiver.receive(PEERS[1].peer_id, [far.signed, stranger.signed])
    assert not peer.session._buffer._early


async def test_a_stranger_changes_nothing_in_the_open_round(table: LoopbackNetwork) -> None:
    peer = table[0]
    table.begin()
    stranger = stated(PEERS[5], contribution_of(HEAD, table[1].parts()))
    peer.receiver.receive(PEERS[5].peer_id, [stranger.signed])
    assert (PEERS[5].peer_id, "not a member") in table[0].state.skipped
    assert not peer.session._messages
    assert PEERS[5].peer_id not in peer.machine._knowledge.contributions


async def test_forged_statements_are_refused(table: LoopbackNetwork) -> None:
    table.begin()
    signed = stated(PEERS[1], contribution_of(HEAD, table[1].parts())).signed
    signed.signature = bytes(64)
    assert table[0].receiver.receive(PEERS[1].peer_id, [signed, Signed(kind="nonsense")]) == []
    assert [type(fault).__name__ for fault in table[0].status.refused] == ["ForgedError", "MalformedError"]


async def test_all_that_is_wrong_in_one_call_is_told_at_once(table: LoopbackNetwork) -> None:
    peer = table[0]
    peer.receiver.receive(PEERS[1].peer_id, [Signed(kind="nonsense")] * 64)
    assert peer.status.refused_calls == [64]


async def test_whoever_has_a_vote_is_known_though_the_directory_lost_it(table: LoopbackNetwork) -> None:
    peer, other = table[0], PEERS[1].peer_id
    table.begin()
    peer.members_changed([PEERS[0].peer_id])
    assert peer.loop.is_known(other) and not peer.loop.is_known(PEERS[5].peer_id)
    peer.close()
    assert not peer.loop.is_known(other)


async def test_a_member_that_names_ever_new_blobs_fills_no_table(table: LoopbackNetwork) -> None:
    peer, liar = table[0], PEERS[1]
    table.begin()
    flood = [stated(liar, contribution_of(HEAD, table[1].parts(seed))).signed for seed in range(40)]
    peer.receiver.receive(liar.peer_id, flood)
    assert len(peer.session._messages) == len(peer.session._owner_messages) == 1
