"""The mask of a contribution: what it leaves out, for each codec, and what bad ones come to."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.base import Codec
from optim.codecs.floats import Uncompressed
from optim.errors import CodecError
from optim.experts import TrainedExpertsCodec
from optim.layout import Layout
from tests.optim.codecs.test_base import CODECS

LAYOUT = Layout(((20, 30), *((8, 30),) * 6, (50,)), (0, *(1,) * 3, *(2,) * 3, 3), (-1, 0, 1, 2, 0, 1, 2, -1))
SPANS = LAYOUT.expert_spans
FLAGS = [(1, 1, 1, 1, 1, 1), (1, 0, 0, 1, 1, 0), (0, 1, 1, 1, 1, 0), (0, 0, 0, 0, 0, 0)]
USABLE = [codec for codec in CODECS if not codec.depends_on_round]
flags_of_experts = st.lists(st.booleans(), min_size=len(SPANS), max_size=len(SPANS))


def masked(codec: Codec, layout: Layout = LAYOUT, spans: Sequence[tuple[int, int]] = SPANS) -> TrainedExpertsCodec:
    return TrainedExpertsCodec(codec.bind(layout, 7), layout, tuple(spans))


def values_with(flags: Sequence[int], seed: int = 0) -> torch.Tensor:
    values = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed)) * 1e-3
    for (start, stop), is_sent in zip(SPANS, flags, strict=True):
        values[start:stop] *= is_sent
    return values


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("codec", USABLE, ids=repr)
def test_experts_that_are_zero_are_left_out_and_decode_to_zero(codec: Codec, flags: Sequence[int]) -> None:
    one, values = masked(codec), values_with(flags)
    left = values.clone()
    payload = one.encode_and_subtract(left)
    vector = one.decode_vector(bytes(payload), LAYOUT.numel)
    assert len(payload) <= one.max_bytes(LAYOUT.numel)
    assert vector.sent.tolist() == one.read_sent(payload).tolist() == [bool(flag) for flag in flags]
    decoded = torch.from_numpy(vector.to_dense())
    torch.testing.assert_close(decoded + left, values, rtol=1e-5, atol=1e-8)
    for (start, stop), is_sent in zip(SPANS, flags, strict=True):
        assert is_sent or not decoded[start:stop].any()
    assert torch.equal(torch.from_numpy(vector.decode_slab(slice(333, 1777))), decoded[333:1777])


def test_experts_that_are_left_out_cost_no_bytes() -> None:
    one = masked(Uncompressed())
    whole, some = (len(one.encode(values_with(flags))) for flags in FLAGS[:2])
    assert whole - some == 4 * 3 * 240


def test_a_part_of_experts_alone_may_be_empty() -> None:
    layout = Layout(((480,),))
    one = masked(Uncompressed(), layout, ((0, 240), (240, 480)))
    payload = bytes(one.encode(torch.zeros(480)))
    assert len(payload) == 8 and not one.decode(payload, 480).any()
    with pytest.raises(CodecError, match="4 bytes of values where no expert was sent"):
        one.decode(bytes(payload) + b"\0\0\0\0", 480)


def test_bits_beyond_the_last_expert_are_refused() -> None:
    payload = bytearray(masked(Uncompressed()).encode(values_with(FLAGS[0])))
    payload[2] |= 1 << len(SPANS)
    with pytest.raises(CodecError, match="bits for more experts than the 6 of this part"):
        masked(Uncompressed()).decode(bytes(payload), LAYOUT.numel)


@given(flags_of_experts, flags_of_experts)
def test_a_mask_that_does_not_fit_the_values_is_refused(flags: list[bool], claimed: list[bool]) -> None:
    """The control: the true mask is accepted. Experts have one size, so masks of as many bits fit as well."""
    one = masked(Uncompressed())
    payload = bytearray(one.encode(values_with(flags)))
    payload[2] = int(np.packbits(np.array(claimed), bitorder="little")[0])
    if sum(claimed) == sum(flags):
        assert one.decode_vector(bytes(payload), LAYOUT.numel).sent.tolist() == claimed
    else:
        with pytest.raises(CodecError):
            one.decode(bytes(payload), LAYOUT.numel)


@pytest.mark.parametrize("codec", USABLE, ids=repr)
@settings(deadline=None)  # the first call may compile a kernel
@given(data=st.data())
def test_hostile_bytes_are_refused_or_harmless(codec: Codec, data: st.DataObject) -> None:
    one = masked(codec)
    payload = bytearray(one.encode(values_with(FLAGS[1])))
    cut = data.draw(st.integers(0, len(payload)))
    for _ in range(data.draw(st.integers(0, 4))):
        payload[data.draw(st.integers(0, min(40, len(payload) - 1)))] = data.draw(st.integers(0, 255))
    try:
        decoded = one.decode(bytes(payload[: cut or None]), LAYOUT.numel)
    except CodecError:
        return
    assert decoded.shape == (LAYOUT.numel,) and decoded.isfinite().all()
