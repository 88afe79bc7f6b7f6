"""The compiled loops of the dense codecs against plain operations on whole arrays: every byte and every bit."""

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
from optim.codecs.sign import BlockSign
from optim.kernels.vectors import Floats
from tests.optim.codecs.reference_codecs import Encoded, blockwise, brain_float, half_precision

BLOCKWISE = [
    *(BlockInt8(block=16), BlockInt8(), BlockInt8(rounding="stochastic")),
    *(BlockInt4(block=24), BlockInt4(), BlockInt4(block=16, rounding="stochastic")),
    *(BlockE3M0(block=16), BlockE3M0(), BlockE3M0(rounding="stochastic")),
    *(BlockSign(block=40), BlockSign(), BlockSign(block=16)),
]
PLAIN: list[tuple[Codec, Callable[[Floats], Encoded]]] = [
    (Float16(), half_precision),
    (BFloat16(), brain_float),
    *((codec, lambda values, codec=codec: blockwise(codec, values)) for codec in BLOCKWISE),
]
SPECIAL = np.array([0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 2.0**-118, -(2.0**-119), 2.0**46, -1e13, 1.5], np.float32)


@st.composite
def vectors(draw: st.DrawFn) -> Floats:
    """Of any length and scale, some with the numbers where rounding, sums or formats have their edges."""
    numel, seed = draw(st.integers(1, 3000)), draw(st.integers(0, 2**32 - 1))
    generator = np.random.default_rng(seed)
    scale = draw(st.sampled_from([1e-42, 1e-36, 1e-20, 1e-3, 1.0, 1e6, 0.0]))
    values: Floats = (generator.standard_t(3, numel) * scale).astype(np.float32)
    if draw(st.booleans()):  # halves of steps, and steps
        values = np.rint(values / np.abs(values).max(initial=1e-44) * 254).astype(np.float32) / np.float32(2)
    share = draw(st.sampled_from([0, 0, 0.01, 0.5]))
    places = generator.random(numel) < share
    values[places] = generator.choice(SPECIAL[: draw(st.integers(1, SPECIAL.size))], places.sum())
    return values


@pytest.mark.parametrize(("codec", "plain"), PLAIN, ids=lambda value: str(value) if isinstance(value, Codec) else "")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(vectors(), st.sampled_from([1.0, -1.0, 0.37]))
def test_loops_agree_with_plain_operations(
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
def test_a_payload_is_read_wherever_it_lies(codec: Codec, before: int) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(before))
    payload = bytes(codec.encode(values))
    room = bytearray(before) + payload
    expected = codec.decode(payload, 1000)
    for form in (bytearray(payload), memoryview(room)[before:], memoryview(bytes(room))[before:]):
        assert torch.equal(codec.decode(form, 1000), expected)


def test_sums_in_another_order_would_have_been_seen() -> None:
    """The control of the codec of signs, whose scale is a sum."""
    values = np.abs(np.random.default_rng(0).standard_normal(1024).astype(np.float32))
    folded, forwards = values, np.float32(0)
    while folded.size > 1:
        folded = folded[: folded.size // 2] + folded[folded.size // 2 :]
    for value in values:
        forwards += value
    assert folded[0] != forwards
