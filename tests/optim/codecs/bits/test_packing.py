import numpy as np
import pytest

from optim.codecs.bits.packing import Bytes, Integers, Packing, make_packing
from optim.errors import CodecError

BLOCK = 16


def join(layout: Packing, packed: Bytes, part: slice, codes: Integers) -> None:
    room = layout.code_buffers(packed, part)
    for own, span in zip(room, layout.spans(part), strict=True):
        own[:] = codes[span]
    layout.pack(packed, part, room)


@pytest.mark.parametrize("bits", [1, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 16, 17, 33, 100, 1000])
@pytest.mark.parametrize("slab", [16, 48, 4096])
def test_codes_come_back_from_any_span(bits: int, numel: int, slab: int) -> None:
    layout = make_packing(bits, numel, BLOCK)
    codes = np.random.default_rng(numel).integers(0, 1 << bits, numel).astype(np.uint8).view(np.int8)
    packed = np.full(layout.size, 0xFF, np.uint8)
    for part in layout.slabs(slab):
        join(layout, packed, part, codes)
    layout.check_padding(packed)
    for start in range(0, numel, BLOCK):
        for stop in {min(start + BLOCK, numel), numel}:
            out = np.full(stop - start, -1, np.int8)
            layout.unpack(packed, slice(start, stop), out)
            assert np.array_equal(out, codes[start:stop])


@pytest.mark.parametrize("numel", [1, 16, 17, 33, 1000])
def test_four_bits_stand_where_the_format_says(numel: int) -> None:
    layout = make_packing(4, numel, BLOCK)
    blocks = -(-numel // BLOCK)
    half = -(-blocks // 2) * BLOCK
    codes = np.random.default_rng(numel).integers(-7, 8, numel).astype(np.int8)
    packed = np.empty(layout.size, np.uint8)
    for part in layout.slabs(32):
        join(layout, packed, part, codes)
    expected = [0] * min(numel, half)
    for i, code in enumerate(codes.tolist()):
        expected[i % half] |= (code & 15) << (4 if i >= half else 0)
    assert packed.tolist() == expected


@pytest.mark.parametrize(("bits", "numel"), [(1, 9), (1, 15), (4, 1), (4, 16), (4, 40)])
def test_a_bit_that_belongs_to_no_value_is_refused(bits: int, numel: int) -> None:
    layout = make_packing(bits, numel, BLOCK)
    packed = np.zeros(layout.size, np.uint8)
    layout.check_padding(packed)
    packed[-1] |= 0x80
    with pytest.raises(CodecError, match="padding"):
        layout.check_padding(packed)
