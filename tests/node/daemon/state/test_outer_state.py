"""The same bits on every replica, and nothing changed by what is refused."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from node.daemon.state.outer_state import OuterState, RoundCompute, state_bytes
from optim.compose import compose
from optim.kernels.vectors import Vector
from optim.method import REFERENCE_WEIGHT, STEPS_MADE, USUAL_NORM
from optim.options import Scalar
from optim.recipes import RECIPES
from protocol.blobs.blob import Blob
from protocol.consensus.chain import extend_head, genesis_head
from protocol.consensus.messages.contributions import Contribution
from protocol.errors import MalformedError, MissingFileError, StaleError
from tests.node.small_run import (
    METHOD,
    NUMEL,
    PROGRAM,
    RUN_ID,
    STATE_BYTES,
    apply,
    certified,
    commit_of,
    contribution_of,
    grown,
    method_of,
    payload,
    program_of,
    replica_in,
    states_computed_by,
    store_in,
    until,
)
from tests.optim.fake_peers import LOSSLESS, Tables


def state_of(seed: int) -> OuterState:
    generator = torch.Generator().manual_seed(seed)
    anchor, momentum = torch.randn(2, NUMEL, generator=generator)
    small = {REFERENCE_WEIGHT: torch.tensor([4096.0]), USUAL_NORM: torch.tensor([0.5])}
    return OuterState(anchor.clone(), {"momentum": momentum.clone(), **small})


def test_only_a_run_of_exact_steps_tells_its_trainers_a_step() -> None:
    """An auditor, who repeats the work alone, would find another state with any other number."""
    state = state_of(1)
    exact = replace(state, slots={**state.slots, STEPS_MADE: torch.tensor([7.0])})
    assert (state.steps_before(9), state.exact_step) == (9, 0)
    assert (exact.steps_before(9), exact.exact_step) == (7, 7)


def test_state_to_bytes_and_back() -> None:
    state = state_of(1)
    raw = b"".join(state.byte_views())
    assert len(raw) == STATE_BYTES == 8 * NUMEL + 8
    back = OuterState.from_bytes(bytearray(raw), NUMEL, METHOD)
    assert torch.equal(back.anchor, state.anchor)
    assert all(torch.equal(back.slots[name], state.slots[name]) for name in state.slots)
    assert b"".join(back.byte_views()) == raw


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, NUMEL - 1, NUMEL, 2 * NUMEL - 1, 2 * NUMEL])
def test_a_state_that_is_not_finite_is_refused(value: float, place: int) -> None:
    values = torch.zeros(2 * NUMEL + 2)
    values[place] = value
    with pytest.raises(MalformedError, match="not finite"):
        OuterState.from_bytes(bytearray(values.numpy().tobytes()), NUMEL, METHOD)


@pytest.mark.parametrize(("place", "value"), [(2 * NUMEL, -0.06), (2 * NUMEL + 1, -1.0), (NUMEL, 2.0**97)])
def test_a_state_whose_slots_are_out_of_range_is_refused(place: int, value: float) -> None:
    """A negative usual weight makes each round an ascent."""
    values = torch.zeros(2 * NUMEL + 2)
    values[place] = abs(value) if abs(value) < 2 else 1.0
    OuterState.from_bytes(bytearray(values.numpy().tobytes()), NUMEL, METHOD)
    values[place] = value
    with pytest.raises(MalformedError, match="outside"):
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
        assert store.read(replica.blob.digest) == b"".join(replica.state.byte_views())
    assert len(digests) == 1


async def test_apply_moves_head_state_and_blob_and_leaves_the_old_state_as_it_was(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    before, anchor = replica.state, replica.state.anchor.clone()
    await grown(replica, store, 1)
    assert replica.chain.round == 1 and replica.state is not before
    assert torch.equal(before.anchor, anchor) and not torch.equal(replica.state.anchor, anchor)


async def test_a_new_state_can_be_used_before_it_has_a_name(tmp_path: Path) -> None:
    """The trainer waits for it; whoever asks hears of head and blob together."""
    store = store_in(tmp_path)
    replica = replica_in(store)
    (commit,) = await grown(replica_in(store), store, 1)
    before = (replica.chain.head, replica.blob, replica.state)
    state = await replica.compute_next(commit, commit.body.contributions)
    assert (replica.chain.head, replica.blob, replica.state) == before
    await replica.advance(commit, state)
    assert replica.state is state and replica.blob == Blob.of(b"".join(state.byte_views()))
    assert replica.chain.round == 1


async def test_what_was_foreseen_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    replica, other = replica_in(store), replica_in(store)
    (commit,) = await grown(other, store, 1)
    computed, head = states_computed_by(replica, monkeypatch), replica.chain.head
    for view in range(2):  # whoever proposes it
        replica.speculate(replace(commit.body, view=view), commit.body.contributions)
        await until(lambda: len(computed) == 1)
    assert replica.chain.head == head and replica.state.anchor is not other.state.anchor, "it is not decided yet"
    await apply(replica, commit)
    assert replica.state is computed[0] and len(computed) == 1 and replica.blob == other.blob
    (commit,) = await grown(other, store, 1)
    await apply(replica, commit)
    assert len(computed) == 2 and replica.blob == other.blob, "what nobody has foreseen is computed when it is wanted"


async def test_where_another_commit_is_decided_than_foreseen_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(tmp_path)
    replica, other = replica_in(store), replica_in(store)
    head = replica.chain.head
    decided, foreseen = (commit_of(head, {peer: store.put(payload(peer))}) for peer in (1, 2))
    await apply(other, decided)
    computed = states_computed_by(replica, monkeypatch)
    replica.speculate(foreseen.body, foreseen.body.contributions)
    replica.speculate(decided.body, ())  # the same with another share of it
    await until(lambda: len(computed) >= 1)
    before = len(computed)
    await apply(replica, decided)
    assert len(computed) == before + 1 and replica.blob == other.blob


async def test_what_was_foreseen_on_another_chain_is_not_taken(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica, other = replica_in(store), replica_in(store)
    await grown(other, store, 1)
    ahead = commit_of(other.chain.head, {1: store.put(payload(5))})
    replica.speculate(ahead.body, ahead.body.contributions)  # from a state that is not the one before it
    await replica.install_state(other.chain.head, other.chain.log, other.blob)
    await apply(replica, ahead)
    await apply(other, ahead)
    assert replica.blob == other.blob


async def test_what_could_not_be_foreseen_is_tried_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica, other = replica_in(store), replica_in(store)
    lost = store.put(payload(9))
    commit = commit_of(replica.chain.head, {1: lost})
    store.discard(lost.digest)
    replica.speculate(commit.body, commit.body.contributions)
    for _ in range(10):
        await asyncio.sleep(0)
    with pytest.raises(MissingFileError):
        await replica.compute_next(certified(replica.chain, commit), commit.body.contributions)
    replica.speculate(commit.body, commit.body.contributions)
    for _ in range(10):
        await asyncio.sleep(0)
    store.put(payload(9))
    await apply(replica, commit)
    await apply(other, commit)
    assert replica.blob == other.blob


async def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    replica = replica_in(store)
    head, blob = replica.chain.head, replica.blob
    bad = store.put(b"\xff" * 40)
    elsewhere = await grown(replica_in(store), store, 2)
    with pytest.raises(StaleError):
        await apply(replica, elsewhere[1])
    with pytest.raises(MalformedError, match="does not decode"):
        await apply(replica, commit_of(head, {1: bad}))
    lost = store.put(payload(9))
    store.discard(lost.digest)
    with pytest.raises(MissingFileError):
        await apply(replica, commit_of(head, {1: lost}))
    with pytest.raises(MalformedError):
        await replica.install_state(head, replica.chain.log, bad)
    assert (replica.chain.head, replica.blob) == (head, blob)


async def test_take_over_keeps_the_commits_that_lead_to_the_head(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    ahead, behind = replica_in(store), replica_in(store)
    commits = await grown(ahead, store, 3)
    await behind.install_state(ahead.chain.head, ahead.chain.log.since(1), ahead.blob)
    assert behind.chain.commits_since(1) == tuple(commits[1:]) and behind.blob == ahead.blob
    assert behind.chain.commits_since(0) is None and behind.chain.electorate == ahead.chain.electorate
    assert torch.equal(behind.state.anchor, ahead.state.anchor)


def test_reduce_and_check_refuse_what_does_not_decode(tmp_path: Path) -> None:
    store, program = store_in(tmp_path), program_of(method_of("butterfly"), 3)
    workshop = RoundCompute(program, store, lambda *_: 1.0)
    start, stop = program.plan(0).part_spans[1]
    good = [store.put(payload(seed, stop - start)) for seed in range(2)]
    bad = store.put(b"bad")
    reduced = workshop.reduce_part(0, 1, contributions([good[0], good[1]], [1, 2])).blob
    values = [METHOD.codec.decode(store.read(blob.digest), stop - start) for blob in (*good, reduced)]
    assert torch.allclose((values[0] + 2 * values[1]) / 3, values[2])
    workshop.check_part(reduced, 0, 1)
    with pytest.raises(MalformedError):
        workshop.check_part(bad, 0, 1)
    with pytest.raises(MalformedError):
        workshop.reduce_part(0, 1, contributions([good[0], bad], [1, 1]))
    with pytest.raises(MalformedError):
        workshop.reduce_part(0, 1, contributions(good, [0, 0]))


def test_reduction_names_those_that_its_rule_leaves_out(tmp_path: Path) -> None:
    """One of them is a milliard times as large as the others."""
    store, program = store_in(tmp_path), program_of(method_of("butterfly"), 3)
    start, stop = program.plan(0).part_spans[1]
    values = torch.full((stop - start,), 0.01)
    blobs = [store.put(METHOD.codec.encode(values * scale)) for scale in (1.0, 1.1, 0.9, 1e9)]
    found = RoundCompute(program, store, lambda *_: 1.0).reduce_part(0, 1, contributions(blobs, [1] * 4, [0] * 4))
    assert found.left_out == {3: "too large"}


def contributions(blobs: Sequence[Blob], tokens: Sequence[int], ages: Sequence[int] = (0, 0)) -> list[Contribution]:
    """Each names its blob as part 1 of three."""
    body = contribution_of(genesis_head(RUN_ID), [])
    return [
        replace(body, parts=(blob, blob, blob), tokens=count, age=age)
        for blob, count, age in zip(blobs, tokens, ages, strict=True)
    ]


def test_the_methods_rule_says_what_a_contribution_weighs(tmp_path: Path) -> None:
    """By tokens, all alike, and less for who is late."""
    store = store_in(tmp_path)
    blobs = [store.put(METHOD.codec.encode(torch.full((NUMEL,), value))) for value in (0.0, 1.0)]
    found = []
    rules: list[dict[str, Scalar]] = [
        {"staleness": 0.0},
        {"weights": "equal", "staleness": 0.0},
        {"weights": "equal", "staleness": 1.0},
        {},
    ]
    for options in rules:
        program = program_of(compose("averaging", LOSSLESS | {"aggregate": options}))
        reduced = RoundCompute(program, store, lambda *_: 1.0).reduce_part(
            0, 0, contributions(blobs, [100, 200], [0, 1])
        )
        found.append(float(METHOD.codec.decode(store.read(reduced.blob.digest), NUMEL)[0]))
    assert found == pytest.approx([2 / 3, 1 / 2, 1 / 3, 2 / 8 / (1 + 2 / 8)])


async def test_a_lone_round_moves_by_its_share_and_so_it_does_for_who_took_the_state_over(tmp_path: Path) -> None:
    """delta <- s delta with s = 1 / (4 * 63/64): what is usual is part of the state."""
    store = store_in(tmp_path)
    replica, taker = replica_in(store), replica_in(store)
    delta = torch.full((NUMEL,), 0.5)
    blob = store.put(METHOD.codec.encode(delta))
    await apply(replica, commit_of(replica.chain.head, dict.fromkeys(range(4), blob)))
    await taker.install_state(replica.chain.head, replica.chain.log, replica.blob)
    before, lone = replica.state.anchor, commit_of(replica.chain.head, {2: blob})
    for each in (replica, taker):
        await apply(each, lone)
    share = 1 / (4 * 63 / 64)
    assert torch.allclose(before - replica.state.anchor, 0.7 * (share + 0.9 * (0.9 + share)) * delta)
    assert replica.blob == taker.blob


async def test_each_round_is_applied_by_its_own_plan(tmp_path: Path) -> None:
    """Of two fragments, each moves in its rounds; and the update hears of the learning rate that is left."""
    heard: list[tuple[int, int, int]] = []

    def decay(step: int, rounds: int, tokens: int) -> float:
        heard.append((step, rounds, tokens))
        return 1.0

    store = store_in(tmp_path)
    tables: Tables = {"schedule": {"inner_steps": 10, "fragments": 2}, "topology": {"kind": "gather"}}
    program = program_of(compose("averaging", LOSSLESS | tables))
    workshop = RoundCompute(program, store, decay)
    before = OuterState.initial(torch.zeros(NUMEL), program.method)
    head = genesis_head(RUN_ID)
    for number in range(3):
        plan = program.plan(number)
        blob = store.put(METHOD.codec.encode(torch.ones(plan.numel)))
        commit = commit_of(head, {1: blob}).body
        after_it = workshop.apply_commit(before, commit, commit.contributions, 100 * number)
        moved = torch.zeros(NUMEL)
        plan.scatter(torch.ones(plan.numel), moved)
        assert torch.equal(before.anchor - after_it.anchor, moved)
        before, head = after_it, extend_head(head, commit)
    assert heard == [(0, 0, 0), (1, 1, 100), (2, 2, 200)]


def test_a_checked_sparse_message_is_not_decoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, store = program_of(compose("sparseloco")), store_in(tmp_path)
    codec, decoded = program.plan(0).codecs[0], [0]
    blobs = [store.put(codec.encode(torch.randn(NUMEL))) for _ in range(3)]
    commit = commit_of(genesis_head(RUN_ID), dict(enumerate(blobs))).body
    workshop, state = (
        RoundCompute(program, store, lambda *_: 1.0),
        OuterState.initial(torch.zeros(NUMEL), program.method),
    )
    expected = workshop.apply_commit(state, commit, commit.contributions)
    real = type(codec).decode_vector

    def counted(*arguments: Any) -> Vector:
        decoded[0] += 1
        return real(*arguments)

    monkeypatch.setattr(type(codec), "decode_vector", counted)
    for blob in (*blobs[:2], *blobs[:2]):
        workshop.check_part(blob, 0, 0)
    assert decoded == [4]
    again = workshop.apply_commit(state, commit, commit.contributions)
    assert torch.equal(again.anchor, expected.anchor) and decoded == [5], "only the third, which nobody had checked"
    workshop.apply_commit(state, commit, commit.contributions)
    assert decoded == [8], "what a round no longer needs is forgotten"


def test_what_is_kept_of_checked_messages_is_bounded(tmp_path: Path) -> None:
    program, store = program_of(compose("sparseloco", {"codec": {"k": 512}})), store_in(tmp_path)
    workshop = RoundCompute(program, store, lambda *_: 1.0)
    for number in range(2):
        codec = program.plan(number).codecs[0]
        for _ in range(5):  # each takes 12 bytes a kept value, and an eighth is kept
            workshop.check_part(store.put(codec.encode(torch.randn(NUMEL))), number, 0)
        kept = list(workshop._decoded.items())
        assert len(kept) == 2 and sum(vector.nbytes for _, vector in kept) <= 4 * NUMEL
        assert {key[1] for key, _ in kept} == {number}


def test_no_share_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    workshop, state = RoundCompute(PROGRAM, store, lambda *_: 1.0), state_of(1)
    commit = commit_of(genesis_head(RUN_ID), {1: store.put(payload(1))}).body
    assert workshop.apply_commit(state, commit, ()) is state


def test_initial_state_has_the_slots_of_the_method() -> None:
    assert OuterState.initial(torch.ones(4), compose("averaging")).slots == {USUAL_NORM: torch.zeros(1)}
    assert torch.equal(OuterState.initial(torch.ones(4), METHOD).slots["momentum"], torch.zeros(4))
    assert genesis_head(RUN_ID).round == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trainer_is_given_what_its_signal_shares(recipe: str) -> None:
    method = compose(recipe)
    state = OuterState.initial(torch.ones(4), method)
    vectors = state.shared_vectors(method)
    assert vectors[0] is state.anchor and len(vectors) == len(method.signal.shared_names)
    for name, vector in zip(method.signal.shared_names[1:], vectors[1:], strict=True):
        assert vector is state.slots[name]
    raw = b"".join(state.byte_views())
    assert len(raw) == state_bytes(4, method)
    back = OuterState.from_bytes(bytearray(raw), 4, method)
    assert back.slots.keys() == state.slots.keys() and b"".join(back.byte_views()) == raw
