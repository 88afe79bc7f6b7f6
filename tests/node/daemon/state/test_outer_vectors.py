"""The outer optimizer's vectors take no main memory, and those of one round are whole until nobody reads them."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from node.daemon.state.outer_state import OuterState, OuterVectors, outer_file_bytes
from optim.compose import compose
from optim.outer import Nesterov
from optim.recipes import RECIPES
from protocol.blobs.blob import Blob
from tests.node.daemon.state.checkpointer_setup import CheckpointerSetup
from tests.node.small_run import NUMEL, PROGRAM, certified, commit_of, payload, program_of, replica_in


async def advance(world: CheckpointerSetup, vectors: OuterVectors, *, frees: bool = True) -> None:
    """Make a round as `StateEffects` does; without `frees`, write over memory that may still be read."""
    replica = world.replica
    commit = commit_of(replica.chain.head, {1: world.store.put(payload(replica.chain.round))})
    entry, number = certified(replica.chain, commit, replica.blob.digest), replica.chain.round + 1
    if frees:
        await world.keeper.free_anchor(number, replica.blob)
    state = await replica.compute_next(entry, commit.body.contributions, vectors.rooms(number))
    await replica.advance(entry, vectors.place(number, state))
    if frees:
        await world.keeper.retain_state(replica.blob)


@pytest.mark.parametrize("frees", [True, False], ids=["", "control"])
async def test_state_that_a_peer_downloads_stays_whole_while_rounds_go_on(tmp_path: Path, frees: bool) -> None:
    world, vectors = CheckpointerSetup(tmp_path), OuterVectors(tmp_path, PROGRAM)
    await advance(world, vectors)
    downloaded = world.replica.blob
    world.wanted.add(downloaded.digest)
    await advance(world, vectors, frees=frees)
    assert Blob.of(world.store.read(downloaded.digest)) == downloaded, "one round later"
    await advance(world, vectors, frees=frees)
    assert (Blob.of(world.store.read(downloaded.digest)) == downloaded) == frees


@pytest.mark.parametrize("in_place", [False, True], ids=["", "control"])
async def test_step_that_ends_in_the_middle_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    world, vectors = CheckpointerSetup(tmp_path), OuterVectors(tmp_path, PROGRAM)
    await advance(world, vectors)
    replica, step = world.replica, Nesterov.apply
    before = replica.blob
    commit = commit_of(replica.chain.head, {1: world.store.put(payload(1))})
    entry, contributions = certified(replica.chain, commit, before.digest), commit.body.contributions

    def end_in_the_middle(self: Nesterov, anchor: torch.Tensor, slots: Any, delta: torch.Tensor, at: Any) -> None:
        step(self, anchor[: NUMEL // 2], {"momentum": slots["momentum"][: NUMEL // 2]}, delta[: NUMEL // 2], at)
        raise MemoryError

    monkeypatch.setattr(Nesterov, "apply", end_in_the_middle)
    with pytest.raises(MemoryError):
        await replica.compute_next(entry, contributions, vectors.rooms(1 if in_place else 2))
    monkeypatch.setattr(Nesterov, "apply", step)
    assert (Blob.of(*replica.state.byte_views()) == before) != in_place
    state = await replica.compute_next(entry, contributions, vectors.rooms(2))
    await replica.advance(entry, vectors.place(2, state))
    if not in_place:
        expected = CheckpointerSetup(tmp_path / "other")
        for _ in range(2):
            await advance(expected, OuterVectors(tmp_path, PROGRAM))
        assert replica.blob == expected.replica.blob


async def test_state_in_the_file_has_the_same_digest_as_one_in_memory(tmp_path: Path) -> None:
    world, vectors = CheckpointerSetup(tmp_path), OuterVectors(tmp_path, PROGRAM)
    in_memory, store = replica_in(world.store), world.store
    for _ in range(3):
        blob = store.put(payload(in_memory.chain.round))
        commit = commit_of(in_memory.chain.head, {1: blob})
        entry = certified(in_memory.chain, commit, in_memory.blob.digest)
        await in_memory.advance(entry, await in_memory.compute_next(entry, commit.body.contributions))
        await advance(world, vectors)
        assert world.replica.blob == in_memory.blob
    rooms = vectors.rooms(world.replica.chain.round)
    assert world.replica.state.slots["momentum"].data_ptr() == rooms["momentum"].data_ptr()
    assert world.replica.state.slots["momentum"].data_ptr() != vectors.rooms(0)["momentum"].data_ptr()


def test_state_from_elsewhere_is_copied_to_its_place(tmp_path: Path) -> None:
    vectors, method = OuterVectors(tmp_path, PROGRAM), PROGRAM.method
    state = OuterState.initial(torch.zeros(NUMEL), method)
    state.slots["momentum"].fill_(2.0)
    placed = vectors.place(5, state)
    assert torch.equal(vectors.rooms(1)["momentum"], torch.full((NUMEL,), 2.0))
    assert placed.slots["momentum"].data_ptr() == vectors.rooms(1)["momentum"].data_ptr()
    assert not vectors.rooms(0)["momentum"].any() and vectors.place(7, placed).slots.keys() == state.slots.keys()


def test_vectors_are_no_anonymous_memory(tmp_path: Path) -> None:
    vectors = OuterVectors(tmp_path, PROGRAM)
    address = vectors.rooms(0)["momentum"].data_ptr()
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (re.match(r"(\w+)-(\w+) (\S+) \w+ \S+ \d+ *(.*)", line) for line in lines)
    (found,) = [each for each in ranges if each and int(each[1], 16) <= address < int(each[2], 16)]
    assert found[3] == "rw-s" and str(tmp_path) in found[4] and "deleted" in found[4]


@pytest.mark.parametrize("recipe", RECIPES)
def test_file_has_the_slots_of_the_models_size_that_no_trainer_has(recipe: str, tmp_path: Path) -> None:
    program = program_of(compose(recipe))
    method, vectors = program.method, OuterVectors(tmp_path, program)
    state = OuterState.initial(torch.zeros(NUMEL), method)
    shared = {vector.data_ptr() for vector in state.shared_vectors(method)}
    expected = {name for name, slot in state.slots.items() if slot.numel() == NUMEL and slot.data_ptr() not in shared}
    assert vectors.rooms(0).keys() == expected == vectors.rooms(1).keys()
    assert outer_file_bytes(program) >= 8 * NUMEL * len(expected)
