"""Range asymmetric numeral systems (arXiv 1311.2540): symbols in nearly their entropy of bits, in many lanes at once.

A lane is a number x in [2^16, 2^32). To push a symbol of frequency f and cumulative frequency c (of 2^12):

    if x >= f * 2^20: emit the low 16 bits of x, x <- x >> 16
    x <- (x // f) * 2^12 + x mod f + c

and a pop undoes it. Symbol i belongs to lane i mod lanes, so one step over all lanes is a few array operations. The
words of all lanes share one stream, in the order in which the decoder needs them. Each lane starts with 16 bits of
other data ("initial words") instead of a constant, so lanes cost nothing.
"""

import numpy as np
import numpy.typing as npt

from optim.errors import CodecError
from optim.kernels.jit import kernel

PRECISION = 12
TOTAL = 1 << PRECISION
WORD_BITS, LOW_WORD = np.uint32(16), np.uint32(0xFFFF)
PRECISION_SHIFT, RENORM_SHIFT = np.uint32(PRECISION), np.uint32(32 - PRECISION)
SYMBOLS_PER_LANE = 96  # fewer lanes are slower; more would lack 16 bits of other data each

Symbols = npt.NDArray[np.uint8]
States = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint16]
Frequencies = npt.NDArray[np.uint32]  # per symbol; they sum to TOTAL


def lane_count(count: int) -> int:
    return -(-count // SYMBOLS_PER_LANE)


def encode(symbols: Symbols, frequencies: Frequencies, initial_words: Words) -> tuple[States, Words]:
    """Return the lanes and the stream of words.

    Args:
        symbols: each has a frequency above zero.
        frequencies: the frequency of each symbol.
        initial_words: one word per lane.
    """
    lanes = initial_words.astype(np.uint32) | np.uint32(1 << 16)
    words = np.empty(symbols.size, np.uint16)
    first = _encode_lanes(symbols, frequencies, _cumulative(frequencies), lanes, words)
    return lanes, words[first:]


@kernel
def _encode_lanes(symbols: Symbols, frequencies: Frequencies, starts: Frequencies, lanes: States, words: Words) -> int:
    """Encode from the last symbol to the first, with at most one word each, and write words from the end on.

    Returns the position of the first word.
    """
    position = words.size
    for first in range((symbols.size - 1) // lanes.size * lanes.size, -1, -lanes.size):
        for lane in range(min(lanes.size, symbols.size - first) - 1, -1, -1):
            symbol, state = symbols[first + lane], lanes[lane]
            frequency = frequencies[symbol]
            words[position - 1] = state & LOW_WORD  # always written: a branch could not be predicted
            large = state >= frequency << RENORM_SHIFT
            position -= int(large)
            state = np.uint32(state >> WORD_BITS) if large else state
            quotient = state // frequency
            lanes[lane] = (quotient << PRECISION_SHIFT) + (state - quotient * frequency) + starts[symbol]
    return position


def decode(count: int, frequencies: Frequencies, lanes: States, words: Words) -> tuple[Symbols, Words]:
    """Return `count` symbols and the initial words.

    Raises:
        CodecError: lanes or words do not end as an encoder would have begun.
    """
    if lanes.min() < 1 << 16:
        raise CodecError("an entropy coder's lane is out of range")
    kinds = np.arange(frequencies.size, dtype=np.uint8)
    symbol_at = np.repeat(kinds, frequencies)
    offset_at = np.arange(TOTAL, dtype=np.uint32) - _cumulative(frequencies)[symbol_at]
    symbols = np.empty(count, np.uint8)
    lanes = lanes.astype(np.uint32)
    read = _decode_lanes(
        lanes, np.append(words, LOW_WORD).astype(np.uint16), symbol_at, frequencies[symbol_at], offset_at, symbols
    )
    if read > words.size:
        raise CodecError("the entropy-coded stream is too short")
    if read < words.size or (lanes >> np.uint32(16) != 1).any():
        raise CodecError("the entropy-coded stream does not end where it should")
    return symbols, lanes.astype(np.uint16)


@kernel
def _decode_lanes(
    lanes: States, words: Words, symbol_at: Symbols, frequency_at: Frequencies, offset_at: Frequencies, symbols: Symbols
) -> int:
    """Write the symbols and return the number of words read.

    The last word is not part of the stream; it is read in place of all missing ones.
    """
    size, step = np.uint64(symbols.size), np.uint64(lanes.size)
    position, last = np.uint64(0), np.uint64(words.size - 1)
    for first in range(np.uint64(0), size, step):
        for lane in range(min(step, size - first)):
            state = lanes[lane]
            slot = state & np.uint32(TOTAL - 1)
            symbols[first + lane] = symbol_at[slot]
            state = np.uint32((state >> PRECISION_SHIFT) * frequency_at[slot] + offset_at[slot])
            word, small = words[min(position, last)], state <= LOW_WORD  # always read: a branch could not be predicted
            lanes[lane] = np.uint32(state << WORD_BITS | word) if small else state
            position += np.uint64(small)
    return int(position)


def normalize_counts(counts: npt.NDArray[np.int64]) -> Frequencies:
    """Return frequencies that sum to TOTAL, at least one for every symbol that occurs (far fewer than TOTAL do)."""
    scaled = np.maximum(counts * TOTAL // counts.sum(), counts > 0)
    scaled[scaled.argmax()] += TOTAL - scaled.sum()
    frequencies: Frequencies = scaled.astype(np.uint32)
    return frequencies


def _cumulative(frequencies: Frequencies) -> Frequencies:
    return (np.cumsum(frequencies) - frequencies).astype(np.uint32)
