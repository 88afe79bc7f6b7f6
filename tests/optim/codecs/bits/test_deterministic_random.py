import numpy as np
import pytest

from optim.codecs.bits.deterministic_random import FRACTION_UNIT, NoiseKey, noise_key
from optim.codecs.int_blocks import BlockInt8
from optim.kernels.vectors import Floats
from tests.optim.codecs.reference_codecs import noise_words

ROUND = 5
VALUES = np.random.default_rng(0).standard_normal(1000, np.float32)
KEY = noise_key(VALUES, ROUND)
HALVES = np.full(400, 0x3F80, np.uint16)


def fractions(key: NoiseKey = KEY, halves: np.typing.NDArray[np.uint16] = HALVES, block: int = 256) -> Floats:
    drawn: Floats = (noise_words(key, halves, block) >> np.uint32(8)).astype(np.float32) * FRACTION_UNIT
    return drawn


def test_noise_is_uniform() -> None:
    drawn = fractions()
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.histogram(drawn, 100, (0, 1))[0]
    # Chi squared with 99 degrees of freedom exceeds 150 once in a thousand.
    assert ((counts - 1024) ** 2 / 1024).sum() < 150


@pytest.mark.parametrize("distance", [1, 2, 16, 255, 256, 1024])
def test_noise_of_neighbours_is_uncorrelated(distance: int) -> None:
    drawn = fractions() - 0.5
    correlation = float((drawn[distance:] * drawn[:-distance]).mean() * 12)
    assert abs(correlation) < 5 / drawn.size**0.5


def test_every_bit_of_a_key_changes_half_of_a_word() -> None:
    words = noise_words(KEY, HALVES, 256)
    for bit in range(32):
        flip = np.uint32(1 << bit)
        for other in (NoiseKey(KEY.low ^ flip, KEY.high), NoiseKey(KEY.low, KEY.high ^ flip)):
            flipped = np.bitwise_count(words ^ noise_words(other, HALVES, 256)).mean()
            assert flipped == pytest.approx(16, abs=0.1), bit


def test_noise_depends_on_values_and_round_alone() -> None:
    assert noise_key(VALUES.copy(), 5) == KEY
    others = [noise_key(VALUES * 2, ROUND), noise_key(VALUES, 6), noise_key(VALUES, None)]
    assert len({KEY, *others}) == 4
    drawn = fractions()
    for other in [*map(fractions, others), fractions(halves=HALVES + np.uint16(1))]:
        assert (drawn == other).mean() < 0.01


def test_blocks_of_equal_values_draw_differently() -> None:
    codec = BlockInt8(rounding="stochastic")
    row = np.linspace(-1, 1, 256, dtype=np.float32)
    values = np.tile(row, 64)
    codes = np.frombuffer(codec.encode_array(values, subtract=False), np.int8)[2 + 2 * 64 :].reshape(64, 256)
    assert (codes[1:] == codes[0]).mean() < 0.8  # two draws between neighbours agree in two thirds on average
    control = np.frombuffer(BlockInt8().encode_array(values, subtract=False), np.int8)[2 + 2 * 64 :].reshape(64, 256)
    assert (control[1:] == control[0]).all()
