"""The same bits on every replica, and nothing changed by what is refused."""

from pathlib import Path

import pytest
import torch

from node.daemon.replica import OuterState, Workshop
from optim.recipes import compose
from protocol.errors import MalformedError, MissingFileError, StaleError
from protocol.rounds.chain import genesis
from tests.node.small_run import (
    METHOD,
    NUMEL,
    RUN_ID,
    STATE_BYTES,
    commit_of,
    grown,
    method_of,
    payload,
    replica_in,
    store_in,
)


def state_of(seed: int) -> OuterState:
    generator = torch.Generator().manual_seed(seed)
    anchor, momentum = torch.randn(2, NUMEL, generator=generator)
    return OuterState(anchor.clone(), {"momentum": momentum.clone()})


def test_state_to_bytes_and_back() -> None:
    state = state_of(1)
    raw = state.to_bytes()
    assert raw.nbytes == STATE_BYTES == 8 * NUMEL
    back = OuterState.from_bytes(bytearray(raw), NUMEL, METHOD)
    assert torch.equal(back.anchor, state.anchor) and torch.equal(back.slots["momentum"], state.slots["momentum"])
    assert bytes(back.to_bytes()) == bytes(raw)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, NUMEL - 1, NUMEL, 2 * NUMEL - 1])
def test_a_state_that_is_not_finite_is_refused(value: float, place: int) -> None:
    values = torch.zeros(2 * NUMEL)
    values[place] = value
    with pytest.raises(MalformedError, match="not finite"):
        OuterState.from_bytes(bytearray(values.numpy().tobytes()), NUMEL, METHOD)


@pytest.mark.parametrize("size", [0, STATE_BYTES - 4, STATE_BYTES + 4, STATE_BYTES - 1])
def test_a_state_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(MalformedError, match="bytes"):
        OuterState.from_bytes(bytearray(size), NUMEL, METHOD)


async def test_replicas_with_other_thread_counts_hold_the_same_bits(tmp_path: Path) -> None:
    digests = set()
    for threads in (1, 2, 3):
        store = store_in(tmp_path / str(threads))
        torch.set_num_threads(threads)
        try:
            replica = replica_in(store)
            await grown(replica, store, 3)
        finally:
            torch.set_num_threads(1)
        digests.add((replica.chain.digest, replica.blob.digest))
        assert store.read(replica.blob.digest) == bytes(replica.state.to_bytes())
    assert len(digests) == 1


async def test_apply_moves_head_state_and_blob_and_leaves_the_old_state_as_it_was(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    before, anchor = replica.state, replica.state.anchor.clone()
    await grown(replica, store, 1)
    assert replica.chain.round == 1 and replica.state is not before
    assert torch.equal(before.anchor, anchor) and not torch.equal(replica.state.anchor, anchor)


async def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    head, blob = replica.chain.head, replica.blob
    bad = store.put(b"\xff" * 40)
    elsewhere = await grown(replica_in(store), store, 2)
    with pytest.raises(StaleError):
        await replica.apply(elsewhere[1])
    with pytest.raises(MalformedError, match="does not decode"):
        await replica.apply(commit_of(head, {1: bad}))
    lost = store.put(payload(9))
    store.discard(lost.digest)
    with pytest.raises(MissingFileError):
        await replica.apply(commit_of(head, {1: lost}))
    with pytest.raises(MalformedError):
        await replica.take_over(head, bad, ())
    assert (replica.chain.head, replica.blob) == (head, blob)


async def test_take_over_keeps_commits_that_lead_to_the_head_and_no_others(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ahead, behind, third = replica_in(store), replica_in(store), replica_in(store)
    commits = await grown(ahead, store, 3)
    await behind.take_over(ahead.chain.head, ahead.blob, commits)
    assert behind.chain.since(1) == tuple(commits[1:]) and behind.blob == ahead.blob
    assert torch.equal(behind.state.anchor, ahead.state.anchor)
    await third.take_over(ahead.chain.head, ahead.blob, commits[:2])
    assert third.chain.since(1) is None, "commits that end before the head would be served as if they led to it"


def test_reduce_and_check_refuse_what_does_not_decode(tmp_path: Path) -> None:
    store, method = store_in(tmp_path), method_of("butterfly")
    workshop = Workshop(method, NUMEL, 3, store)
    sizes = [stop - start for start, stop in method.bounds(NUMEL, 3)]
    good = [store.put(payload(seed, sizes[1])) for seed in range(2)]
    bad = store.put(b"bad")
    reduced = workshop.reduce(1, good, [1, 3])
    values = [method.codec.decode(store.read(blob.digest), sizes[1]) for blob in (*good, reduced)]
    assert torch.allclose((values[0] + 3 * values[1]) / 4, values[2])
    workshop.check(reduced, 1)
    with pytest.raises(MalformedError):
        workshop.check(bad, 1)
    with pytest.raises(MalformedError):
        workshop.reduce(1, [good[0], bad], [1, 1])
    with pytest.raises(MalformedError):
        workshop.reduce(1, good, [0, 0])


def test_initial_state_has_the_slots_of_the_method() -> None:
    assert OuterState.initial(torch.ones(4), compose("averaging")).slots == {}
    assert torch.equal(OuterState.initial(torch.ones(4), METHOD).slots["momentum"], torch.zeros(4))
    assert genesis(RUN_ID).round == 0
