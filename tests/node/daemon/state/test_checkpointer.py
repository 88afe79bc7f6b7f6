"""What is kept: the blobs that others may ask for, and on disk never less than the round before the last."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from node.daemon.checkpoints import checkpoint
from node.daemon.state import checkpointer
from node.daemon.state.checkpointer import KEPT_SECONDS, MAX_OLD_STATES, MAX_RETAINED_STATES
from node.daemon.state.contributions import TRACKER_KEY
from node.loop.contributions import MAX_AGE_ROUNDS, MAX_RESTORABLE, ContributionTracker, StoredContribution
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.trainer.ipc.channel import ContributionHeader
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.electorate import OPEN
from protocol.errors import StorageError
from tests.node.daemon.state.checkpointer_setup import CheckpointerSetup
from tests.node.small_run import PROGRAM, TERMS, commit_of, grown, payload, until


def offer_of(*blobs: Blob) -> StoredContribution:
    return StoredContribution(ContributionHeader(round=0, sizes=(1,), tokens=1, steps=1, loss=1.0), blobs)


async def test_prune_keeps_the_last_rounds_and_states_and_the_offer(world: CheckpointerSetup) -> None:
    store, replica, offers = world.store, world.replica, ContributionTracker(PROGRAM)
    offers.submit(offer_of(store.put(b"ours, part 0"), store.put(b"ours, part 1")))
    states, messages = [], []
    for _ in range(RETAINED_ROUNDS + 3):
        (commit,) = await grown(replica, store, 1)
        messages.append(commit.body.blobs[0].digest)
        states.append(replica.blob.digest)
        await world.pruned(offers, [commit.body])
        fresh = {*messages[-RETAINED_ROUNDS:], states[-1]}
        assert all(store.has(digest) for digest in fresh)
    assert not any(store.has(digest) for digest in {*messages[:-RETAINED_ROUNDS], *states[:-1]})
    assert offers.pending is not None and all(store.has(part.digest) for part in offers.pending.parts)
    for number in range(MAX_RESTORABLE):
        offers.on_round(MAX_AGE_ROUNDS + 1)
        assert offers.pending is None
        await world.pruned(offers, [])
        assert store.has(Blob.of(b"ours, part 0").digest), "an older checkpoint or another chain may ask for it"
        offers.submit(offer_of(store.put(f"the next one, {number}".encode())))
    offers.on_round(MAX_AGE_ROUNDS + 1)
    await world.pruned(offers, [])
    assert not store.has(Blob.of(b"ours, part 0").digest)


async def test_rounds_for_which_there_is_no_room_go_first(tmp_path: Path) -> None:
    """The last one stays in any case."""
    for rounds in (0, 1, 2):
        world, messages = CheckpointerSetup(tmp_path / str(rounds), room=rounds * len(payload(0))), list[bytes]()
        for _ in range(RETAINED_ROUNDS):
            (commit,) = await grown(world.replica, world.store, 1)
            messages.append(commit.body.blobs[0].digest)
            await world.pruned(ContributionTracker(PROGRAM), [commit.body])
        kept = max(1, rounds)
        assert [world.store.has(digest) for digest in messages] == [False] * (RETAINED_ROUNDS - kept) + [True] * kept
        world.arena.close()


async def test_a_state_that_somebody_is_fetching_stays_while_rounds_go_on(world: CheckpointerSetup) -> None:
    states: list[bytes] = []
    for number in range(2 * MAX_RETAINED_STATES):
        (commit,) = await grown(world.replica, world.store, 1)
        states.append(world.replica.blob.digest)
        await world.pruned(ContributionTracker(PROGRAM), [commit.body])
        if number == 0:
            world.wanted = {states[0]}
    assert world.store.has(states[0]) and world.store.path(states[0]).exists()
    assert not world.store.has(states[1]), "the control: a state that nobody fetches goes"
    world.wanted = set(states)
    for _ in range(2 * MAX_RETAINED_STATES):
        (commit,) = await grown(world.replica, world.store, 1)
        world.wanted.add(world.replica.blob.digest)
        states.append(world.replica.blob.digest)
        await world.pruned(ContributionTracker(PROGRAM), [commit.body])
    held = [digest for digest in states if world.store.has(digest)]
    assert len(held) == MAX_RETAINED_STATES, "a flood of fetches pins no more"
    assert held[0] == states[0], "the slowest download goes on"
    assert held[MAX_OLD_STATES:] == states[MAX_OLD_STATES - MAX_RETAINED_STATES :], "the next one can begin"


async def test_memory_of_a_state_is_free_once_it_is_on_disk_or_gone(world: CheckpointerSetup) -> None:
    """A peer that downloads the state of two rounds before gets its bytes, not those of the next round."""
    shared = torch.arange(8, dtype=torch.float32)
    expected = bytes(shared.numpy().data)
    old, kept = world.store.lend(shared.numpy().data), world.store.lend(b"the newest")
    await world.keeper.retain_state(old)
    piece = world.store.read_piece(old.digest, 0)
    world.wanted.add(old.digest)
    assert not world.keeper.is_anchor_free(2, kept)
    await world.keeper.free_anchor(2, kept)
    assert world.keeper.is_anchor_free(2, kept)
    shared.fill_(7.0)
    assert bytes(piece) == bytes(world.store.read_piece(old.digest, 0)) == expected
    world.wanted.clear()
    control = world.store.lend(shared.numpy().data)
    await world.keeper.retain_state(control)
    await world.keeper.free_anchor(4, kept)
    assert not world.store.has(control.digest), "nobody wants it"


async def test_memory_of_a_state_is_not_free_while_it_is_saved(world: CheckpointerSetup) -> None:
    await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
    number = world.replica.chain.round
    assert not world.keeper.is_anchor_free(number + 2, world.replica.blob)
    assert world.keeper.is_anchor_free(number + 1, world.replica.blob)
    world.adopted.set()
    await world.keeper.free_anchor(number + 2, world.replica.blob)
    assert world.saved() == [number]


async def test_what_is_carried_for_others_stays(world: CheckpointerSetup) -> None:
    carried, other = world.store.put(b"carried"), world.store.put(b"other")
    world.carried = {carried.digest}
    await world.pruned(ContributionTracker(PROGRAM), [])
    assert world.store.has(carried.digest) and not world.store.has(other.digest)


async def test_slow_peer_finds_the_rounds_that_it_is_replaying_while_faster_ones_go_on(
    world: CheckpointerSetup,
) -> None:
    """Its daemon may need seconds for each commit, and the others a quarter of a second for a round."""
    world.round_seconds = 0.25
    messages = []
    for _ in range(6 * RETAINED_ROUNDS):
        (commit,) = await grown(world.replica, world.store, 1)
        messages.append(commit.body.blobs[0].digest)
        await world.pruned(ContributionTracker(PROGRAM), [commit.body])
    assert all(world.store.has(digest) for digest in messages)
    world.round_seconds = KEPT_SECONDS
    await world.pruned(ContributionTracker(PROGRAM), [])
    assert [world.store.has(digest) for digest in messages] == [False] * (5 * RETAINED_ROUNDS) + [
        True
    ] * RETAINED_ROUNDS


async def test_prune_after_a_jump_over_many_rounds_keeps_the_newest(world: CheckpointerSetup) -> None:
    commits = [
        commit_of(ChainHead(number, bytes(32), 0), {1: world.store.put(bytes([number]))}) for number in range(10)
    ]
    await world.pruned(ContributionTracker(PROGRAM), [commit.body for commit in commits])
    kept = [world.store.has(commit.body.blobs[0].digest) for commit in commits]
    assert kept == [False] * (10 - RETAINED_ROUNDS) + [True] * RETAINED_ROUNDS
    assert world.store.has(world.replica.blob.digest)


async def test_a_save_waits_for_adoption_and_the_next_one_for_the_save(world: CheckpointerSetup) -> None:
    await grown(world.replica, world.store, 1)
    await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
    await until(lambda: world.waited == [1])
    assert world.saved() == []
    await grown(world.replica, world.store, 1)
    second = asyncio.create_task(world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM)))
    ready = asyncio.create_task(world.keeper.wait_until_announceable(world.replica))
    await asyncio.sleep(0.01)
    assert not second.done() and not ready.done(), "more than one round is unsaved"
    world.adopted.set()
    await second
    await ready
    assert world.saved() == [1]
    await world.keeper.wait_until_saved()
    assert world.saved() == [1, 2]


async def test_large_states_are_saved_less_often(world: CheckpointerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = world.arena.layout
    monkeypatch.setattr(checkpointer, "FREE_BYTES", 0)
    monkeypatch.setattr(checkpointer, "BYTES_PER_SECOND", (layout.total_bytes + layout.file_bytes) / 60)
    world.adopted.set()
    for passed in (0, 59, 1):
        world.now += passed
        await grown(world.replica, world.store, 1)
        await world.keeper.wait_until_announceable(world.replica)
        await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
    await world.keeper.wait_until_saved()
    assert world.saved() == [1, 3]


async def test_what_is_saved_is_that_moment_though_the_replica_moves_on(world: CheckpointerSetup) -> None:
    await grown(world.replica, world.store, 1)
    head, anchor = world.replica.chain.head, world.replica.state.anchor.clone()
    await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM, (0, "included")))
    await grown(world.replica, world.store, 1)
    world.adopted.set()
    await world.keeper.wait_until_saved()
    found = world.loaded()
    assert found.round == 1 and found.chain.restore(OPEN, TERMS).head == head and torch.equal(found.anchor, anchor)
    assert ContributionTracker.from_json(PROGRAM, found.chain.table[TRACKER_KEY]).outcome_of(0) == "included"


async def test_what_is_not_adopted_in_time_is_not_saved(world: CheckpointerSetup) -> None:
    world.adopts = False
    world.adopted.set()
    await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
    await world.keeper.wait_until_saved()
    assert world.saved() == [] and world.errors.recovered == ["not saved"] and "not applied" in world.keeper.last_error


async def test_a_full_disk_is_said_and_survived(world: CheckpointerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageError("no space; free some")

    world.adopted.set()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
        await world.keeper.wait_until_saved()
        await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM))
    assert world.errors.recovered == ["not saved"] * 2 and world.keeper.last_error == "no space; free some"
    await world.keeper.save_now(world.replica, ContributionTracker(PROGRAM))
    assert world.saved() == [0] and world.keeper.last_error == ""


async def test_a_fault_of_our_own_is_not_survived(world: CheckpointerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    world.adopted.set()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", lambda *_: 1 // 0)
        await world.keeper.save_in_background(world.replica, ContributionTracker(PROGRAM))
        with pytest.raises(ZeroDivisionError):
            await world.keeper.wait_until_saved()
    world.keeper._saving = None
