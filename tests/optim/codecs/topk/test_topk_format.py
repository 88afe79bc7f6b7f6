import numpy as np
import numpy.typing as npt
import pytest

from optim.codecs.bits.gap_coding import class_lookup, class_table, compute_gaps
from optim.codecs.topk_format import READ_AHEAD_BYTES, count_low_bits, read_bit_planes, write_bit_planes

Codes = npt.NDArray[np.uint32]


def write(codes: Codes, bits: int, span: int, keep: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], int]:
    """Return the bytes with readable ones after them, the classes, and the number of bits written."""
    gaps, classes = np.empty(codes.size, np.uint16), np.empty(codes.size, np.uint8)
    compute_gaps(codes >> np.uint32(3), keep, class_lookup(span), gaps, classes, np.zeros(60, np.int64))
    length = bits * codes.size + count_low_bits(classes, class_table(span)[1])
    packed = np.zeros(-(-length // 8) + READ_AHEAD_BYTES, np.uint8)
    write_bit_planes(codes, bits, gaps, classes, class_table(span)[1], packed)
    return packed, classes, length


def draw(chunks: int, span: int, keep: int, bits: int) -> Codes:
    generator = np.random.default_rng(span + bits)
    indices = np.concatenate([np.sort(generator.choice(span, keep, replace=False)) for _ in range(chunks)])
    numbers = generator.integers(0, 1 << bits - 1, indices.size)
    return (indices << 3 | generator.integers(0, 2, indices.size) << 2 | numbers).astype(np.uint32)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize(
    ("chunks", "span", "keep"), [(1, 1, 1), (1, 64, 64), (7, 100, 3), (5, 4096, 64), (1, 65_536, 2), (3, 65_536, 1)]
)
def test_codes_survive_a_round_trip(chunks: int, span: int, keep: int, bits: int) -> None:
    codes = draw(chunks, span, keep, bits)
    packed, classes, _ = write(codes, bits, span, keep)
    back = np.empty_like(codes)
    last = read_bit_planes(packed, bits, classes, *class_table(span), span, keep, back)
    assert np.array_equal(back, codes)
    assert last == codes[-1] >> 3


def test_bits_are_in_the_order_of_the_format() -> None:
    codes = np.array([5 << 3 | 4 | 1, 40 << 3 | 2, 47 << 3 | 4 | 3], np.uint32)
    packed, classes, length = write(codes, 3, 64, 3)
    # Signs, low bits, high bits; gap 34 is 32 plus 2 of 8, gaps 5 and 6 are classes of their own.
    assert classes[0] == 5 and classes[2] == 6
    assert f"{int.from_bytes(packed):0{8 * packed.size}b}"[:length] == "101" + "101" + "011" + "010"


def test_index_beyond_its_chunk_is_detected() -> None:
    """In the last chunk, which may be short, the caller detects it."""
    codes = draw(4, 100, 5, 2)
    packed, classes, _ = write(codes, 2, 100, 5)
    back = np.empty_like(codes)
    farthest = (codes >> np.uint32(3)).reshape(4, 5)[:, -1]
    assert read_bit_planes(packed, 2, classes, *class_table(100), int(farthest[:3].max()), 5, back) < 0
    assert read_bit_planes(packed, 2, classes, *class_table(100), int(farthest[:3].max()) + 1, 5, back) == farthest[3]
