from typing import Literal

import numpy as np
import pytest
import torch

from optim.codecs.dct_topk import TILE_SIZE, DctTopK, dct, inverse_dct
from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError
from optim.kernels.vectors import SLAB_SIZE
from optim.layout import Layout, Shape


def smooth(count: int) -> torch.Tensor:
    """Return tiles of a few low frequencies each, with a little noise."""
    generator = np.random.default_rng(0)
    spectrum = np.zeros((count, 64, 64), np.float32)
    spectrum[:, :6, :6] = generator.choice(np.array([-2, -1, 1, 2], np.float32), (count, 6, 6))
    noise = generator.standard_normal(count * TILE_SIZE, np.float32) * 1e-3
    return torch.from_numpy(inverse_dct(spectrum).ravel() + noise)


def error(codec: DctTopK | ChunkTopK, values: torch.Tensor) -> float:
    decoded = codec.decode(codec.encode(values), values.numel())
    return float((decoded - values).norm() / values.norm())


def test_smooth_values_need_few_coefficients_but_many_values() -> None:
    values = smooth(5)
    assert error(DctTopK(k=36), values) < 0.05
    assert error(ChunkTopK(k=36), values) > 0.8


@pytest.mark.parametrize("numel", [1, 4096, 4097, 10_000])
def test_keeping_all_coefficients_of_two_magnitudes_is_exact(numel: int) -> None:
    coefficients = np.random.default_rng(1).choice(np.array([-3, -1, 1, 3], np.float32), (3, 64, 64))
    values = torch.from_numpy(inverse_dct(coefficients).ravel()[: numel // TILE_SIZE * TILE_SIZE or TILE_SIZE].copy())
    assert error(DctTopK(k=TILE_SIZE), values) < 2e-6


def test_keeps_the_largest_coefficients_of_each_tile() -> None:
    values = torch.from_numpy(np.random.default_rng(2).standard_normal(3 * TILE_SIZE + 100, np.float32))
    codec = DctTopK(k=20)
    padded = np.pad(values.numpy(), (0, TILE_SIZE - 100)).reshape(-1, 64, 64)
    expected = np.sort(np.argsort(-np.abs(dct(padded).reshape(4, TILE_SIZE)), axis=1)[:, :20], axis=1)
    kept = ChunkTopK(k=20).decode_vector(codec.encode(values)[2:], 4 * TILE_SIZE)
    assert np.array_equal(kept.positions.reshape(4, 20) - np.arange(4)[:, None] * TILE_SIZE, expected)


def test_decoded_span_across_slabs_equals_the_whole() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(SLAB_SIZE + 5000, np.float32))
    vector = DctTopK().decode_vector(DctTopK().encode(values), values.numel())
    whole = vector.to_dense()
    for part in (slice(0, 10), slice(SLAB_SIZE - 5, SLAB_SIZE + 4100), slice(SLAB_SIZE + 4999, SLAB_SIZE + 5000)):
        assert np.array_equal(vector.decode_slab(part), whole[part])


def test_inner_payload_is_checked() -> None:
    payload = bytearray(DctTopK().encode(torch.ones(5000)))
    payload[2] ^= 1
    with pytest.raises(CodecError, match="expected"):
        DctTopK().decode_vector(bytes(payload), 5000)


LAYOUTS: list[tuple[Shape, ...]] = [
    ((128, 192), (192,), (64, 64)),
    ((96, 50), (7,), (3, 4, 5), (640,), (1,)),
    ((8, 40_000),),
    ((5000, 100), (100,), (131, 127)),
]


def draw(layout: Layout, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(layout.numel, np.float32))


@pytest.mark.parametrize("shapes", LAYOUTS, ids=str)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_tensors_are_cut_into_their_own_tiles(shapes: tuple[Shape, ...], dimensions: Literal[1, 2]) -> None:
    """A tensor whose only coefficient is in one tile, found by a loop over tiles, is restored from one kept value."""
    layout = Layout(shapes)
    codec = DctTopK(k=1, bits=1, dimensions=dimensions).bind(layout, 0)
    for shape, (start, stop) in layout.iter_tensors():
        rows, columns = (shape[0], int(np.prod(shape[1:]))) if len(shape) > 1 else (1, shape[0])
        height = max(side for side in range(1, 65) if rows % side == 0) if dimensions == 2 else 1
        width = max(side for side in range(1, 65) if columns % side == 0)
        coefficient = np.zeros((1, height, width), np.float32)
        coefficient[0, -1, -1] = 3
        matrix = np.zeros((rows, columns), np.float32)
        matrix[rows - height :, columns - width :] = inverse_dct(coefficient)[0]
        values = torch.zeros(layout.numel)
        values[start:stop] = torch.from_numpy(matrix.ravel())
        decoded = codec.decode(codec.encode(values), layout.numel)
        assert torch.allclose(decoded, values, atol=2e-6)


@pytest.mark.parametrize("shapes", LAYOUTS, ids=str)
def test_decoded_span_of_a_bound_codec_equals_the_whole(shapes: tuple[Shape, ...]) -> None:
    layout = Layout(shapes)
    codec, values = DctTopK(bits=3).bind(layout, 0), draw(layout)
    rest = values.clone()
    vector = codec.decode_vector(codec.encode_and_subtract(rest), layout.numel)
    whole = vector.to_dense()
    assert torch.equal(rest, values - torch.from_numpy(whole))
    for part in (slice(0, 3), slice(layout.numel // 3, layout.numel // 2), slice(layout.numel - 7, layout.numel)):
        assert np.array_equal(vector.decode_slab(part), whole[part])
    assert vector.norm() == pytest.approx(np.linalg.norm(whole), rel=1e-6)


def test_smooth_matrix_needs_the_shape_of_its_tensor() -> None:
    layout = Layout(((128, 256),))
    grid = np.cos(np.pi * (np.arange(128)[:, None] + 0.5) / 64) * np.cos(np.pi * (np.arange(256) + 0.5) / 64)
    values = torch.from_numpy(grid.astype(np.float32).ravel())
    codec = DctTopK(k=4)
    bound = codec.bind(layout, 0)
    assert float((bound.decode(bound.encode(values), values.numel()) - values).norm() / values.norm()) < 0.01
    # The control: each row of a tile has 64 neighbours of the flat vector.
    assert error(codec, values) > 0.1


def test_vector_of_another_layout_is_a_value_error() -> None:
    codec = DctTopK().bind(Layout(((64, 64),)), 0)
    with pytest.raises(ValueError, match="bound to tensors of 4096"):
        codec.encode(torch.ones(5000))


def test_small_tiles_share_the_coefficients_of_a_chunk() -> None:
    layout = Layout(((61,),) * 500)
    codec = DctTopK(k=64).bind(layout, 0)
    assert len(codec.decode_vector(codec.encode(draw(layout)), layout.numel).to_dense().nonzero()[0]) > 61
    assert 8 * len(codec.encode(draw(layout))) / layout.numel < 0.25
