from math import comb

import numpy as np
import pytest

from optim.codecs.gaps import class_of, class_table, from_classes, plain_bits, plain_ends, uniform_frequencies


@pytest.mark.parametrize("span", [1, 2, 8, 9, 64, 100, 4096, 65_536])
def test_every_gap_comes_back(span: int) -> None:
    gaps = np.arange(span, dtype=np.uint16)
    classes = class_of(gaps)
    assert classes.max() < len(class_table(span)[0])
    bits = plain_bits(gaps, classes, span)
    ends = plain_ends(classes, span)
    assert bits.size == ends[-1]
    for first in (0, 3, 8):
        packed = np.packbits(np.concatenate([np.ones(first, np.uint8), bits]))
        assert np.array_equal(from_classes(classes, ends, packed, first, span), gaps)


@pytest.mark.parametrize(("span", "keep"), [(4096, 64), (4096, 4096), (4096, 1), (1000, 300), (7, 3), (1, 1)])
def test_uniform_frequencies_are_those_of_a_first_gap(span: int, keep: int) -> None:
    frequencies = uniform_frequencies(span, keep)
    counts = np.zeros(len(frequencies))
    for gap in range(span - keep + 1):
        counts[class_of(np.array([gap], np.uint16))[0]] += comb(span - 1 - gap, keep - 1) / comb(span, keep)
    assert ((frequencies > 0) >= (counts > 0)).all()
    assert np.abs(frequencies / 4096 - counts).max() < 0.01
