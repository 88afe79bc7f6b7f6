"""The filtered mean: what it leaves out, what it keeps, and that it is the recipe's mean where nobody lies."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from optim.aggregation.agreement import cosines_with_others, find_copies
from optim.aggregation.base import WeightedPayload
from optim.aggregation.contribution_memory import SKETCH_BUCKETS, ContributionMemory, sketch
from optim.aggregation.filtered import Filtered
from optim.aggregation.mean import Mean, SenderMean, WeightedMean
from optim.codecs.floats import Uncompressed
from optim.codecs.topk import ChunkTopK
from optim.kernels.vectors import ArrayVector, SparseVector, Vector
from tests.optim.fake_peers import random_values

NUMEL = 20_000
CODECS = (Uncompressed(), ChunkTopK(k=64, bits=2))


def honest(count: int, numel: int = NUMEL) -> list[torch.Tensor]:
    """Return progress of members that agree in part: a common direction and noise of their own."""
    common = random_values(1000, numel)
    return [common + random_values(i, numel) for i in range(count)]


def payloads(
    rows: list[torch.Tensor], codec: Uncompressed | ChunkTopK, weights: list[float] | None = None
) -> list[WeightedPayload]:
    chosen = weights or [1.0] * len(rows)
    return [
        WeightedPayload(codec, codec.encode(row.clone()), row.numel(), weight)
        for row, weight in zip(rows, chosen, strict=True)
    ]


LIES: dict[str, tuple[Callable[[list[torch.Tensor]], torch.Tensor], str]] = {
    "sign-flip": (lambda rows: -rows[-1], "against the others"),
    "noise": (lambda rows: random_values(77, NUMEL) * 1.4, "against the others"),
    "inner product": (lambda rows: -1.2 * torch.stack(rows).mean(0), "against the others"),
    "zero": (lambda rows: torch.zeros(NUMEL), "zero"),
    "copy": (lambda rows: rows[0], "copy"),
    "scaled copy": (lambda rows: rows[0] * 0.9, "copy"),
    "few steps": (lambda rows: rows[-1] * 0.3, "too small"),
    "x5": (lambda rows: rows[-1] * 5, "too large"),
    "x1000": (lambda rows: rows[-1] * 1000, "too large"),
}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
@pytest.mark.parametrize("lie", LIES)
def test_lies_are_left_out_by_name_and_honest_members_stay(lie: str, codec: Uncompressed | ChunkTopK) -> None:
    rows = honest(8)
    falsify, why = LIES[lie]
    attacked = payloads([*rows[:6], falsify(rows[:7]), falsify(rows)], codec)
    left_out = Filtered().screen(attacked).left_out
    assert set(left_out) == {6, 7} and why in left_out.values()
    assert set(left_out.values()) <= {why, "copy"}
    plain = Mean(clip=True).screen(attacked).left_out
    assert plain == ({6: "too large", 7: "too large"} if lie == "x1000" else {}), (
        "the control: a clip sees no direction"
    )


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
@pytest.mark.parametrize(("over", "mean"), [("members", Mean(clip=True)), ("senders", SenderMean(clip=True))])
def test_without_liars_it_is_the_mean_of_the_recipe_to_the_last_bit(
    over: str, mean: WeightedMean, codec: Uncompressed | ChunkTopK
) -> None:
    rule = Filtered(over="senders" if over == "senders" else "members")
    members = payloads(honest(6), codec, [1.0, 2.0, 1.0, 1.5, 1.0, 1.0])
    screening = rule.screen(members)
    assert not screening.left_out
    found, expected = rule.combine(screening.payloads), mean.combine(members)
    assert np.array_equal(found, expected)
    assert np.array_equal(rule.combine_lazily(screening.payloads).to_dense(), found)


def test_honest_members_with_fewer_steps_and_tokens_stay() -> None:
    rows = honest(6)
    assert not Filtered().screen(payloads([*rows[:5], rows[5] * 0.3], Uncompressed(), [4.0] * 5 + [1.0])).left_out


def test_a_majority_that_disagrees_leaves_nobody_out() -> None:
    rows = [random_values(i, NUMEL) for i in range(6)]
    assert len(Filtered(agreement=0.9).screen(payloads(rows, Uncompressed())).left_out) <= 3


@pytest.mark.parametrize("count", [1, 2])
def test_of_two_members_nobody_is_called_a_liar(count: int) -> None:
    rows = honest(2)
    assert not Filtered().screen(payloads([rows[0], -rows[1] * 0.2][:count], Uncompressed())).left_out


def test_all_zero_members_are_kept_and_move_nothing() -> None:
    screening = Filtered().screen(payloads([torch.zeros(NUMEL)] * 3, Uncompressed()))
    assert not screening.left_out and not Filtered().combine(screening.payloads).any()


def sparse(row: torch.Tensor) -> SparseVector:
    vector = ChunkTopK(k=64, bits=2).decode_vector(ChunkTopK(k=64, bits=2).encode(row.clone()), row.numel())
    assert isinstance(vector, SparseVector)
    return vector


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_cosines_agree_with_a_slow_formula(form: str) -> None:
    rows = honest(5, 300_000)
    vectors: list[Vector] = [sparse(row) for row in rows]
    dense = [vector.to_dense().astype(np.float64) for vector in vectors]
    if form == "dense":
        vectors = [ArrayVector(vector.to_dense()) for vector in vectors]
    scales = [1.0, 0.5, 0.0, 2.0, 1.0]
    found = cosines_with_others(vectors, [vector.norm() for vector in vectors], scales)
    for index, row in enumerate(dense):
        others = sum(scale * other for j, (scale, other) in enumerate(zip(scales, dense, strict=True)) if j != index)
        expected = row @ others / np.linalg.norm(row) / np.linalg.norm(others)
        assert found[index] == pytest.approx(expected, abs=1e-5)


def test_copies_are_found_among_many_and_the_first_stays() -> None:
    rows = honest(12)
    rows[7], rows[11] = rows[3] * 2, rows[3] + 0.01 * random_values(5, NUMEL)
    vectors = [ArrayVector(row.numpy()) for row in rows]
    sketches = [sketch(vector) for vector in vectors]
    assert find_copies(vectors, [vector.norm() for vector in vectors], sketches) == [7, 11]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.kind)
def test_replay_of_an_earlier_round_is_left_out_by_name(codec: Uncompressed | ChunkTopK) -> None:
    rule, first = Filtered(memory=16, agreement=0.1), honest(6)
    state = np.zeros(rule.state_size, np.float32)
    assert not rule.screen(payloads(first, codec), state=state).left_out
    second = [random_values(2000, NUMEL) + random_values(100 + i, NUMEL) + row * 0.2 for i, row in enumerate(first)]
    attacked = payloads([*second[:5], first[5] * 1.1], codec)
    assert not Filtered(agreement=0.1).screen(attacked).left_out, "the control: without a memory it passes"
    assert rule.screen(attacked, state=state).left_out == {5: "replay"}
    assert np.abs(state).max() <= rule.state_range[1]


def test_memory_forgets_the_oldest_contributions_first() -> None:
    memory = ContributionMemory(np.zeros(3 * SKETCH_BUCKETS, np.float32))
    sketches = [sketch(ArrayVector(random_values(i, NUMEL).numpy())) for i in range(7)]
    memory.remember(sketches[:2])
    assert memory.find_replays(sketches) == [0, 1]
    memory.remember(sketches[2:4])
    assert memory.find_replays(sketches) == [0, 2, 3]


def test_nearly_parallel_contributions_of_honest_members_are_no_replays() -> None:
    common = random_values(1000, NUMEL)
    rounds = [[common + 0.1 * random_values(10 * age + i, NUMEL) for i in range(6)] for age in range(2)]
    rule = Filtered(memory=16)
    state = np.zeros(rule.state_size, np.float32)
    first, second = (payloads(rows, Uncompressed()) for rows in rounds)
    assert not rule.screen(first, state=state).left_out and not rule.screen(second, state=state).left_out
    assert rule.screen([*second[:5], first[5]], state=state).left_out
