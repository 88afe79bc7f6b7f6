import numpy as np
import pytest
import torch

from optim.codecs.cosine import TILE, forward, inverse
from optim.codecs.cosine_topk import CosineTopK
from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError
from optim.vectors import SLAB


def smooth(count: int) -> torch.Tensor:
    """Tiles of a few low frequencies each, with a little noise."""
    generator = np.random.default_rng(0)
    spectrum = np.zeros((count, 64, 64), np.float32)
    spectrum[:, :6, :6] = generator.choice(np.array([-2, -1, 1, 2], np.float32), (count, 6, 6))
    noise = generator.standard_normal(count * TILE, np.float32) * 1e-3
    return torch.from_numpy(inverse(spectrum, 2).ravel() + noise)


def error(codec: CosineTopK | ChunkTopK, values: torch.Tensor) -> float:
    decoded = codec.decode(codec.encode(values), values.numel())
    return float((decoded - values).norm() / values.norm())


def test_what_is_smooth_is_caught_where_top_k_of_the_values_misses_it() -> None:
    values = smooth(5)
    assert error(CosineTopK(k=36), values) < 0.05
    assert error(ChunkTopK(k=36), values) > 0.8


@pytest.mark.parametrize("numel", [1, 4096, 4097, 10_000])
def test_keeping_all_of_two_magnitudes_loses_nothing(numel: int) -> None:
    coefficients = np.random.default_rng(1).choice(np.array([-3, -1, 1, 3], np.float32), (3, 64, 64))
    values = torch.from_numpy(inverse(coefficients, 2).ravel()[: numel // TILE * TILE or TILE].copy())
    assert error(CosineTopK(k=TILE), values) < 2e-6


def test_keeps_the_largest_coefficients_of_each_tile() -> None:
    values = torch.from_numpy(np.random.default_rng(2).standard_normal(3 * TILE + 100, np.float32))
    codec = CosineTopK(k=20)
    padded = np.pad(values.numpy(), (0, TILE - 100)).reshape(-1, 64, 64)
    wanted = np.sort(np.argsort(-np.abs(forward(padded, 2).reshape(4, TILE)), axis=1)[:, :20], axis=1)
    kept = ChunkTopK(k=20).read(codec.encode(values)[2:], 4 * TILE)
    assert np.array_equal(kept.positions.reshape(4, 20) - np.arange(4)[:, None] * TILE, wanted)


def test_a_span_across_slabs_is_that_of_the_whole() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(SLAB + 5000, np.float32))
    vector = CosineTopK().read(CosineTopK().encode(values), values.numel())
    whole = vector.dense()
    for part in (slice(0, 10), slice(SLAB - 5, SLAB + 4100), slice(SLAB + 4999, SLAB + 5000)):
        assert np.array_equal(vector.span(part), whole[part])


def test_the_inner_payload_is_checked() -> None:
    payload = bytearray(CosineTopK().encode(torch.ones(5000)))
    payload[2] ^= 1
    with pytest.raises(CodecError, match="was agreed"):
        CosineTopK().read(bytes(payload), 5000)
