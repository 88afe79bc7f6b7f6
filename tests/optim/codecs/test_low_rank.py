import numpy as np
import pytest
import torch

from optim.codecs.low_rank import FACTOR_CODECS, FactorCodec, LowRank
from optim.errors import CodecError
from optim.kernels.vectors import SLAB_SIZE, Floats
from optim.layout import Layout
from tests.optim.codecs.matrix_kernels import run_on_all_kernels

pytestmark = pytest.mark.slow

LAYOUT = Layout(((96, 128), (128,), (40, 8, 16), (4, 6), (300, 80)))
# Prints digests of a payload, of its decoded values, and, as the control, of the product in fp32.
PROGRAM = """
import hashlib, numpy as np, torch
from optim.codecs.low_rank import LowRank
from optim.layout import Layout
values = torch.from_numpy(np.random.default_rng(0).standard_normal(300 * 500, np.float32))
codec = LowRank(rank=16, values="fp16").bind(Layout(((300, 500),)), 1)
payload = codec.encode(values)
decoded = codec.decode_vector(payload, values.numel())
factors = np.random.default_rng(1).standard_normal((300, 16), np.float32), np.ones((16, 500), np.float32) / 3
plain = torch.from_numpy(factors[0]) @ torch.from_numpy(factors[1])
for result in (payload, decoded.to_dense().tobytes(), plain.numpy().tobytes()):
    print(hashlib.sha256(result).hexdigest())
"""


def draw(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel, np.float32))


def matrix_of_rank(rows: int, columns: int, spectrum: Floats) -> torch.Tensor:
    generator = np.random.default_rng(rows)
    left = np.linalg.qr(generator.standard_normal((rows, spectrum.size)))[0]
    right = np.linalg.qr(generator.standard_normal((columns, spectrum.size)))[0]
    return torch.from_numpy(((left * spectrum) @ right.T).astype(np.float32).ravel())


def error(codec: LowRank, values: torch.Tensor) -> float:
    return float((codec.decode(codec.encode(values), values.numel()) - values).norm() / values.norm())


@pytest.mark.parametrize(("inner", "limit"), [("fp16", 1e-3), ("int8", 0.012), ("int4", 0.2)])
def test_matrix_of_that_rank_loses_only_the_rounding_of_its_factors(inner: FactorCodec, limit: float) -> None:
    values = matrix_of_rank(200, 160, np.array([5, 3, 1, 0.5], np.float32))
    assert error(LowRank(rank=4, values=inner).bind(Layout(((200, 160),)), 0), values) < limit
    assert error(LowRank(rank=3, values=inner).bind(Layout(((200, 160),)), 0), values) > 0.08


def test_error_is_near_the_best_of_its_rank() -> None:
    spectrum = (1 / np.arange(1, 101)).astype(np.float32)
    values = matrix_of_rank(120, 150, spectrum)
    best = np.linalg.norm(spectrum[8:]) / np.linalg.norm(spectrum)
    found = error(LowRank(rank=8, values="fp16").bind(Layout(((120, 150),)), 0), values)
    assert best <= found < 1.1 * best


def test_decoded_matrices_have_at_most_the_rank() -> None:
    codec = LowRank(rank=5).bind(LAYOUT, 2)
    decoded = codec.decode(codec.encode(draw(LAYOUT.numel)), LAYOUT.numel).numpy()
    for index in (0, 2, 4):
        shape, (start, stop) = LAYOUT.shapes[index], LAYOUT.spans[index]
        strengths = np.linalg.svd(decoded[start:stop].reshape(shape[0], -1), compute_uv=False)
        assert strengths[4] > 0.1 and strengths[5] < 1e-5 * strengths[0]


@pytest.mark.parametrize("inner", FACTOR_CODECS)
def test_size_is_the_sum_of_the_factors_and_the_rest(inner: FactorCodec) -> None:
    codec = LowRank(rank=5, values=inner).bind(LAYOUT, 0)
    sides = (96, 128, 40, 128, 300, 80)
    factors = sum(FACTOR_CODECS[inner].max_bytes(5 * side) for side in sides)
    payload = codec.encode(draw(LAYOUT.numel))
    assert len(payload) == codec.max_bytes(LAYOUT.numel) == 2 + factors + (2 + 2 + 128 + 24)
    assert codec.bits_per_parameter(LAYOUT.numel) == 8 * len(payload) / LAYOUT.numel


def test_vectors_and_small_matrices_are_sent_as_integers() -> None:
    codec, values = LowRank(rank=5).bind(LAYOUT, 0), draw(LAYOUT.numel)
    decoded = codec.decode(codec.encode(values), LAYOUT.numel)
    for index in (1, 3):
        start, stop = LAYOUT.spans[index]
        assert float((decoded - values)[start:stop].norm() / values[start:stop].norm()) < 0.01


@pytest.mark.parametrize("numel", [1, 2, 3, 100, 10_000, 10_007, SLAB_SIZE + 12_345])
def test_vector_without_a_layout_is_one_matrix(numel: int) -> None:
    rows = np.random.default_rng(1).standard_normal(numel, np.float32)
    codec, values = LowRank(rank=2), torch.from_numpy(rows)
    rest = values.clone()
    vector = codec.decode_vector(codec.encode_and_subtract(rest), numel)
    assert np.array_equal(rest.numpy(), rows - vector.to_dense())
    assert rest.norm() < values.norm()
    for part in (slice(0, 1), slice(numel // 3, numel // 2), slice(numel - 1, numel)):
        assert np.array_equal(vector.decode_slab(part), vector.to_dense()[part])


def test_error_feedback_sends_all_directions_over_the_rounds() -> None:
    """Each round sends the strongest directions of the residual, so a matrix of full rank takes several rounds."""
    layout, rest = Layout(((64, 64),)), draw(64 * 64)
    start = rest.norm()
    for number in range(30):
        LowRank(rank=8).bind(layout, number).encode_and_subtract(rest)
    assert rest.norm() < 0.05 * start


def test_rounds_and_tensors_start_from_different_signs() -> None:
    layout, values = Layout(((60, 60), (60, 60))), draw(3600).repeat(2)
    payloads = [LowRank(rank=4).bind(layout, number).encode(values) for number in (1, 1, 2)]
    assert payloads[0] == payloads[1] != payloads[2]
    decoded = LowRank(rank=4).bind(layout, 1).decode(payloads[0], 7200)
    assert not torch.equal(decoded[:3600], decoded[3600:])


@pytest.mark.parametrize("values", [torch.zeros(3600), torch.ones(3600), torch.eye(60).ravel() * 1e13])
def test_matrices_of_lower_rank_are_decoded(values: torch.Tensor) -> None:
    codec = LowRank(rank=4, values="fp16").bind(Layout(((60, 60),)), 0)
    decoded = codec.decode(codec.encode(values), 3600)
    assert torch.isfinite(decoded).all() and decoded.norm() <= values.norm() * 1.001


def test_basis_with_too_large_entries_is_refused() -> None:
    codec = LowRank(rank=4).bind(Layout(((60, 60),)), 0)
    payload = bytearray(codec.encode(draw(3600)))
    payload[5] += 2  # the exponent of the first factor's first scale: 2^4 times as large
    with pytest.raises(CodecError, match="an entry of a basis"):
        codec.decode_vector(bytes(payload), 3600)


def test_vector_of_another_layout_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="bound to tensors of 3600"):
        LowRank().bind(Layout(((60, 60),)), 0).encode(torch.ones(100))


def test_all_matrix_kernels_give_the_same_bits() -> None:
    payload, decoded, plain = run_on_all_kernels(PROGRAM)
    assert len(payload) == len(decoded) == 1
    # The control: a sum that rounds differs between the kernels.
    assert len(plain) > 1


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.8, 2), (0.95, 3), (0.999, 4), (1.0, 12)])
def test_rank_adapts_to_the_matrix(energy: float, rank: int) -> None:
    """Strengths 4, 3, 2, 0.5: squares 16, 9, 4, 0.25 of 29.25, so 55 %, 85 %, 99 % and all."""
    values = matrix_of_rank(200, 160, np.array([4, 3, 2, 0.5], np.float32))
    layout = Layout(((200, 160),))
    codec = LowRank(rank=12, values="fp16", energy=energy).bind(layout, 0)
    fixed = LowRank(rank=rank, values="fp16").bind(layout, 0)
    payload = codec.encode(values)
    assert len(payload) == len(fixed.encode(values)) + (2 if energy < 1 else 0)
    left = float((codec.decode(payload, values.numel()) - values).norm() / values.norm()) ** 2
    assert left <= 1 - energy + 1e-4
    assert len(payload) <= codec.max_bytes(values.numel())


def test_rank_out_of_range_is_refused() -> None:
    codec = LowRank(rank=4, energy=0.9).bind(Layout(((60, 60),)), 0)
    payload = bytearray(codec.encode(draw(3600)))
    for rank in (0, 5, 60_000):
        payload[2:4] = rank.to_bytes(2, "little")
        with pytest.raises(CodecError, match="rank"):
            codec.decode_vector(bytes(payload), 3600)


def test_error_feedback_sends_all_directions_with_an_adaptive_rank() -> None:
    layout, rest = Layout(((64, 64),)), draw(64 * 64)
    start = rest.norm()
    for number in range(40):
        LowRank(rank=16, energy=0.7).bind(layout, number).encode_and_subtract(rest)
    assert rest.norm() < 0.05 * start
