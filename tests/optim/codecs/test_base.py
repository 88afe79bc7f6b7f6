"""The promises of every codec."""

import os
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.base import Codec, PayloadWriter
from optim.codecs.dct_topk import DctTopK
from optim.codecs.e2m1 import BlockE2M1
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.floats import BFloat16, Float16, Uncompressed
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.low_rank import LowRank
from optim.codecs.random_projection import RandomProjection
from optim.codecs.residual_update import ResidualUpdate
from optim.codecs.sign import BlockSign
from optim.codecs.subset import RandomSubset
from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError
from optim.kernels.buffer_pool import MIN_POOLED_BYTES
from optim.kernels.parallel import ALIGNMENT
from optim.layout import Layout
from tests.slices import sliced

DIFFERENT: list[Codec] = [  # in their code or in the way through it
    Uncompressed(),
    Float16(),
    BFloat16(),
    BlockInt8(),
    BlockInt4(block=24),
    BlockE3M0(rounding="stochastic"),
    BlockE2M1(),
    BlockE2M1(rounding="stochastic"),
    BlockLloydMax(),
    BlockSign(),
    ChunkTopK(),
    ChunkTopK(k=5, chunk=100),
    ChunkTopK(k=40, chunk=64, bits=1),
    DctTopK(),
    RandomSubset(density=0.3, values="int4", shared=False),
    RandomSubset(density=0.1, selection="striding", values="fp16").bind(Layout(()), 7),
    LowRank(rank=4),
    LowRank(rank=6, energy=0.9),
    RandomProjection(directions=5),
]
VARIANTS: list[Codec] = [  # that differ from one of these by a number, or by two options that others have one by one
    BlockInt8(block=16),
    BlockInt8(block=1024, rounding="stochastic"),
    BlockInt4(),
    BlockInt4(rounding="stochastic"),
    BlockE3M0(),
    BlockSign(block=40),
    ChunkTopK(k=3, chunk=64),
    ChunkTopK(k=64, chunk=64),
    ChunkTopK(bits=3),
    ChunkTopK(k=7, chunk=64, bits=3),
    DctTopK(k=100, bits=3, dimensions=1),
    RandomSubset(shared=False),
    RandomSubset(density=1.0, values="sign", shared=False),
    RandomSubset().bind(Layout(()), 7),
    LowRank(rank=3, values="int8"),
    LowRank(rank=2, values="fp16"),
    RandomProjection(),
]
CODECS = [*DIFFERENT, *VARIANTS]
# The error of these may exceed the values; only the mean over many contributions is right.
UNBIASED = [
    codec
    for codec in CODECS
    if isinstance(codec, RandomProjection) or getattr(codec, "rounding", "nearest") == "stochastic"
]
GOLDEN = Path(__file__).parent.parent / "golden"
each_codec = pytest.mark.parametrize("codec", sliced(CODECS, len(DIFFERENT)), ids=str)
EXAMPLES = int(os.environ.get("MURMUR_EXAMPLES", "20"))  # 60 in `make nightly`
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
numels = st.integers(1, 9000)
seeds = st.integers(0, 2**32 - 1)


def sample(numel: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Return values like a pseudo-gradient's: heavy-tailed, some of them zero, in chunks of different scale."""
    generator = np.random.default_rng(seed)
    values = generator.standard_t(3, numel) * generator.lognormal(0, 1, numel) * (generator.random(numel) > 0.1)
    return torch.from_numpy((values * scale).astype(np.float32))


@each_codec
@quick
@given(numels, seeds, st.sampled_from([1e-30, 1e-8, 1e-3, 1.0, 1e6, 0.0]))
def test_decoded_values_are_finite_and_near_the_input(codec: Codec, numel: int, seed: int, scale: float) -> None:
    values = sample(numel, seed, scale)
    decoded = codec.decode(codec.encode(values), numel)
    assert decoded.shape == values.shape and decoded.dtype == torch.float32
    assert torch.isfinite(decoded).all()
    if codec not in UNBIASED:
        assert torch.linalg.vector_norm(values - decoded) <= torch.linalg.vector_norm(values) * (1 + 1e-6)


@each_codec
@quick
@given(numels, seeds)
def test_payload_is_deterministic_and_within_the_maximum_size(codec: Codec, numel: int, seed: int) -> None:
    values = sample(numel, seed)
    payload = codec.encode(values)
    assert len(payload) <= codec.max_bytes(numel)
    assert payload == codec.encode(values.clone())


@each_codec
@quick
@given(numels, seeds)
def test_encode_and_subtract_leaves_exactly_the_part_that_was_not_sent(codec: Codec, numel: int, seed: int) -> None:
    values = sample(numel, seed)
    rest = values.clone()
    payload = codec.encode_and_subtract(rest)
    assert payload == codec.encode(values)
    assert torch.equal(rest, values - codec.decode(payload, numel))


@each_codec
@pytest.mark.parametrize("numel", [1, 4096, 70_001])
def test_encode_updated_agrees_with_a_separate_update(codec: Codec, numel: int) -> None:
    """Each product and each sum is rounded, wherever a codec computes them."""
    left, new = sample(numel, 1), sample(numel, 2)
    expected, decay = left * 0.8, ResidualUpdate(0.8, left.numpy())
    expected += new
    before = left.clone()
    assert codec.encode_updated(decay, new) == codec.encode_and_subtract(expected)
    assert torch.equal(new, expected) and torch.equal(left, before)


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 2.0**60])
def test_update_must_be_finite_and_within_bounds(codec: Codec, bad: float) -> None:
    new = sample(5000, 2)
    new[1234] = bad
    with pytest.raises(CodecError):
        codec.encode_updated(ResidualUpdate(0.8, sample(5000, 1).numpy()), new)


@each_codec
def test_threads_change_no_bit(codec: Codec) -> None:
    values = sample(300_000, 1)
    threads = torch.get_num_threads()
    payloads = set()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        payloads.add(bytes(codec.encode(values)))
    torch.set_num_threads(threads)
    assert len(payloads) == 1


@each_codec
def test_payload_keeps_its_memory_while_it_is_referenced(codec: Codec) -> None:
    """Its memory is reused once the payload is dropped, not before."""
    payload = codec.encode(sample(300_000, 1))
    before, others = bytes(payload), [codec.encode(sample(300_000, seed)) for seed in range(2, 8)]
    assert payload == before and others[0] != before
    with pytest.raises(TypeError):
        payload[0] = 0  # type: ignore[index]


@pytest.mark.parametrize("header", [b"ab", b"abc", b"a" * 70])
def test_payload_is_written_in_place_after_its_header(header: bytes) -> None:
    count = MIN_POOLED_BYTES
    writer = PayloadWriter(header, 4 * count + 3)
    numbers, rest = writer.reserve("f4", count), writer.reserve("u1", 3)
    numbers[:], rest[:] = np.arange(count), (7, 8, 9)
    assert numbers.ctypes.data % ALIGNMENT == 0
    assert writer.payload == header + np.arange(count, dtype="<f4").tobytes() + bytes((7, 8, 9))


@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
@pytest.mark.parametrize("place", [0, 4095, 4999])
def test_values_that_are_not_finite_are_refused(codec: Codec, bad: float, place: int) -> None:
    values = sample(5000, 2)
    values[place] = bad
    before = values.clone()
    with pytest.raises(CodecError):
        codec.encode(values)
    assert torch.equal(values.nan_to_num(7), before.nan_to_num(7))
    with pytest.raises(CodecError):
        codec.encode_and_subtract(values)


@each_codec
def test_other_lengths_codecs_and_truncations_are_refused(codec: Codec) -> None:
    payload = bytes(codec.encode(sample(5000, 3)))
    wrong = [payload[:cut] for cut in range(0, len(payload), max(1, len(payload) // 97))]
    wrong += [payload + b"\0", payload + payload, b"", b"\xff" * len(payload), b"\0" * len(payload)]
    for bytes_ in wrong:
        with pytest.raises(CodecError):
            codec.decode_vector(bytes_, 5000)
    for other in CODECS:
        if other.number != codec.number:
            with pytest.raises(CodecError):
                other.decode_vector(payload, 5000)
    for numel in (1, 4096, 9000):
        with pytest.raises(CodecError):
            codec.decode_vector(payload, numel)


@st.composite
def mutations(draw: st.DrawFn, payload: bytes) -> bytes:
    kind = draw(st.sampled_from(["flip", "cut", "splice", "random", "insert"]))
    place = draw(st.integers(0, len(payload) - 1))
    if kind == "flip":
        return payload[:place] + bytes([payload[place] ^ draw(st.integers(1, 255))]) + payload[place + 1 :]
    if kind == "cut":
        return payload[:place]
    if kind == "splice":
        other = draw(st.integers(0, len(payload) - 1))
        return payload[:place] + payload[other:]
    noise = draw(st.binary(min_size=1, max_size=64))
    return payload[:place] + noise + payload[place + (len(noise) if kind == "random" else 0) :]


@each_codec
@settings(max_examples=200 * EXAMPLES // 60, deadline=None, derandomize=True)
@given(st.data())
def test_hostile_bytes_are_refused_or_harmless(codec: Codec, data: st.DataObject) -> None:
    payload = bytes(codec.encode(sample(1000, 4)))
    hostile = data.draw(mutations(payload))
    try:
        decoded = codec.decode(hostile, 1000)
    except CodecError:
        return
    assert decoded.shape == (1000,) and torch.isfinite(decoded).all()
    assert decoded.abs().max() < 2.0**55


@each_codec
def test_payload_cannot_cause_a_large_allocation(codec: Codec) -> None:
    header = bytes(codec.encode(sample(1000, 5))[:2])
    tracemalloc.start()
    for seed in range(200):
        hostile = header + np.random.default_rng(seed).bytes(600)
        with pytest.raises(CodecError):
            codec.decode_vector(hostile, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


# An adaptive rank finds the strongest directions with LAPACK, whose last bits depend on the machine.
LOOSE = (BlockInt8(block=16), ChunkTopK(k=5, chunk=100), LowRank(rank=6, energy=0.9))
PINNED = [codec for codec in CODECS if codec not in LOOSE]


@pytest.mark.parametrize("codec", PINNED, ids=str)
def test_golden_files_pin_the_wire_format(codec: Codec) -> None:
    """Run with WRITE_GOLDEN=1 after a change of the format, which also needs a new version number."""
    # These values are exact in fp32 on any machine; a sine would not be.
    numel = 18_000 if codec == ChunkTopK() else 1000
    values = (torch.arange(numel) * 7919 % 1009 - 504).float().mul(2.0**-20)
    if codec == ChunkTopK():
        for start in range(0, 4 * 4096, 4096):  # runs, whose gaps need a table of frequencies
            values[start : start + 64] = torch.arange(64) - 31.5
    payload = codec.encode(values)
    path = GOLDEN / (re.sub(r"\W+", "-", str(codec)).strip("-") + ".bin")
    if os.environ.get("WRITE_GOLDEN"):
        path.write_bytes(payload)
    golden = path.read_bytes()
    assert payload[:2] == golden[:2]
    assert torch.equal(codec.decode(golden, numel), codec.decode(payload, numel))
    assert payload == golden


@each_codec
def test_bits_per_parameter_agrees_with_encoded_bytes(codec: Codec) -> None:
    values = torch.from_numpy(np.random.default_rng(9).standard_normal(100_000, np.float32))
    measured = 8 * len(codec.encode(values)) / values.numel()
    assert codec.bits_per_parameter(100_000) == pytest.approx(measured, rel=0.02)


@each_codec
def test_unsuitable_tensor_is_a_value_error(codec: Codec) -> None:
    for tensor in (torch.zeros(4, 4), torch.zeros(8, dtype=torch.float64), torch.zeros(8)[::2], torch.zeros(0)):
        with pytest.raises(ValueError, match="codec needs|nothing to encode"):
            codec.encode(tensor)
