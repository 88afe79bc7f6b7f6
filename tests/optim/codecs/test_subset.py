from typing import Literal

import numpy as np
import pytest
import torch

from optim.codecs.subset import VALUE_CODECS, RandomSubset, ValueCodec
from optim.layout import Layout

WHOLE = Layout(((640,),))


def draw(numel: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel, np.float32))


@pytest.mark.parametrize("inner", VALUE_CODECS)
@pytest.mark.parametrize("density", [2**-16, 0.01, 1 / 3, 0.9, 1.0])
@pytest.mark.parametrize("numel", [1, 2, 1000, 10_001])
def test_one_value_of_each_stretch_is_sent(inner: ValueCodec, density: float, numel: int) -> None:
    codec, values = RandomSubset(density=density, values=inner, shared=False), draw(numel, 1)
    vector = codec.decode_vector(codec.encode(values), numel)
    count = len(vector.positions)
    assert count == max(1, int(np.ceil(numel * density)))
    for j, position in enumerate(vector.positions.tolist()):
        assert j * numel // count <= position < (j + 1) * numel // count
    expected = VALUE_CODECS[inner].decode(VALUE_CODECS[inner].encode(values[vector.positions]), count)
    assert np.array_equal(vector.values, expected.numpy())


def test_positions_take_no_bytes() -> None:
    codec = RandomSubset(density=1 / 64, values="sign", shared=False)
    assert len(codec.encode(draw(64_000, 2))) == 10 + 2 + 2 + 125
    assert codec.bits_per_parameter(2**20) < 0.017
    shared = RandomSubset(density=1 / 64, values="sign").bind(WHOLE, 1)
    assert len(shared.encode(draw(64_000, 2))) == 2 + 2 + 2 + 125


def test_positions_are_spread_evenly_and_differ_between_contributions() -> None:
    numel, hits = 6400, np.zeros(6400)
    for seed in range(2000):
        codec = RandomSubset(density=1 / 64, shared=False)
        hits[codec.decode_vector(codec.encode(draw(numel, seed)), numel).positions] += 1
    assert hits.sum() == 2000 * 100
    # Poisson with mean 31: the variance of 6400 counts is known within a few percent.
    assert hits.var() == pytest.approx(hits.mean(), rel=0.1)
    assert hits.min() > 0


def test_same_values_have_the_same_subset_with_any_value_codec() -> None:
    values = draw(5000, 3)
    codecs = (RandomSubset(values="int8", shared=False), RandomSubset(values="fp16", shared=False))
    one, other = (codec.decode_vector(codec.encode(values), 5000).positions for codec in codecs)
    assert np.array_equal(one, other)


def test_positions_agree_with_a_slow_philox() -> None:
    """The slow Philox 4x64 with ten rounds is written from its definition."""
    codec = RandomSubset(density=1 / 64, shared=False)
    payload = codec.encode(draw(640, 4))
    seed = int.from_bytes(payload[2:10], "little")
    expected = [i * 64 + (word >> 32) * 64 // 2**32 for i, word in enumerate(philox(seed, 10))]
    assert codec.decode_vector(payload, 640).positions.tolist() == expected


def philox(seed: int, count: int) -> list[int]:
    words: list[int] = []
    for block in range(-(-count // 4)):
        counter, key = [block + 1, 0, 0, 0], [seed, 0]
        for _ in range(10):
            left, right = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [
                right >> 64 ^ counter[1] ^ key[0],
                right % 2**64,
                left >> 64 ^ counter[3] ^ key[1],
                left % 2**64,
            ]
            key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
        words += counter
    return words[:count]


def test_values_that_are_not_drawn_stay_in_the_residual() -> None:
    values = draw(1000, 5)
    rest = values.clone()
    codec = RandomSubset(density=0.1, values="fp16", shared=False)
    vector = codec.decode_vector(codec.encode_and_subtract(rest), 1000)
    untouched = np.ones(1000, bool)
    untouched[vector.positions] = False
    assert torch.equal(rest[untouched], values[untouched])
    assert float(rest[~untouched].abs().max()) < 0.01


def positions(codec: RandomSubset, round_number: int, seed: int, numel: int = 640) -> list[int]:
    """Return the positions that a member sends in a round; `seed` draws its values."""
    bound = codec.bind(WHOLE, round_number)
    found: list[int] = bound.decode_vector(bound.encode(draw(numel, seed)), numel).positions.tolist()
    return found


@pytest.mark.parametrize("selection", ["random", "striding"])
def test_all_members_send_the_same_positions_in_a_round(selection: Literal["random", "striding"]) -> None:
    codec = RandomSubset(density=1 / 16, selection=selection)
    assert positions(codec, 5, seed=0) == positions(codec, 5, seed=1)
    assert positions(codec, 5, seed=0) != positions(codec, 6, seed=0)
    # The control: members that draw separately do not.
    apart = RandomSubset(density=1 / 16, shared=False)
    assert positions(apart, 5, seed=0) != positions(apart, 5, seed=1)


@pytest.mark.parametrize("selection", ["random", "striding"])
def test_sum_of_contributions_with_shared_positions_is_as_sparse_as_one(
    selection: Literal["random", "striding"],
) -> None:
    codec = RandomSubset(density=1 / 16, values="bf16", selection=selection).bind(WHOLE, 3)
    total = np.zeros(640, np.float32)
    for seed in range(4):
        values = torch.from_numpy(np.random.default_rng(seed).integers(-9, 10, 640).astype(np.float32))
        codec.decode_vector(codec.encode(values), 640).add_to(total, 1.0)
    assert 0 < np.count_nonzero(total) <= 40
    assert np.array_equal(codec.decode(codec.encode(torch.from_numpy(total)), 640).numpy(), total)


def test_striding_sends_each_value_exactly_once_per_cycle() -> None:
    codec = RandomSubset(density=1 / 16, selection="striding")
    turns = [positions(codec, number, seed=0) for number in range(100, 116)]
    assert sorted(sum(turns, [])) == list(range(640))
    # The control: an offset that moves by the number of rows, as in the paper's public code, does not change.
    assert len({number * 640 % 16 for number in range(16)}) == 1


@pytest.mark.parametrize("numel", [1, 3, 15, 16, 17])
def test_striding_sends_a_value_of_the_shortest_vector(numel: int) -> None:
    for number in range(20):
        assert positions(RandomSubset(density=1 / 16, selection="striding"), number, 0, numel)


def test_shared_positions_need_a_round() -> None:
    with pytest.raises(ValueError, match="bind"):
        RandomSubset().encode(draw(640, 0))
    with pytest.raises(ValueError, match="set shared = true"):
        RandomSubset(selection="striding", shared=False)


def test_bits_per_parameter_need_no_round() -> None:
    for codec in (RandomSubset(), RandomSubset(density=0.01, selection="striding")):
        bound = codec.bind(WHOLE, 9)
        measured = 8 * len(bound.encode(draw(500_000, 1))) / 500_000
        assert codec.bits_per_parameter(500_000) == pytest.approx(measured, rel=0.01)
