from math import comb

import numpy as np
import pytest

from optim.codecs.bits.gap_coding import class_lookup, class_table, classify_gaps, compute_gaps, uniform_frequencies


@pytest.mark.parametrize("span", [1, 2, 8, 9, 64, 100, 4096, 65_536])
def test_every_gap_is_the_lowest_of_its_class_plus_its_bits(span: int) -> None:
    gaps = np.arange(span)
    classes = class_lookup(span)
    lowest, widths = class_table(span)
    assert classes.max() < len(lowest)
    assert (gaps >= lowest[classes]).all() and (gaps - lowest[classes] < 1 << widths[classes].astype(np.int64)).all()


@pytest.mark.parametrize(
    ("chunks", "span", "keep", "rest"), [(1, 1, 1, 0), (5, 100, 7, 3), (3, 64, 64, 5), (1, 9, 2, 0)]
)
def test_gaps_are_between_the_indices_of_a_chunk(chunks: int, span: int, keep: int, rest: int) -> None:
    generator = np.random.default_rng(span)
    rows = [np.sort(generator.choice(span, kept, replace=False)) for kept in [keep] * chunks + [rest] * (rest > 0)]
    indices = np.concatenate(rows).astype(np.uint32)
    gaps, classes, counts = np.empty(indices.size, np.uint16), np.empty(indices.size, np.uint8), np.zeros(60, np.int64)
    compute_gaps(indices, keep, class_lookup(span), gaps, classes, counts)
    expected = np.concatenate([np.diff(row, prepend=-1) - 1 for row in rows])
    assert np.array_equal(gaps, expected)
    assert np.array_equal(classes, classify_gaps(expected.astype(np.uint16)))
    assert np.array_equal(counts, np.bincount(classes, minlength=60))


@pytest.mark.parametrize(("span", "keep"), [(4096, 64), (4096, 4096), (4096, 1), (1000, 300), (7, 3), (1, 1)])
def test_uniform_frequencies_agree_with_those_of_a_first_gap(span: int, keep: int) -> None:
    frequencies = uniform_frequencies(span, keep)
    counts = np.zeros(len(frequencies))
    for gap in range(span - keep + 1):
        counts[classify_gaps(np.array([gap], np.uint16))[0]] += comb(span - 1 - gap, keep - 1) / comb(span, keep)
    assert ((frequencies > 0) >= (counts > 0)).all()
    assert np.abs(frequencies / 4096 - counts).max() < 0.01
