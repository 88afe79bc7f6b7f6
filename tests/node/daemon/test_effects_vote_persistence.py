"""What the round driver promised is on disk before anybody hears it, and holds after a start."""

import threading
from pathlib import Path

import pytest

from node.daemon.checkpoints.vote_log import VoteLog
from node.loop import round_session
from node.loop.actions import LoopAction
from protocol.blobs.store import BlobStore
from protocol.consensus.events import VoteRecord
from protocol.errors import StorageError
from tests.node.daemon.loopback_network import HEAD, LoopbackNetwork
from tests.node.small_run import (
    PEERS,
    RUN_ID,
    kinds,
    store_in,
    terms_of,
    until,
)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set, no vow comes to the disk."""
    event, save = threading.Event(), VoteLog.save

    def slow_save(self: VoteLog, vow: VoteRecord) -> None:
        assert event.wait(10)
        save(self, vow)

    monkeypatch.setattr(VoteLog, "save", slow_save)
    return event


async def test_nothing_that_a_vow_covers_leaves_before_it_is_on_disk(
    table: LoopbackNetwork, released: threading.Event
) -> None:
    table.begin()
    table.offer(0, 1, 2)
    seats = table.peers.values()
    await until(lambda: any(seat.session.is_persisting for seat in seats))
    leader = next(seat for seat in seats if seat.session.is_persisting)
    assert kinds(leader.sent) == ["contribution"], "the roster is written down, but not sent"
    assert leader.session.is_open
    released.set()
    await table.wait_until_decided(0, 1, 2)
    assert "roster" in kinds(leader.sent)


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
@pytest.mark.parametrize("secures", [True, False], ids=["", "control"])
async def test_what_a_vow_rests_on_outlives_a_kill(
    exchange: str, secures: bool, tables: list[LoopbackNetwork], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a majority that is killed comes back bound to what nobody has any more. The control: in memory alone."""
    if not secures:
        monkeypatch.setattr(BlobStore, "persist", lambda self, digest: None)
    table = LoopbackNetwork(tmp_path, 3, exchange)
    tables.append(table)
    table.begin()
    table.offer(0, 1, 2)
    await table.wait_until_decided(0, 1, 2)
    (commit,) = {seat.decided[-1] for seat in table.peers.values()}
    blobs = commit.body.parts or [entry.body.parts[0] for entry in commit.body.contributions]
    after_a_kill = [store_in(tmp_path / str(index)) for index in range(3)]
    kept = [all(store.has(blob.digest) for blob in blobs) for store in after_a_kill]
    assert sum(kept) >= 2 if secures else not any(kept)  # whoever learns of the decision need not vote


async def test_a_driver_that_starts_again_goes_on_after_its_vow(tables: list[LoopbackNetwork], tmp_path: Path) -> None:
    absent = PEERS[3].peer_id
    vow = VoteRecord(HEAD.round, HEAD.digest, 4, None, frozenset({PEERS[0].peer_id, absent}))
    VoteLog(tmp_path / "vow-0.json", RUN_ID, terms_of(1)).save(vow)
    tables.append(LoopbackNetwork(tmp_path, 2, "gather"))
    tables[0].begin()
    machines = [tables[0][index].machine for index in range(2)]
    assert [machine.view for machine in machines if machine] == [5, 0]
    assert [machine.has_member(absent) for machine in machines if machine] == [True, False]


async def test_a_disk_that_cannot_keep_a_vow_ends_the_node(
    table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: VoteLog, vow: VoteRecord) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(VoteLog, "save", full)
    table.begin()
    table.offer(0, 1, 2)
    await until(lambda: any(seat.broken for seat in table.peers.values()))
    for seat in table.peers.values():
        assert not seat.decided and {str(error) for error in seat.broken} <= {"no space"}
        seat.broken.clear()


async def test_a_fault_while_a_vow_is_written_is_told(table: LoopbackNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: VoteLog, vow: VoteRecord) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(VoteLog, "save", broken)
    table.begin()
    table.offer(0, 1, 2)
    await _until_broken(table)


async def test_a_fault_in_what_waited_for_a_vow_is_told(table: LoopbackNetwork, released: threading.Event) -> None:
    def broken(action: LoopAction) -> None:
        effects._run = run  # type: ignore[method-assign]
        raise KeyError("a bug")

    table.begin()
    table.offer(0, 1, 2)
    seats = table.peers.values()
    await until(lambda: any(seat.session.is_persisting for seat in seats))
    effects = next(seat.effects for seat in seats if seat.session.is_persisting)
    run, effects._run = effects._run, broken  # type: ignore[method-assign]
    released.set()
    await _until_broken(table)


async def _until_broken(table: LoopbackNetwork) -> None:
    await until(lambda: any(seat.broken for seat in table.peers.values()))
    for seat in table.peers.values():
        assert all(isinstance(error, KeyError) for error in seat.broken) and not seat.decided
        seat.broken.clear()


async def test_a_round_that_is_opened_again_goes_on_after_its_vow(table: LoopbackNetwork) -> None:
    """Whoever could not follow a longer chain comes back to the same round, in which it may have voted."""
    table.begin()
    table.offer(0, 1)
    joined = table[1]
    await until(lambda: bool(joined.session._votes))
    joined.close()
    joined.begin()
    assert joined.machine.view == 1


async def test_what_waits_for_a_slow_disk_is_bounded(
    table: LoopbackNetwork, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.begin()
    table.offer(0, 1, 2)
    seats = table.peers.values()
    await until(lambda: any(seat.session.is_persisting for seat in seats))
    monkeypatch.setattr(round_session, "MAX_PENDING_ACTIONS", 0)
    await until(lambda: any((None, "slow disk") in seat.state.skipped for seat in seats))
    monkeypatch.setattr(round_session, "MAX_PENDING_ACTIONS", 4096)
    released.set()
    assert len(await table.wait_until_decided(0, 1, 2)) == 1
