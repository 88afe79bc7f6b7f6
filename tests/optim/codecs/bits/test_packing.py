import numpy as np
import pytest

from optim.codecs.bits.packing import Bytes, Integers, Packing, make_packing
from optim.errors import CodecError

BLOCK = 16


def pack_slab(packing: Packing, packed: Bytes, part: slice, codes: Integers) -> None:
    buffers = packing.code_buffers(packed, part)
    for own, span in zip(buffers, packing.spans(part), strict=True):
        own[:] = codes[span]
    packing.pack(packed, part, buffers)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [1, 7, 16, 17, 33, 100, 1000])
@pytest.mark.parametrize("slab", [16, 48, 4096])
def test_any_span_of_codes_survives_a_round_trip(bits: int, numel: int, slab: int) -> None:
    packing = make_packing(bits, numel, BLOCK)
    codes = np.random.default_rng(numel).integers(0, 1 << bits, numel).astype(np.uint8).view(np.int8)
    packed = np.full(packing.size, 0xFF, np.uint8)
    for part in packing.slabs(slab):
        pack_slab(packing, packed, part, codes)
    packing.check_padding(packed)
    for start in range(0, numel, BLOCK):
        for stop in {min(start + BLOCK, numel), numel}:
            out = np.full(stop - start, -1, np.int8)
            packing.unpack(packed, slice(start, stop), out)
            assert np.array_equal(out, codes[start:stop])


@pytest.mark.parametrize("numel", [1, 16, 17, 33, 1000])
def test_four_bit_codes_are_in_the_order_of_the_format(numel: int) -> None:
    packing = make_packing(4, numel, BLOCK)
    blocks = -(-numel // BLOCK)
    half = -(-blocks // 2) * BLOCK
    codes = np.random.default_rng(numel).integers(-7, 8, numel).astype(np.int8)
    packed = np.empty(packing.size, np.uint8)
    for part in packing.slabs(32):
        pack_slab(packing, packed, part, codes)
    expected = [0] * min(numel, half)
    for i, code in enumerate(codes.tolist()):
        expected[i % half] |= (code & 15) << (4 if i >= half else 0)
    assert packed.tolist() == expected


@pytest.mark.parametrize(("bits", "numel"), [(1, 9), (1, 15), (2, 5), (2, 7), (4, 1), (4, 16), (4, 40)])
def test_padding_that_is_not_zero_is_refused(bits: int, numel: int) -> None:
    packing = make_packing(bits, numel, BLOCK)
    packed = np.zeros(packing.size, np.uint8)
    packing.check_padding(packed)
    packed[-1] |= 0x80
    with pytest.raises(CodecError, match="padding"):
        packing.check_padding(packed)
