"""Patches between two versions of bf16 weights: the positions whose bits changed, and by how many steps.

Between two updates of a trained model few bf16 values change, and those that do move to a neighbour (PULSE, arXiv
2602.03839). A step is a difference of bit patterns in the order of the values, so a patch is exact without any addition
of floats, and signs of zero and NaNs survive:

    place = bits ^ 0x8000 if the sign bit is clear, else ~bits;    step = place of the new value - place of the old one

Gaps between changed positions are classes with plain low bits (`gap_coding`, here up to 2^40), steps of -60 to 60 are
their own classes and others 16 plain bits. Classes are entropy-coded (`rans`) with frequencies that the patch counts.
The plain bits fill the beginnings of the coder's lanes as far as there are any.

    header   see `_HEADER`; digests of the weights before and after
    tables   frequencies of the gaps' and of the steps' classes, 16 bits each
    lanes    of the gaps, of the steps, 32 bits each; then both streams of 16-bit words, then the rest of the plain bits

A patch belongs to one base, and `apply_patch` checks digests of the base and of the result.
"""

import hashlib
import struct
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from optim.codecs.bits import rans
from optim.codecs.bits.gap_coding import CLASSES_PER_OCTAVE, DIRECT_CLASSES, check_frequencies
from optim.errors import CodecError

Patterns = npt.NDArray[np.uint16]
Positions = npt.NDArray[np.int64]
Symbols = npt.NDArray[np.uint8]

MAGIC: Final = b"MVP1"
DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct("<4s16s16sQQIIII")  # digests; values, changes; lanes and words of gaps and of steps
GAP_CLASSES: Final = 8 + 4 * 37  # gaps below 2^40
STEP_CLASSES: Final = 121  # -60 to 60 as 0 to 120; 60, no step at all, stands for 16 plain bits
LARGEST_STEP: Final = 60
MIN_LANES: Final = 64


def encode_patch(base: torch.Tensor, new: torch.Tensor) -> bytes:
    """Encode the change from `base` to `new`, both (n,) bf16 on the CPU."""
    old, fresh = _patterns(base), _patterns(new)
    if old.size != fresh.size:
        raise CodecError(f"the weights have {fresh.size} values, the base {old.size}")
    positions = np.flatnonzero(old != fresh)
    steps = (_places(fresh[positions]) - _places(old[positions])).astype(np.int32)
    gaps = np.diff(positions, prepend=-1) - 1
    gap_classes, widths = _classify(gaps)
    is_wide = np.abs(steps) > LARGEST_STEP
    step_classes = np.where(is_wide, LARGEST_STEP, steps + LARGEST_STEP).astype(np.uint8)
    plain = _pack(gaps, widths, (steps[is_wide] & 0xFFFF).astype(np.uint16))
    return _assemble(old, fresh, (gap_classes, step_classes), plain)


def apply_patch(base: torch.Tensor, payload: bytes) -> torch.Tensor:
    """Apply a patch to `base`, (n,) bf16 on the CPU. Raises CodecError if it is not a patch of these weights."""
    old = _patterns(base)
    header = _Header(payload, old.size)
    if header.base != _digest(old):
        raise CodecError("the patch belongs to other weights than these")
    gap_classes, step_classes, plain = header.decode(payload)
    gaps, wide = _unpack(gap_classes, int((step_classes == LARGEST_STEP).sum()), plain)
    if gaps.size and (gaps > old.size).any():
        raise CodecError("a position of the patch is outside the weights")
    positions = np.cumsum(gaps + 1) - 1
    if positions.size and positions[-1] >= old.size:
        raise CodecError("a position of the patch is outside the weights")
    steps = step_classes.astype(np.int32) - LARGEST_STEP
    steps[step_classes == LARGEST_STEP] = wide
    fresh = old.copy()
    fresh[positions] = _from_places(_places(old[positions]) + steps)
    if header.result != _digest(fresh):
        raise CodecError("the patch does not make the weights that it promises")
    return torch.from_numpy(fresh.view(np.int16)).view(torch.bfloat16)


class _Header:
    """The header of a patch for weights of `values` values. Raises CodecError unless its sizes fit them."""

    def __init__(self, payload: bytes, values: int) -> None:
        if len(payload) < _HEADER.size:
            raise CodecError("the patch is too short")
        magic, self.base, self.result, size, self.changes, *counts = _HEADER.unpack_from(payload)
        self.lanes, self.words = (counts[0], counts[2]), (counts[1], counts[3])
        if magic != MAGIC or size != values or self.changes > values:
            raise CodecError("it is not a patch for weights of this size")
        bounds = rans.lane_count(self.changes) + MIN_LANES, self.changes
        if max(self.lanes) > bounds[0] or max(self.words) > bounds[1] or (self.changes and not min(self.lanes)):
            raise CodecError("the sizes of the patch do not fit its changes")

    def decode(self, payload: bytes) -> tuple[Symbols, Symbols, bytes]:
        """Decode the classes of gaps and of steps; returns them with the plain bits."""
        if not self.changes:
            return np.empty(0, np.uint8), np.empty(0, np.uint8), payload[_HEADER.size :]
        place, pieces = _HEADER.size, list[npt.NDArray[np.uint32]]()
        lanes, words = self.lanes, self.words
        kinds = ("<u2", GAP_CLASSES), ("<u2", STEP_CLASSES), *(("<u4", n) for n in lanes), *(("<u2", n) for n in words)
        for kind, count in kinds:
            size = np.dtype(kind).itemsize * count
            if place + size > len(payload):
                raise CodecError("the patch is too short")
            pieces.append(np.frombuffer(payload, kind, count, place).astype(np.uint32))
            place += size
        for table in pieces[:2]:
            check_frequencies(table)
        (gaps, first), (steps, second) = (
            rans.decode(self.changes, pieces[i], pieces[2 + i], pieces[4 + i].astype(np.uint16)) for i in range(2)
        )
        return gaps, steps, first.astype("<u2").tobytes() + second.astype("<u2").tobytes() + payload[place:]


def _assemble(old: Patterns, fresh: Patterns, classes: tuple[Symbols, Symbols], plain: bytes) -> bytes:
    """Encode the classes of gaps and steps, with the plain bits in the beginnings of their lanes."""
    digests, changes = (_digest(old), _digest(fresh)), classes[0].size
    if not changes:
        return _HEADER.pack(MAGIC, *digests, old.size, 0, 0, 0, 0, 0)
    tables, lanes, words = list[bytes](), list[npt.NDArray[np.uint32]](), list[npt.NDArray[np.uint16]]()
    for symbols, kinds in zip(classes, (GAP_CLASSES, STEP_CLASSES), strict=True):
        frequencies = rans.normalize_counts(np.bincount(symbols, minlength=kinds).astype(np.int64))
        count = min(rans.lane_count(changes), max(MIN_LANES, len(plain) // 4))
        initial = np.frombuffer(plain[: 2 * count].ljust(2 * count, b"\0"), "<u2").astype(np.uint16)
        plain = plain[2 * count :]
        states, stream = rans.encode(symbols, frequencies, initial)
        tables.append(frequencies.astype("<u2").tobytes())
        lanes.append(states)
        words.append(stream)
    counts = lanes[0].size, words[0].size, lanes[1].size, words[1].size
    coded = [each.astype("<u4").tobytes() for each in lanes] + [each.astype("<u2").tobytes() for each in words]
    return b"".join((_HEADER.pack(MAGIC, *digests, old.size, changes, *counts), *tables, *coded, plain))


def _patterns(weights: torch.Tensor) -> Patterns:
    if weights.dtype != torch.bfloat16 or weights.dim() != 1:
        raise CodecError("the weights are not one vector of bf16")
    return weights.detach().contiguous().view(torch.int16).numpy().view(np.uint16)


def _places(patterns: Patterns) -> npt.NDArray[np.int32]:
    """Map bit patterns one to one to integers in the order of their values."""
    return np.where(patterns & 0x8000, ~patterns, patterns ^ 0x8000).astype(np.uint16).astype(np.int32)


def _from_places(places: npt.NDArray[np.int32]) -> Patterns:
    ordered = (places & 0xFFFF).astype(np.uint16)
    return np.where(ordered & 0x8000, ordered ^ 0x8000, ~ordered).astype(np.uint16)


def _classify(gaps: Positions) -> tuple[Symbols, Symbols]:
    """Find the class of each gap and the number of its low bits."""
    exponents = np.frexp(np.maximum(gaps, DIRECT_CLASSES).astype(np.float64))[1].astype(np.int64) - 3
    classes = np.where(gaps < DIRECT_CLASSES, gaps, CLASSES_PER_OCTAVE * exponents + (gaps >> exponents))
    return classes.astype(np.uint8), np.where(gaps < DIRECT_CLASSES, 0, exponents).astype(np.uint8)


def _widths_of(classes: Symbols) -> Symbols:
    return np.where(classes < DIRECT_CLASSES, 0, (classes - DIRECT_CLASSES) // CLASSES_PER_OCTAVE + 1).astype(np.uint8)


def _pack(gaps: Positions, widths: Symbols, wide: Patterns) -> bytes:
    """Pack the low bits of all gaps of one width after those of a smaller one, and then the wide steps."""
    pieces = [_bits_of(gaps[widths == width], int(width)) for width in np.unique(widths) if width]
    return np.packbits(np.concatenate([*pieces, _bits_of(wide.astype(np.int64), 16)])).tobytes()


def _bits_of(values: Positions, width: int) -> npt.NDArray[np.uint8]:
    shifts = np.arange(width - 1, -1, -1)
    return ((values[:, None] >> shifts) & 1).astype(np.uint8).reshape(-1)


def _unpack(classes: Symbols, wide_count: int, plain: bytes) -> tuple[Positions, npt.NDArray[np.int32]]:
    """Undo `_pack`; returns gaps and wide steps. Raises CodecError if bits are missing."""
    widths = _widths_of(classes)
    gaps = np.where(widths, (classes - CLASSES_PER_OCTAVE * widths).astype(np.int64) << widths, classes)
    needed = int(widths.sum(dtype=np.int64)) + 16 * wide_count
    if len(plain) * 8 < needed:
        raise CodecError("the patch is too short")
    bits, place = np.unpackbits(np.frombuffer(plain, np.uint8), count=needed), 0
    for width in (int(each) for each in np.unique(widths) if each):
        members = widths == width
        size = int(members.sum()) * width
        gaps[members] += _values_of(bits[place : place + size], width)
        place += size
    return gaps, _values_of(bits[place:], 16).astype(np.int32)


def _values_of(bits: npt.NDArray[np.uint8], width: int) -> Positions:
    weights = 1 << np.arange(width - 1, -1, -1)
    values: Positions = bits.reshape(-1, width).astype(np.int64) @ weights
    return values


def _digest(patterns: Patterns) -> bytes:
    return hashlib.blake2b(patterns.astype("<u2").tobytes(), digest_size=DIGEST_BYTES).digest()
