"""The compiled kernels of the dense codecs against plain operations on whole arrays: every byte and every bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.base import Codec
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.floats import BFloat16, Float16
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.sign import BlockSign
from optim.kernels.vectors import Floats
from tests.optim.codecs.reference_codecs import Encoded, encode_bfloat16, encode_blockwise, encode_float16

BLOCKWISE = [
    *(BlockInt8(block=16), BlockInt8(), BlockInt8(rounding="stochastic")),
    *(BlockInt4(block=24), BlockInt4(), BlockInt4(block=16, rounding="stochastic")),
    *(BlockE3M0(block=16), BlockE3M0(), BlockE3M0(rounding="stochastic")),
    *(BlockLloydMax(block=40), BlockLloydMax()),
    *(BlockSign(block=40), BlockSign(), BlockSign(block=16)),
]
PLAIN: list[tuple[Codec, Callable[[Floats], Encoded]]] = [
    (Float16(), encode_float16),
    (BFloat16(), encode_bfloat16),
    *((codec, lambda values, codec=codec: encode_blockwise(codec, values)) for codec in BLOCKWISE),
]
SPECIAL = np.array([0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 2.0**-118, -(2.0**-119), 2.0**46, -1e13, 1.5], np.float32)


@st.composite
def vectors(draw: st.DrawFn) -> Floats:
    """Draw vectors of any length and scale, some with numbers at the edges of rounding, sums or formats."""
    numel, seed = draw(st.integers(1, 3000)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    scale = draw(st.sampled_from([1e-42, 1e-36, 1e-20, 1e-3, 1.0, 1e6, 0.0]))
    values: Floats = (generator.standard_t(3, numel) * scale).astype(np.float32)
    if draw(st.booleans()):  # halves of steps, and steps
        values = np.rint(values / np.abs(values).max(initial=1e-44) * 254).astype(np.float32) / np.float32(2)
    fraction = draw(st.sampled_from([0, 0, 0.01, 0.5]))
    is_special = generator.random(numel) < fraction
    values[is_special] = generator.choice(SPECIAL[: draw(st.integers(1, SPECIAL.size))], is_special.sum())
    return values


@pytest.mark.parametrize(("codec", "plain"), PLAIN, ids=lambda value: str(value) if isinstance(value, Codec) else "")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(vectors(), st.sampled_from([1.0, -1.0, 0.37]))
def test_kernels_agree_with_plain_operations(
    codec: Codec, plain: Callable[[Floats], Encoded], values: Floats, weight: float
) -> None:
    expected = plain(values)
    rest = values.copy()
    assert codec.encode_and_subtract(torch.from_numpy(rest)) == expected.payload
    assert rest.tobytes() == (values - expected.decode()).tobytes()
    vector = codec.decode_vector(expected.payload, values.size)
    assert vector.to_dense().tobytes() == expected.decode().tobytes()
    total = np.linspace(-1, 1, values.size, dtype=np.float32)
    before = total.copy()
    vector.add_to(total, weight)
    assert total.tobytes() == (before + expected.decode(weight)).tobytes()
    start, stop = values.size // 3, values.size // 2 + 1
    assert vector.decode_slab(slice(start, stop)).tobytes() == expected.decode()[start:stop].tobytes()


@pytest.mark.parametrize("codec", [codec for codec, _ in PLAIN], ids=str)
@pytest.mark.parametrize("before", range(4))
def test_payload_is_decoded_at_any_address(codec: Codec, before: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(before))
    payload = bytes(codec.encode(values))
    padded = bytearray(before) + payload
    expected = codec.decode(payload, 1000)
    for form in (bytearray(payload), memoryview(padded)[before:], memoryview(bytes(padded))[before:]):
        assert torch.equal(codec.decode(form, 1000), expected)


def test_negative_control_another_order_of_summing_changes_bits() -> None:
    """The scale of the sign codec is a sum."""
    values = np.abs(np.random.default_rng(0).standard_normal(1024).astype(np.float32))
    folded, forwards = values, np.float32(0)
    while folded.size > 1:
        folded = folded[: folded.size // 2] + folded[folded.size // 2 :]
    for value in values:
        forwards += value
    assert folded[0] != forwards
