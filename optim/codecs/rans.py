"""Range asymmetric numeral systems (arXiv 1311.2540): symbols to nearly their entropy in bits, in many lanes at once.

A lane is a number x in [2^16, 2^32). To push a symbol of frequency f and cumulative frequency c (of 2^12):

    if x >= f * 2^20: emit the low 16 bits of x, x <- x >> 16
    x <- (x // f) * 2^12 + x mod f + c

and a pop undoes it. Symbol i belongs to lane i mod lanes, so one step over all lanes is a few array operations. The
words of all lanes share one stream, in the order in which the decoder asks for them. Each lane starts with 16 bits of
other data ("carried") in place of a constant, so lanes cost nothing.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from optim.errors import CodecError

PRECISION = 12
TOTAL = 1 << PRECISION
SYMBOLS_PER_LANE = 96  # fewer lanes are slower, more would not find 16 bits each to carry

Symbols = npt.NDArray[np.uint8]
States = npt.NDArray[np.uint32]
Words = npt.NDArray[np.uint16]
Frequencies = npt.NDArray[np.uint32]  # one a symbol; they sum to TOTAL


def lanes_for(count: int) -> int:
    return -(-count // SYMBOLS_PER_LANE)


def encode(symbols: Symbols, frequencies: Frequencies, carried: Words) -> tuple[States, Words]:
    """The lanes and the stream of words. `carried`: one word a lane. Every symbol has a frequency above zero."""
    frequency = frequencies.astype(np.uint64)
    start = _starts(frequencies).astype(np.uint64)
    lanes = carried.astype(np.uint64) | np.uint64(1 << 16)
    emitted = []
    for step in reversed(list(_steps(symbols.size, lanes.size))):
        symbol = symbols[step]
        share, lane = frequency[symbol], lanes[: symbol.size]
        full = np.flatnonzero(lane >= share << np.uint64(32 - PRECISION))
        emitted.append(lane[full].astype(np.uint16))
        lane[full] >>= np.uint64(16)
        quotient = lane // share
        lane[:] = (quotient << np.uint64(PRECISION)) + (lane - quotient * share) + start[symbol]
    return lanes.astype(np.uint32), np.concatenate(emitted[::-1])


def decode(count: int, frequencies: Frequencies, lanes: States, words: Words) -> tuple[Symbols, Words]:
    """`count` symbols and the carried words. CodecError unless lanes and words end as an encoder would have begun."""
    if lanes.min() < 1 << 16:
        raise CodecError("an entropy coder's lane is out of range")
    kinds = np.arange(frequencies.size, dtype=np.uint8)
    symbol_at = np.repeat(kinds, frequencies)
    share_at = frequencies[symbol_at]
    offset_at = np.arange(TOTAL, dtype=np.uint32) - _starts(frequencies)[symbol_at]
    symbols = np.empty(count, np.uint8)
    lanes, position = lanes.astype(np.uint32), 0
    for step in _steps(count, lanes.size):
        lane = lanes[: step.stop - step.start]
        slot = lane & np.uint32(TOTAL - 1)
        symbols[step] = symbol_at[slot]
        lane >>= np.uint32(PRECISION)
        lane *= share_at[slot]
        lane += offset_at[slot]
        low = np.flatnonzero(lane < 1 << 16)
        if position + low.size > words.size:
            raise CodecError("the entropy-coded stream is too short")
        lane[low] = lane[low] << np.uint32(16) | words[position : position + low.size]
        position += low.size
    if position != words.size or (lanes >> np.uint32(16) != 1).any():
        raise CodecError("the entropy-coded stream does not end where it should")
    return symbols, lanes.astype(np.uint16)


def normalized(counts: npt.NDArray[np.int64]) -> Frequencies:
    """Frequencies that sum to TOTAL, at least one for every symbol that occurs (far fewer than TOTAL do)."""
    shares = np.maximum(counts * TOTAL // counts.sum(), counts > 0)
    shares[shares.argmax()] += TOTAL - shares.sum()
    frequencies: Frequencies = shares.astype(np.uint32)
    return frequencies


def _starts(frequencies: Frequencies) -> Frequencies:
    return (np.cumsum(frequencies) - frequencies).astype(np.uint32)


def _steps(count: int, lanes: int) -> Iterator[slice]:
    return (slice(first, min(first + lanes, count)) for first in range(0, count, lanes))
