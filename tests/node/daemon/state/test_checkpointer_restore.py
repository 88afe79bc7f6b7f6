"""What a start finds on its disk: the trainer's own state, and the message that was on its way."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from node.daemon.checkpoints.checkpoint import Checkpoint
from node.daemon.state.contributions import ContributionFile, restore_contributions, restore_trainer_snapshot
from node.loop.contributions import (
    ContributionTracker,
    LastSent,
    SettledContribution,
    StoredContribution,
)
from node.trainer.ipc.channel import ContributionHeader
from node.trainer.ipc.shared_memory import RESIDUAL, SharedLayout, SharedMemory
from optim.compose import compose
from protocol.consensus.chain import ChainHead
from protocol.errors import CheckpointError, StorageError
from tests.node.daemon.recorded_errors import RecordedErrors
from tests.node.daemon.state.checkpointer_setup import OUTBOX, CheckpointerSetup
from tests.node.small_run import PEERS, PROGRAM, commit_of, program_of


def restored(
    saved: Checkpoint | None, world: CheckpointerSetup, errors: RecordedErrors | None = None
) -> ContributionTracker:
    return restore_contributions(saved, PROGRAM, world.arena, world.store, world.sent, errors or RecordedErrors())


async def test_trainer_and_message_come_back_from_disk(world: CheckpointerSetup, tmp_path: Path) -> None:
    world.snapshot(outstanding=3)
    await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM, (2, "included")))
    found, other = world.loaded(), CheckpointerSetup(tmp_path / "other")
    restore_trainer_snapshot(found, other.arena)
    snapshot = other.arena.read_snapshot()
    place = [name for name, _ in world.arena.layout.vectors].index(RESIDUAL)
    assert snapshot is not None and snapshot.vectors[RESIDUAL][0] == place
    assert bytes(other.arena.contribution_buffer[: len(OUTBOX)]) == OUTBOX
    offers = restored(found, other)
    assert offers.pending is not None and offers.pending.header.tokens == 100
    assert [other.store.read(part.digest) for part in offers.pending.parts] == [b"first", b"second"]
    # A round has taken it while we were away: settled now, and not offered again.
    commit = commit_of(ChainHead(3, bytes(32), 0), {1: offers.pending.parts}).body
    assert offers.on_commit(PEERS[1].peer_id, commit) == "included"
    assert offers.is_known(ContributionHeader(round=3, sizes=(5, 6), tokens=100, steps=5, loss=3.0))
    other.arena.close()


async def test_a_state_of_another_method_is_refused(world: CheckpointerSetup) -> None:
    world.snapshot()
    await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM))
    found = world.loaded()
    for recipe in ("data-parallel", "local-adam"):
        arena = SharedMemory.create(SharedLayout.of(program_of(compose(recipe))))
        with pytest.raises(CheckpointError, match="the state of another method"):
            restore_trainer_snapshot(found, arena)
        assert arena.read_snapshot() is None
        arena.close()


@pytest.mark.parametrize(("outstanding", "decided"), [(None, None), (2, (2, "excluded"))])
async def test_what_is_decided_or_absent_does_not_come_back(
    world: CheckpointerSetup, outstanding: int | None, decided: tuple[int, Any] | None
) -> None:
    world.snapshot(outstanding)
    await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM, decided))
    offers = restored(world.loaded(), world)
    assert offers.pending is None and offers.last_outcome == decided


async def test_a_checkpoint_without_a_trainer(world: CheckpointerSetup) -> None:
    await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM))
    found = world.loaded()
    restore_trainer_snapshot(found, world.arena)
    assert world.arena.read_snapshot() is None
    assert restored(found, world).pending is None


def test_a_last_message_whose_bytes_are_gone_is_not_offered_and_said(tmp_path: Path) -> None:
    world = CheckpointerSetup(tmp_path)
    world.snapshot()
    asyncio.run(world.keeper.save_now(world.replica, ContributionTracker(PROGRAM)))
    found, errors = world.loaded(), RecordedErrors()
    restore_trainer_snapshot(found, world.arena)
    parts = (world.store.put(b"first"), world.store.put(b"second"))
    message = ContributionHeader(serial=1, round=found.round, sizes=(5, 6), tokens=1, steps=1, loss=1.5)
    world.sent.save(LastSent(StoredContribution(message, parts), ()))
    world.store.discard(parts[1].digest)
    assert restored(found, world, errors).pending is None
    assert errors.recovered == ["contribution missing"]
    world.arena.close()


def test_the_last_message_is_found_again(tmp_path: Path) -> None:
    world = CheckpointerSetup(tmp_path)
    offer = StoredContribution(
        ContributionHeader(serial=4, round=7, sizes=(5, 6), tokens=1, steps=1, loss=1.5), (world.store.put(b"part"),)
    )
    sent = LastSent(
        offer,
        (SettledContribution(offer, 6, "included", "excluded"), SettledContribution(offer, 7, "excluded", resent_in=4)),
    )
    assert world.sent.load() is None
    world.sent.save(sent)
    assert ContributionFile(world.folder.contribution_file).load() == sent
    world.folder.contribution_file.write_text(world.folder.contribution_file.read_text()[:-9])
    with pytest.raises(StorageError, match="damaged"):
        world.sent.load()
    assert restored(None, world).pending is None, "a trainer that begins anew counts its messages anew"
    assert world.sent.load() is None
    world.arena.close()
