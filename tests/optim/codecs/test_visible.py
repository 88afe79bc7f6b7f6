"""Patches of bf16 weights: exact, small, and refused unless they are made for these weights."""

import struct

import numpy as np
import pytest
import torch

from optim.codecs.visible import _HEADER, apply_patch, encode_patch
from optim.errors import CodecError

SHARES = {0.01: 0.13, 0.03: 0.32, 0.1: 0.8, 0.5: 2.3}  # changed, and the most bits per value


def weights(count: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def moved(base: torch.Tensor, share: float, seed: int = 1) -> torch.Tensor:
    """Move a share of the values by one step of bf16, some by two or three, as a small learning rate does."""
    draws = np.random.default_rng(seed)
    bits = base.view(torch.int16).numpy().copy()
    chosen = draws.random(bits.size) < share
    steps = draws.choice([1, 2, 3], size=bits.size, p=[0.93, 0.06, 0.01]) * draws.choice([-1, 1], size=bits.size)
    bits[chosen] += steps[chosen].astype(np.int16)
    return torch.from_numpy(bits).view(torch.bfloat16)


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("share", SHARES)
def test_patch_is_exact_and_small(share: float) -> None:
    base = weights(200_000)
    new = moved(base, share)
    payload = encode_patch(base, new)
    assert equal_bits(apply_patch(base, payload), new)
    assert 8 * len(payload) / base.numel() < SHARES[share]


def test_every_bit_pattern_becomes_every_other() -> None:
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    base = patterns.view(torch.bfloat16)
    for order in (patterns.flip(0), patterns.roll(1), patterns[torch.randperm(2**16)]):
        new = order.contiguous().view(torch.bfloat16)  # zeros of both signs, infinities and NaNs among them
        assert equal_bits(apply_patch(base, encode_patch(base, new)), new)


@pytest.mark.parametrize("count", [0, 1, 2, 97, 1000])
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_small_vectors(count: int, share: float) -> None:
    base = weights(count)
    new = moved(base, share)
    assert equal_bits(apply_patch(base, encode_patch(base, new)), new)


def test_far_changes() -> None:
    base = weights(3_000_000)
    new = base.clone()
    new[[0, 5, 700_000, 2_999_999]] = 1.0
    payload = encode_patch(base, new)
    assert equal_bits(apply_patch(base, payload), new) and len(payload) < 2500


def test_patch_of_other_weights_is_refused() -> None:
    base = weights(1000)
    payload = encode_patch(base, moved(base, 0.1))
    with pytest.raises(CodecError, match="other weights"):
        apply_patch(weights(1000, seed=5), payload)
    with pytest.raises(CodecError, match="weights of this size"):
        apply_patch(weights(999), payload)
    with pytest.raises(CodecError, match="bf16"):
        apply_patch(base.float(), payload)


def test_no_damage_passes() -> None:
    """A byte that is changed, cut off or added is a CodecError or changes nothing; nothing else is raised."""
    base = weights(2000)
    new = moved(base, 0.05)
    payload, draws = encode_patch(base, new), np.random.default_rng(0)
    damaged = [payload[:size] for size in range(0, len(payload), 37)]
    for _ in range(300):
        place, bit = int(draws.integers(len(payload))), 1 << int(draws.integers(8))
        damaged.append(payload[:place] + bytes([payload[place] ^ bit]) + payload[place + 1 :])
    for each in damaged:
        try:
            assert equal_bits(apply_patch(base, each), new), "the digest of the result is checked"
        except CodecError:
            continue


def test_sizes_of_a_stranger_allocate_nothing() -> None:
    base = weights(100)
    values = list(_HEADER.unpack_from(encode_patch(base, moved(base, 0.5))))
    for place in range(4, 9):
        lie = [*values[:place], 2**32 - 1 if place > 4 else 2**40, *values[place + 1 :]]
        with pytest.raises(CodecError):
            apply_patch(base, _HEADER.pack(*lie) + bytes(5000))
    with pytest.raises(CodecError):
        apply_patch(base, struct.pack("<4s", b"MVP1"))
