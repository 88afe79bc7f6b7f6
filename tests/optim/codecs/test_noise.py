import numpy as np

from optim.codecs.codec import Binding
from optim.codecs.noise import FRACTION, words
from optim.layout import Layout

SCALES = np.array([1, 2, 3], np.float32)
ROUND = Binding(Layout(()), 5)


def test_is_even() -> None:
    drawn = (words(SCALES, 0, 100_000, ROUND) >> np.uint32(8)).astype(np.float32) * FRACTION
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.histogram(drawn, 100, (0, 1))[0]
    # Chi squared with 99 degrees of freedom: 150 is passed once in a thousand.
    assert ((counts - 1000) ** 2 / 1000).sum() < 150


def test_the_same_message_has_the_same_noise_and_no_other_has() -> None:
    first = words(SCALES, 0, 48, ROUND)
    assert np.array_equal(first, words(SCALES.copy(), 0, 48, Binding(Layout(((1,),)), 5)))
    others = [
        words(SCALES, 1, 48, ROUND),
        words(SCALES * 2, 0, 48, ROUND),
        words(SCALES, 0, 48, Binding(Layout(()), 6)),
        words(SCALES, 0, 48, None),
    ]
    assert all((first == other).mean() < 0.1 for other in others)
