import numpy as np
import pytest

from optim.codecs.bits.rans import TOTAL, decode, encode, lane_count, normalize_counts
from optim.errors import CodecError


def draw(count: int, weights: list[float], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random symbols and initial words."""
    generator = np.random.default_rng(seed)
    probabilities = np.array(weights) / sum(weights)
    symbols = generator.choice(len(weights), count, p=probabilities).astype(np.uint8)
    return symbols, generator.integers(0, 2**16, lane_count(count)).astype(np.uint16)


@pytest.mark.parametrize("count", [1, 2, 95, 96, 97, 10_000])
@pytest.mark.parametrize("weights", [[1.0], [1, 1], [1, 1000], list(range(1, 60))])
def test_symbols_and_initial_words_survive_a_round_trip(count: int, weights: list[float]) -> None:
    symbols, initial_words = draw(count, weights)
    frequencies = normalize_counts(np.bincount(symbols, minlength=len(weights)))
    back, words = decode(count, frequencies, *encode(symbols, frequencies, initial_words))
    assert np.array_equal(back, symbols) and np.array_equal(words, initial_words)


@pytest.mark.parametrize("weights", [[1, 1000], [5, 3, 1], list(range(1, 60))])
def test_length_is_near_the_entropy(weights: list[float]) -> None:
    symbols, initial_words = draw(100_000, weights)
    counts = np.bincount(symbols, minlength=len(weights))
    probabilities = counts / symbols.size
    entropy = -(counts * np.log2(np.maximum(probabilities, 1e-12))).sum()
    lanes, words = encode(symbols, normalize_counts(counts), initial_words)
    # A lane has 32 bits, 16 of them from its initial word; 1 % is for frequencies rounded to 12 bits.
    assert 32 * lanes.size + 16 * words.size - 16 * initial_words.size < 1.01 * entropy + 16 * lanes.size


def test_damaged_stream_is_refused() -> None:
    symbols, initial_words = draw(5000, [5, 3, 1])
    frequencies = normalize_counts(np.bincount(symbols))
    lanes, words = encode(symbols, frequencies, initial_words)
    for damaged in (words[:-1], words[1:], np.append(words, np.uint16(1))):
        with pytest.raises(CodecError):
            decode(5000, frequencies, lanes, damaged)
    with pytest.raises(CodecError, match="range"):
        decode(5000, frequencies, lanes & np.uint32(0xFFFF), words)


@pytest.mark.parametrize("counts", [[1], [1, 0], [10**9, 1, 1, 0], [1] * 60, list(range(60))])
def test_frequencies_sum_to_the_total_and_include_every_symbol(counts: list[int]) -> None:
    frequencies = normalize_counts(np.array(counts))
    assert frequencies.sum() == TOTAL
    assert ((frequencies > 0) == (np.array(counts) > 0)).all()
