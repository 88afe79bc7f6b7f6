"""Each robust rule, compared with a slow implementation and attacked by byzantine members."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from optim.aggregation.base import AggregationRule, WeightedPayload
from optim.aggregation.mean import Mean
from optim.aggregation.robust import CentredClip, CoordinateMedian, Krum, TrimmedMean
from optim.codecs.base import Codec
from optim.codecs.floats import Uncompressed
from optim.codecs.int_blocks import BlockInt8
from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError, OptimError
from optim.kernels.vectors import SLAB_SIZE

Array = npt.NDArray[np.float64]
RULES: list[AggregationRule] = [TrimmedMean(), CoordinateMedian(), Krum(), Krum(several=True), CentredClip()]
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def payloads_of(
    values: Sequence[torch.Tensor], weights: Sequence[float] | None = None, codec: Codec | None = None
) -> list[WeightedPayload]:
    codec, weights = codec or Uncompressed(), weights or [1.0] * len(values)
    return [
        WeightedPayload(codec, codec.encode(value), value.numel(), weight)
        for value, weight in zip(values, weights, strict=True)
    ]


def honest_contributions(count: int, numel: int = 500, spread: float = 0.5) -> list[torch.Tensor]:
    """Return contributions in a common direction of norm sqrt(numel), each with noise of its own."""
    generator = torch.Generator().manual_seed(count)
    truth = torch.randn(numel, generator=generator)
    return [truth + spread * torch.randn(numel, generator=generator) for _ in range(count)]


def slow_trimmed(rows: Array, liars: float) -> Array:
    cut = min(math.ceil(liars * len(rows)), (len(rows) - 1) // 2)
    return np.array([np.mean(sorted(column)[cut : len(rows) - cut]) for column in rows.T])


def slow_krum(rows: Array, liars: float, several: bool) -> Array:
    if len(rows) < 3:
        return np.array(rows.mean(axis=0))
    nearest = len(rows) - min(math.ceil(liars * len(rows)), (len(rows) - 3) // 2) - 2
    scores = []
    for i, row in enumerate(rows):
        distances = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(distances[:nearest]))
    return np.array(rows[np.argsort(scores, kind="stable")[: nearest if several else 1]].mean(axis=0))


def slow_centred(rows: Array, radius: float, iterations: int) -> Array:
    centre = np.zeros(rows.shape[1])
    for _ in range(iterations):
        limit = radius * np.median([np.linalg.norm(row - centre) for row in rows])
        steps = [(row - centre) * min(1, limit / (np.linalg.norm(row - centre) or 1)) for row in rows]
        centre = centre + np.mean(steps, axis=0)
    return centre


SLOW: list[tuple[AggregationRule, Callable[[Array], Array]]] = [
    (TrimmedMean(), lambda rows: slow_trimmed(rows, 0.25)),
    (TrimmedMean(liars=0.4), lambda rows: slow_trimmed(rows, 0.4)),
    (CoordinateMedian(), lambda rows: np.median(rows, axis=0)),
    (Krum(), lambda rows: slow_krum(rows, 0.25, False)),
    (Krum(liars=0.1), lambda rows: slow_krum(rows, 0.1, False)),
    (Krum(several=True), lambda rows: slow_krum(rows, 0.25, True)),
    (CentredClip(), lambda rows: slow_centred(rows, 1.0, 5)),
    (CentredClip(radius=0.3, iterations=2), lambda rows: slow_centred(rows, 0.3, 2)),
]


@pytest.mark.parametrize(("rule", "slow"), SLOW, ids=[str(rule) for rule, _ in SLOW])
@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 8, 13])
def test_rule_agrees_with_a_slow_implementation(
    rule: AggregationRule, slow: Callable[[Array], Array], members: int
) -> None:
    values = honest_contributions(members, 50)
    combined = rule.combine(payloads_of(values))
    assert combined == pytest.approx(slow(torch.stack(values).double().numpy()), rel=1e-4, abs=1e-5)


ATTACKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sign flip x10": lambda value: -10 * value,
    "loud noise": lambda value: 1e6 * torch.randn(value.numel(), generator=torch.Generator().manual_seed(9)),
    "constant": lambda value: torch.full_like(value, 100.0),
}


@each_rule
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize(("members", "byzantine"), [(4, 1), (8, 2), (12, 3)])
def test_byzantine_members_hardly_move_the_result(
    rule: AggregationRule, attack: str, members: int, byzantine: int
) -> None:
    values = honest_contributions(members)
    truth = torch.stack(values[byzantine:]).mean(0)
    attacked = [ATTACKS[attack](value) for value in values[:byzantine]] + values[byzantine:]
    distance = float((torch.from_numpy(rule.combine(payloads_of(attacked))) - truth).norm() / truth.norm())
    assert distance < 0.6  # one honest member is 0.4 away
    # The control: the mean moves far away.
    mean = torch.from_numpy(Mean().combine(payloads_of(attacked)))
    assert float((mean - truth).norm() / truth.norm()) > 2


@each_rule
def test_claimed_tokens_do_not_change_the_result(rule: AggregationRule) -> None:
    values = honest_contributions(5)
    plain = rule.combine(payloads_of(values))
    assert np.array_equal(plain, rule.combine(payloads_of(values, [1e9, 1, 1, 1, 1])))


@each_rule
def test_result_is_near_the_mean_of_honest_members(rule: AggregationRule) -> None:
    values = honest_contributions(6)
    truth = torch.stack(values).mean(0)
    assert float((torch.from_numpy(rule.combine(payloads_of(values))) - truth).norm() / truth.norm()) < 0.45
    same = rule.combine(payloads_of([values[0]] * 6))
    assert np.allclose(same, values[0].numpy(), rtol=1e-5, atol=1e-6)


@each_rule
@pytest.mark.parametrize("members", [1, 2])
def test_result_for_one_or_two_members_is_their_mean(rule: AggregationRule, members: int) -> None:
    values = honest_contributions(members, spread=0.01)
    assert np.allclose(rule.combine(payloads_of(values)), torch.stack(values).mean(0).numpy(), rtol=1e-4, atol=1e-4)


@each_rule
@pytest.mark.parametrize("codec", [Uncompressed(), BlockInt8(), ChunkTopK(k=8, chunk=64)], ids=str)
def test_member_of_weight_zero_is_absent(rule: AggregationRule, codec: Codec) -> None:
    members = payloads_of(honest_contributions(5), [3, 0, 5, 7, 1], codec)
    assert np.array_equal(rule.combine(members), rule.combine(members[:1] + members[2:]))


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
def test_order_of_members_changes_only_rounding(rule: AggregationRule) -> None:
    members = payloads_of(honest_contributions(7))
    assert np.allclose(rule.combine(members), rule.combine(members[::-1]), rtol=1e-6, atol=1e-7)


@each_rule
def test_slabs_do_not_change_the_result(rule: AggregationRule) -> None:
    """Compares a vector of several slabs with two vectors that each fit into one slab."""
    values = honest_contributions(5, SLAB_SIZE + 100)
    if isinstance(rule, TrimmedMean | CoordinateMedian):
        whole = rule.combine(payloads_of(values))
        pieces = [
            rule.combine(payloads_of([value[part].contiguous() for value in values]))
            for part in (slice(0, SLAB_SIZE), slice(SLAB_SIZE, None))
        ]
        assert np.array_equal(whole, np.concatenate(pieces))
    truth = torch.stack(values).mean(0)
    assert float((torch.from_numpy(rule.combine(payloads_of(values))) - truth).norm() / truth.norm()) < 0.6


def test_plus_and_minus_zero_give_the_same_bits() -> None:
    """Processors differ in which of the two they call smaller; neither may reach the anchor's digest."""
    columns = torch.tensor([[0.0, -0.0, 0.0], [-0.0, -0.0, 0.0], [0.0, 0.0, -0.0]])
    for rule in (TrimmedMean(), CoordinateMedian()):
        assert not np.signbit(rule.combine(payloads_of(list(columns)))).any()


def test_median_of_sparse_contributions_is_nearly_zero() -> None:
    """Members that keep different coordinates outvote each other, so sparse contributions need a mean."""
    members = payloads_of(honest_contributions(5, 4096, spread=20.0), codec=ChunkTopK(k=64))
    assert np.linalg.norm(CoordinateMedian().combine(members)) < 0.1 * np.linalg.norm(Mean().combine(members))


@each_rule
@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_invalid_weights_are_refused(rule: AggregationRule, weights: list[float]) -> None:
    with pytest.raises(OptimError, match="weights"):
        rule.combine(payloads_of(honest_contributions(2), weights))


@each_rule
def test_malformed_payload_is_a_codec_error(rule: AggregationRule) -> None:
    members = payloads_of(honest_contributions(2))
    with pytest.raises(CodecError):
        rule.combine([members[0], WeightedPayload(Uncompressed(), b"nonsense", 500, 1)])
