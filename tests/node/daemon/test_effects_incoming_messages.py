"""Whose statements the round driver hears: early ones, strangers', forged ones."""

from collections.abc import Sequence

from protocol.consensus.chain import ChainHead
from protocol.errors import PeerFault
from protocol.murmur_pb2 import Signed
from tests.node.daemon.loopback_network import HEAD, LoopbackNetwork
from tests.node.small_run import PEERS, contribution_of, stated


async def test_early_statements_wait_and_one_peer_cannot_crowd_out_another(table: LoopbackNetwork) -> None:
    honest, liar = PEERS[1], PEERS[2]
    early = stated(honest, contribution_of(HEAD, table[1].parts()))
    flood = [stated(liar, contribution_of(HEAD, table[2].parts(seed))).signed for seed in range(1, 40)]
    driver = table[0].driver
    driver.take(honest.peer_id, [early.signed])
    driver.take(liar.peer_id, flood)
    assert len(driver._attendance._early) == 2
    driver.begin(0, HEAD.digest, table.peers)
    assert driver._machine is not None and honest.peer_id in driver._machine._knowledge.contributions


async def test_early_statements_of_strangers_and_of_far_rounds_are_dropped(table: LoopbackNetwork) -> None:
    driver = table[0].driver
    far = stated(PEERS[1], contribution_of(ChainHead(1, bytes(32), 0), table[1].parts()))
    stranger = stated(PEERS[5], contribution_of(HEAD, table[1].parts()))
    driver.take(PEERS[1].peer_id, [far.signed, stranger.signed])
    assert not driver._attendance._early


async def test_a_stranger_changes_nothing_in_the_open_round(table: LoopbackNetwork) -> None:
    driver = table[0].driver
    table.begin()
    stranger = stated(PEERS[5], contribution_of(HEAD, table[1].parts()))
    driver.take(PEERS[5].peer_id, [stranger.signed])
    assert (PEERS[5].peer_id, "stranger") in table[0].skipped
    assert not driver._heard and driver._machine is not None
    assert PEERS[5].peer_id not in driver._machine._knowledge.contributions


async def test_forged_statements_are_refused(table: LoopbackNetwork) -> None:
    table.begin()
    signed = stated(PEERS[1], contribution_of(HEAD, table[1].parts())).signed
    signed.signature = bytes(64)
    assert table[0].driver.take(PEERS[1].peer_id, [signed, Signed(kind="nonsense")]) == []
    assert [type(fault).__name__ for fault in table[0].refused] == ["ForgedError", "MalformedError"]


async def test_all_that_is_wrong_in_one_call_is_told_at_once(table: LoopbackNetwork) -> None:
    told: list[Sequence[PeerFault]] = []
    driver = table[0].driver
    driver._hooks.refused = lambda peer, faults: told.append(faults)
    driver.take(PEERS[1].peer_id, [Signed(kind="nonsense")] * 64)
    assert [len(faults) for faults in told] == [64]


async def test_whoever_has_a_vote_is_known_though_the_directory_lost_it(table: LoopbackNetwork) -> None:
    driver, peer = table[0].driver, PEERS[1].peer_id
    table.begin()
    driver._hooks.trains = lambda _: False
    assert driver.knows(peer) and not driver.knows(PEERS[5].peer_id)
    driver.close()
    assert not driver.knows(peer)
