"""Two nodes with one key: in the records alone, and in a simulated swarm."""

import asyncio
import logging
import random

import pytest

from protocol.errors import KeyInUseError
from protocol.identity import Identity
from protocol.membership import known_peers as key_conflict
from protocol.membership.known_peers import RECENT_SECONDS, YIELD_SECONDS, KeyConflict, make_start_id
from protocol.murmur_pb2 import PeerRecord
from tests.protocol.membership.simulated_gossip import GossipSwarm, address_of, until

FIRST, SECOND, THIRD = (make_start_id(now, random.Random(1)) for now in (1e9, 2e9, 3e9))


def record(start: int, sequence: int, echo: int = 0) -> PeerRecord:
    return PeerRecord(start=start, sequence=sequence, other_start=echo, addresses=["/ip4/192.0.2.1/tcp/1/p2p/Qm"])


def test_later_processes_have_higher_ids() -> None:
    assert 0 < FIRST < SECOND < THIRD < 1 << 64
    assert make_start_id(1e9, random.Random(1)) != make_start_id(1e9, random.Random(2))


def test_record_of_an_earlier_process_is_no_conflict_however_new_it_looks() -> None:
    conflict = KeyConflict(SECOND)
    for sequence in range(1, 100):
        conflict.observe(record(FIRST, 10**15 + sequence, echo=THIRD), sequence)
        assert conflict.other(sequence) is None and conflict.echo == FIRST
        conflict.check(sequence)


def test_record_that_echoes_our_start_is_a_conflict_and_the_later_node_stops() -> None:
    earlier, later = KeyConflict(FIRST), KeyConflict(SECOND)
    assert later.observe(record(FIRST, 1), 0.0) and later.other(0.0) is None
    assert earlier.observe(record(SECOND, 2, echo=later.echo), 0.0)
    assert not later.observe(record(FIRST, 3, echo=earlier.echo), 0.0), "the same process again"
    for conflict in (earlier, later):
        other = conflict.other(1.0)
        assert other is not None and "at /ip4/192.0.2.1/tcp/1" in other.describe()
    later.check(YIELD_SECONDS - 1)
    with pytest.raises(KeyInUseError, match="another node uses this node's key"):
        later.check(YIELD_SECONDS)
    earlier.check(YIELD_SECONDS)


def test_conflict_ends_when_the_other_node_is_silent() -> None:
    conflict = KeyConflict(FIRST)
    conflict.observe(record(SECOND, 1, echo=FIRST), 0.0)
    conflict.observe(record(SECOND, 1, echo=FIRST), 50.0)  # the same record again is no sign of life
    assert conflict.other(RECENT_SECONDS) and not conflict.other(RECENT_SECONDS + 1)


def test_repeated_records_of_several_processes_are_no_sign_of_life() -> None:
    conflict = KeyConflict(FIRST)
    for now in range(int(RECENT_SECONDS) + 2):
        conflict.observe(record(SECOND, 1, echo=FIRST), now)
        conflict.observe(record(THIRD, 1), now)
    assert conflict.other(RECENT_SECONDS + 1) is None


def test_both_are_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    conflict = KeyConflict(FIRST)
    conflict.observe(record(SECOND, 1, echo=FIRST), 0.0)
    for now in range(5):
        conflict.check(now)
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]


@pytest.mark.slow
async def test_copied_node_stops_and_the_first_one_stays(
    swarm: GossipSwarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_conflict, "YIELD_SECONDS", 0.5)
    identity = Identity.create()
    seed = swarm.add()
    first = swarm.add(identity, bootstrap=[address_of(seed)])
    first_task = swarm.tasks[identity.peer_id]
    await until(lambda: identity.peer_id in seed.live())
    copied = swarm.add(identity, bootstrap=[address_of(seed)])
    copied_task = swarm.tasks.pop(identity.peer_id)
    with pytest.raises(KeyInUseError, match="started earlier"):
        await asyncio.wait_for(copied_task, 10)
    await until(lambda: caplog.text.count("another node uses this node's key") >= 2)
    assert first.other_node_with_our_key() and copied.other_node_with_our_key()
    await copied.leave()
    assert identity.peer_id in copied.live(), "it did not say goodbye in the name of the first"
    swarm.network.directories[identity.peer_id] = first
    swarm.tasks[identity.peer_id] = first_task
    await until(lambda: identity.peer_id in seed.live())
    assert not first_task.done()


@pytest.mark.slow
@pytest.mark.parametrize("has_vote", [False, True])
async def test_restarted_node_is_no_copy(has_vote: bool, swarm: GossipSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is heard at once, whatever its clock says; control: `test_node_that_nobody_counts_follows_all_the_way`."""
    monkeypatch.setattr(key_conflict, "YIELD_SECONDS", 0.1)
    identity = Identity.create()
    seed = swarm.add()
    voters = frozenset([identity.peer_id, seed.peer_id] if has_vote else [])
    seed.set_voters(voters)
    for skew in (0.0, 20.0, -20.0, 0.0):
        node = swarm.add(identity, skew=skew, bootstrap=[address_of(seed)])
        node.set_voters(voters)
        await until(lambda node=node: seed.peer_id in node.live() and identity.peer_id in seed.live(), 3.0)  # type: ignore[misc]
        await asyncio.sleep(0.3)  # several heartbeats
        assert node.other_node_with_our_key() is None
        swarm.kill(node)
