"""Means of contributions, with and without a clip."""

import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from optim.aggregation.base import AggregationRule, WeightedPayload
from optim.aggregation.mean import Mean, SenderMean
from optim.codecs import dct_topk
from optim.codecs.base import Codec, Payload
from optim.codecs.dct_topk import MAX_SIDE, TILE_SIZE, DctTopK, inverse_dct
from optim.codecs.floats import Float16, Uncompressed
from optim.codecs.int_blocks import BlockInt8
from optim.codecs.sign import BlockSign
from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError, OptimError
from optim.kernels.vectors import SLAB_SIZE, ArrayVector, Floats, SparseVector, Vector

RULES: list[AggregationRule] = [
    *(Mean(), Mean(clip=True), Mean(weights="equal", over="members")),
    *(SenderMean(), SenderMean(clip=True)),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def payloads_of(values: list[torch.Tensor], weights: list[float], codec: Codec | None = None) -> list[WeightedPayload]:
    codec = codec or Uncompressed()
    return [
        WeightedPayload(codec, codec.encode(value), value.numel(), weight)
        for value, weight in zip(values, weights, strict=True)
    ]


def random_contributions(count: int, numel: int = 500) -> list[torch.Tensor]:
    return list(torch.randn(count, numel, generator=torch.Generator().manual_seed(count)))


def test_mean_by_tokens() -> None:
    combined = Mean().combine(payloads_of([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 2.0])], [1, 2]))
    assert combined.tolist() == pytest.approx([3.0, 4 / 3])


def test_weights_follow_tokens_or_are_equal_and_fall_with_age() -> None:
    assert [Mean().weigh(tokens, age) for tokens, age in ((500, 0), (500, 3), (0, 0))] == [500, 500, 0]
    assert [Mean(weights="equal").weigh(tokens, 0) for tokens in (1, 1000)] == [1, 1]
    late = Mean(weights="equal", staleness=0.5)
    assert [late.weigh(9, age) for age in (0, 3, 8)] == pytest.approx([1, 0.5, 1 / 3])
    assert Mean(staleness=1.0).weigh(100, 1) == 50


def test_sender_mean_divides_by_the_senders_of_each_value() -> None:
    values = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([4.0, 2.0, 0.0])]
    assert SenderMean().combine(payloads_of(values, [1, 1])).tolist() == [2.5, 2.0, 0.0]
    assert Mean().combine(payloads_of(values, [1, 1])).tolist() == [2.5, 1.0, 0.0]


def test_sender_mean_divides_by_the_senders_of_each_coefficient() -> None:
    """Hardly any transformed value is zero, so that senders are known by the coefficients."""
    codec, values = DctTopK(k=40), random_contributions(3, 2 * TILE_SIZE)
    members = payloads_of(values, [1, 2, 1], codec)
    kept = [codec.decode_vector(codec.encode(value), value.numel()).coefficients.to_dense() for value in values]
    weights = np.array([1, 2, 1], np.float32)[:, None]
    senders = np.sum(weights * (np.stack(kept) != 0), axis=0)
    mean = np.sum(weights * np.stack(kept), axis=0) / np.maximum(senders, 1)
    found = SenderMean().combine(members)
    assert np.allclose(found, inverse_dct(mean.reshape(-1, MAX_SIDE, MAX_SIDE)).ravel(), atol=1e-5)
    assert np.linalg.norm(found) > 1.5 * np.linalg.norm(Mean().combine(members)), "the control: the mean over all"


def test_transform_is_inverted_once_for_any_number_of_members(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = DctTopK(k=40), random_contributions(5, 2 * TILE_SIZE)
    members, undone = payloads_of(values, [1] * 5, codec), list[int]()
    apart = np.mean([codec.decode(codec.encode(value), 2 * TILE_SIZE).numpy() for value in values], axis=0)

    def counted(tiles: Floats) -> Floats:
        undone.append(len(tiles))
        return inverse_dct(tiles)

    monkeypatch.setattr(dct_topk, "inverse_dct", counted)
    for rule in (Mean(), SenderMean()):
        undone.clear()
        found = rule.combine(members)
        assert sum(undone) == 2, "two tiles in total"
    assert np.allclose(Mean().combine(members), apart, atol=1e-5)
    assert not np.allclose(found, apart, atol=1e-5), "the control: the mean over senders differs"


def test_late_contributions_shorten_the_step_with_over_members() -> None:
    values = [torch.tensor([1.0, 0.0]), torch.tensor([3.0, 2.0])]
    buffered = Mean(weights="equal", staleness=0.5, over="members")
    assert buffered.combine(payloads_of(values, [0.5, 0.5])).tolist() == [1.0, 0.5]
    assert buffered.combine(payloads_of(values, [1, 0.5])).tolist() == [1.25, 0.5]
    assert buffered.combine(payloads_of([*values, values[0]], [1, 0.5, 0])).tolist() == [1.25, 0.5], (
        "weight zero means absent"
    )
    # The control: with over = "weights", contributions that are all late count in full.
    assert Mean(weights="equal", staleness=0.5).combine(payloads_of(values, [0.5, 0.5])).tolist() == [2.0, 1.0]
    with pytest.raises(ValidationError, match="takes weights = 'equal'"):
        Mean(over="members")


@pytest.mark.parametrize("codec", [Uncompressed(), ChunkTopK(k=8, chunk=64)], ids=str)
def test_identical_members_agree_under_both_means(codec: Codec) -> None:
    members = payloads_of(random_contributions(1) * 4, [1] * 4, codec)
    assert np.allclose(SenderMean().combine(members), Mean().combine(members), rtol=1e-6)


@each_rule
@pytest.mark.parametrize("codec", [Uncompressed(), ChunkTopK(k=8, chunk=64)], ids=str)
def test_member_of_weight_zero_is_absent(rule: AggregationRule, codec: Codec) -> None:
    members = payloads_of(random_contributions(4), [3, 0, 5, 7], codec)
    assert np.array_equal(rule.combine(members), rule.combine(members[:1] + members[2:]))


@each_rule
def test_sum_follows_the_given_order_to_the_bit(rule: AggregationRule) -> None:
    members = payloads_of(random_contributions(8, 10_000), [1] * 8)
    forward = rule.combine(members)
    assert np.array_equal(forward, rule.combine(members))
    # The control: another order gives another sum, which would break the anchor's digest.
    assert not np.array_equal(forward, rule.combine(members[::-1]))


def test_mean_is_a_loop_in_fp32() -> None:
    values, weights = random_contributions(3, 50), [11.0, 7.0, 5.0]
    combined = Mean().combine(payloads_of(values, weights))
    for i in range(50):
        total = np.float32(0)
        for value, weight in zip(values, weights, strict=True):
            total = total + np.float32(np.float32(weight / 11) * np.float32(value[i]))
        assert combined[i] == total / np.float32(23 / 11)


@pytest.mark.parametrize("codec", [Float16(), BlockInt8(), BlockSign(block=16), Uncompressed()])
def test_equal_weights_give_the_bits_of_the_unweighted_mean(codec: Codec) -> None:
    """Contributions of equal weight are summed without a pass that multiplies them."""
    values = random_contributions(3, 1000)
    plain, heavy = (Mean().combine(payloads_of(values, [weight] * 3, codec)) for weight in (1.0, 4096.0 * 37))
    assert np.array_equal(plain, heavy)
    assert not np.array_equal(plain, Mean().combine(payloads_of(values, [1.0, 1.0, 1.5], codec))), "the control"


def test_clip_bounds_the_influence_of_one_member() -> None:
    values = random_contributions(5)
    values[3] = values[3] * 1e6
    norms = [float(value.norm()) for value in values]
    clipped = Mean(clip=True).combine(payloads_of(values, [1] * 5))
    assert np.linalg.norm(clipped) <= statistics.median(norms) * 1.0001
    # The control: without the clip the largest contribution decides alone.
    assert np.linalg.norm(Mean().combine(payloads_of(values, [1] * 5))) > 1000 * statistics.median(norms)


def test_clip_leaves_equal_norms_and_zeros_alone() -> None:
    values = [torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]), torch.tensor([5.0, 0.0])]
    assert np.array_equal(
        Mean(clip=True).combine(payloads_of(values, [1] * 3)), Mean().combine(payloads_of(values, [1] * 3))
    )
    assert Mean(clip=True).combine(payloads_of([torch.zeros(2)], [1])).tolist() == [0, 0]


@each_rule
@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_invalid_weights_are_refused(rule: AggregationRule, weights: list[float]) -> None:
    with pytest.raises(OptimError, match="weights"):
        rule.combine(payloads_of(random_contributions(2), weights))


@each_rule
def test_malformed_payload_is_a_codec_error(rule: AggregationRule) -> None:
    members = payloads_of(random_contributions(2), [1, 1])
    with pytest.raises(CodecError):
        rule.combine([members[0], WeightedPayload(Uncompressed(), b"nonsense", 500, 1)])


@pytest.mark.parametrize(("k", "times"), [(16, 3), (2048, 6)])
def test_sparse_payloads_are_decoded_once_if_they_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, k: int, times: int
) -> None:
    codec, decoded = ChunkTopK(k=k), 0
    payloads = [codec.encode(torch.randn(8192, generator=torch.Generator().manual_seed(seed))) for seed in range(3)]
    # Levels have few bits: with equal weights, sums of three of them would sometimes be zero.
    weights = (1.0, 0.83, 0.71)
    members = [WeightedPayload(codec, payload, 8192, weight) for payload, weight in zip(payloads, weights, strict=True)]
    expected = Mean(clip=False).combine(members)
    read = ChunkTopK.decode_vector

    def counted(self: ChunkTopK, payload: Payload, numel: int) -> Vector:
        nonlocal decoded
        decoded += 1
        return read(self, payload, numel)

    monkeypatch.setattr(ChunkTopK, "decode_vector", counted)
    clipped = Mean(clip=True).combine(members)
    assert decoded == times
    assert np.count_nonzero(clipped) == np.count_nonzero(expected)


@each_rule
@pytest.mark.parametrize("codec", [ChunkTopK(), BlockInt8()], ids=str)
def test_lazy_combination_gives_the_same_bits(rule: AggregationRule, codec: Codec) -> None:
    held = payloads_of(random_contributions(5, SLAB_SIZE + 5_000), [1.0, 3.0, 0.0, 7.0, 2.0], codec)
    read = [replace(payload, payload=payload.decode()) for payload in held]
    for known in (held, read, [*read[:2], *held[2:]]):
        combined = rule.combine_lazily(known)
        assert combined.numel == SLAB_SIZE + 5_000
        assert combined.to_dense().tobytes() == rule.combine(held).tobytes()
        part = slice(4_000, SLAB_SIZE + 77)
        assert combined.decode_slab(part).tobytes() == rule.combine(held)[part].tobytes()


def test_only_sparse_vectors_that_fit_into_memory_are_combined_lazily() -> None:
    """Each of these has a quarter of the values, at three times the bytes of a value: only one fits."""

    def decoded_payloads(count: int) -> list[WeightedPayload]:
        held = payloads_of(random_contributions(count, 4096), [1.0] * count, ChunkTopK(k=1024))
        return [replace(payload, payload=payload.decode()) for payload in held]

    assert isinstance(decoded_payloads(1)[0].payload, SparseVector)
    assert not any(isinstance(rule.combine_lazily(decoded_payloads(1)), ArrayVector) for rule in (Mean(), SenderMean()))
    assert isinstance(Mean().combine_lazily(decoded_payloads(2)), ArrayVector), "the control: too many"
    assert isinstance(Mean().combine_lazily(payloads_of(random_contributions(2), [1.0] * 2)), ArrayVector), (
        "the control: dense"
    )
