"""AdamW whose moments take 8 bits a value, in blocks of 256 values with a common scale (arXiv 2110.02861).

The scale of a block is its largest magnitude. A code is a small floating-point number relative to it: the upper bits of
x = value / scale as fp32 has them, counted down from those of 1. So small values are as precise as large ones, and one
shift encodes and decodes; the paper's dynamic code has a table instead.

    second moment   8 bits, 3 of them mantissa:          2^-32 to 1; never zero, by which a step would be divided
    first moment    sign, and 7 bits, 3 of them mantissa:  0, and 2^-16 to 1

Between two steps a second moment changes by less than the distance of two codes: with beta2 = 0.999 it would never
decay if it were rounded to the nearest. So codes are rounded up with the probability that makes the mean right
(`rounding` = "stochastic"), by noise that the step and the position determine. Each step itself is computed with the
moments in fp32 before they are rounded.

Blocks begin at each matrix. Vectors, such as norms and biases, keep fp32 moments.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from optim.codecs.bits.deterministic_random import FIRST_FACTOR, FIRST_SHIFT, SECOND_FACTOR, SHIFT, mix_bits
from optim.inner.base import EPSILON, InnerStep, InnerUpdateRule, update_second_moment
from optim.kernels.jit import kernel
from optim.kernels.parallel import parallel_for
from optim.kernels.vectors import SLAB_SIZE, Floats, slabs
from optim.layout import Layout, Span, clip_spans
from optim.options import STRICT

BLOCK: Final = 256
DEVICE_SLAB: Final = 1 << 24  # values of a slab on an accelerator
FIRST_CODES, FIRST_SCALES = "first_codes", "first_scales"
SECOND_CODES, SECOND_SCALES = "second_codes", "second_scales"
SMALL_FIRST, SMALL_SECOND = "small_first_moment", "small_second_moment"  # of the parameters that are not matrices

DROPPED: Final = 20  # bits of an fp32 mantissa that a code lacks
ONE: Final = 127 << 3  # the upper bits of 1.0
FIRST_BASE: Final = ONE - 127  # those of the code 0 of a first moment
SECOND_BASE: Final = ONE - 255
LEAST_FIRST: Final = 2.0**-16 * 1.25  # the smallest first moment but zero: code 1
NEAREST: Final = 1 << (DROPPED - 1)
NOISE_UNIT: Final = 2.0**-DROPPED
Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EightBitAdamW(InnerUpdateRule):
    """AdamW (arXiv 1711.05101) with moments of 8 bits.

        m <- beta1 * D(m) + (1 - beta1) * g;  v <- beta2 * D(v) + (1 - beta2) * g^2
        theta <- theta * (1 - rate * weight_decay)            matrices only
        theta <- theta - rate * m' / (sqrt(v') + eps);  then m, v <- C(m), C(v)

    where x' = x / (1 - beta^count), and C and D encode and decode a moment.
    """

    kind: ClassVar[str] = "adamw-8bit"
    vectors: ClassVar[tuple[str, ...]] = (
        *(FIRST_CODES, FIRST_SCALES, SECOND_CODES, SECOND_SCALES),
        *(SMALL_FIRST, SMALL_SECOND),
    )

    rounding: Literal["stochastic", "nearest"] = Field(default="stochastic", description="how a moment is encoded")

    def vector_numel(self, name: str, layout: Layout) -> int:
        if name in (FIRST_CODES, SECOND_CODES):
            return layout.numel + -layout.numel % 4  # fp32 values that follow in a file stay aligned
        spans = layout.matrix_spans
        if name in (FIRST_SCALES, SECOND_SCALES):
            return max(1, sum(map(_block_count, spans)))
        return max(1, layout.numel - sum(stop - start for start, stop in spans))

    def vector_dtype(self, name: str) -> torch.dtype:
        return torch.uint8 if name in (FIRST_CODES, SECOND_CODES) else torch.float32

    def step(self, weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
        step.decay_weights(weights)
        block = step.block
        for span in step.matrix_spans:
            self._step_matrices(span, block, (weights, gradient), vectors, step)
            block += _block_count(span)
        _step_rest(weights, gradient, vectors, step)

    def parts(self, numel: int, step: InnerStep, size: int) -> Iterable[slice]:
        """Cut at the ends of adjacent matrices, and within them between two blocks."""
        stop = 0
        for start, end in (*step.matrix_spans, (numel, numel)):
            if stop < start:
                yield slice(stop, start)
            pieces = slabs(end - start, max(BLOCK, size - size % BLOCK))
            yield from (slice(start + piece.start, start + piece.stop) for piece in pieces)
            stop = end

    def part_of(
        self, part: slice, vectors: Mapping[str, Tensor], step: InnerStep
    ) -> tuple[Mapping[str, Tensor], InnerStep]:
        before, within = clip_spans(step.matrix_spans, 0, part.start), step.within(part.start, part.stop)
        first = sum(map(_block_count, before))
        used = part.start - sum(stop - start for start, stop in before)
        blocks = slice(first, first + sum(map(_block_count, within.matrix_spans)))
        rest = slice(used, used + part.stop - part.start - sum(stop - start for start, stop in within.matrix_spans))
        places = {SMALL_FIRST: rest, SMALL_SECOND: rest, FIRST_SCALES: blocks, SECOND_SCALES: blocks}
        found = {name: vector[places.get(name, part)] for name, vector in vectors.items()}
        return found, replace(within, block=step.block + first)

    def _step_matrices(
        self, span: Span, block: int, pair: tuple[Tensor, Tensor], vectors: Mapping[str, Tensor], step: InnerStep
    ) -> None:
        """Step adjacent matrices, whose first block has this number."""
        start, stop = span
        is_on_cpu = pair[0].device.type == "cpu"
        work = self._step_by_kernel if is_on_cpu else self._step_by_torch

        def move(part: slice) -> None:
            values = slice(start + part.start, start + part.stop)
            first = block + part.start // BLOCK
            row = first - step.block
            blocks = slice(row, row + -(-(part.stop - part.start) // BLOCK))
            codes = [vectors[name][values] for name in (FIRST_CODES, SECOND_CODES)]
            scales = [vectors[name][blocks] for name in (FIRST_SCALES, SECOND_SCALES)]
            work([pair[0][values], pair[1][values], codes[0], scales[0], codes[1], scales[1]], first, step)

        parallel_for(move, slabs(stop - start, SLAB_SIZE if is_on_cpu else DEVICE_SLAB))

    def _step_by_kernel(self, tensors: Sequence[Tensor], block: int, step: InnerStep) -> None:
        weights, gradient, first, first_scales, second, second_scales = (each.detach().numpy() for each in tensors)
        constants = np.array([step.beta1, step.beta2, *_step_factors(step), EPSILON], np.float32)
        is_nearest = self.rounding == "nearest"
        _step_blocks(
            weights, gradient, first, first_scales, second, second_scales, block, step.count, is_nearest, constants
        )

    def _step_by_torch(self, tensors: Sequence[Tensor], block: int, step: InnerStep) -> None:
        """Do the same by operations of torch, on any device."""
        weights, gradient, first_codes, first_scales, second_codes, second_scales = tensors
        numel, blocks = weights.numel(), first_scales.numel()
        first = _unscale(decode_first(first_codes), first_scales)
        second = _unscale(self.decode_second(second_codes), second_scales)
        first.lerp_(gradient, 1 - step.beta1)
        second.mul_(step.beta2).addcmul_(gradient, gradient, value=1 - step.beta2)
        rate, spread = _step_factors(step)
        weights.addcdiv_(first, second.sqrt().mul_(spread).add_(EPSILON), value=-rate)
        noise = None if self.rounding == "nearest" else _noise(block, blocks, step.count, weights.device)[:numel]
        low, high = (None, None) if noise is None else ((noise & 0xFFFF) << 4, (noise >> 16) << 4)
        relative, scales = _scale(first)
        first_scales.copy_(scales)
        first_codes.copy_(encode_first(relative, low))
        relative, scales = _scale(second)
        second_scales.copy_(scales)
        second_codes.copy_(self.encode_second(relative, high))

    @staticmethod
    def encode_second(values: Tensor, noise: Tensor | None) -> Tensor:
        """Return the codes of values in [0, 1], rounded up by 20 bits of noise, or to the nearest."""
        return (_rounded_bits(values, noise) - SECOND_BASE).clamp_(0, 255).to(torch.uint8)

    @staticmethod
    def decode_second(codes: Tensor) -> Tensor:
        return ((codes.int() + SECOND_BASE) << DROPPED).view(torch.float32)


def encode_first(values: Tensor, noise: Tensor | None) -> Tensor:
    """Return the codes of values in [-1, 1]: seven bits of magnitude below the sign."""
    magnitudes = values.abs()
    codes = (_rounded_bits(magnitudes, noise) - FIRST_BASE).clamp_(max=127)
    threshold = 0.5 if noise is None else noise * NOISE_UNIT
    tiny = (magnitudes > LEAST_FIRST * threshold).int()
    return torch.where(codes < 1, tiny, codes).add_((values < 0).int() << 7).to(torch.uint8)


def decode_first(codes: Tensor) -> Tensor:
    """Return the values of codes of a first moment."""
    sizes = codes.int() & 127
    values = ((sizes + FIRST_BASE) << DROPPED).view(torch.float32)
    return torch.where(sizes == 0, 0.0, torch.where(codes > 127, -values, values))


def _rounded_bits(values: Tensor, noise: Tensor | None) -> Tensor:
    return (values.view(torch.int32) + (NEAREST if noise is None else noise.int())) >> DROPPED


def _block_count(span: Span) -> int:
    return -(-(span[1] - span[0]) // BLOCK)


def _step_factors(step: InnerStep) -> tuple[float, float]:
    """Return rate / (1 - beta1^count) and 1 / sqrt(1 - beta2^count)."""
    count = step.count + 1
    return step.rate / (1 - step.beta1**count), 1 / math.sqrt(1 - step.beta2**count)


def _step_rest(weights: Tensor, gradient: Tensor, vectors: Mapping[str, Tensor], step: InnerStep) -> None:
    """Apply AdamW to all parameters that are not matrices, with moments in fp32."""
    stop = used = 0
    for start, end in (*step.matrix_spans, (weights.numel(), weights.numel())):
        if stop < start:
            own = slice(used, used + start - stop)
            first, second, fresh = vectors[SMALL_FIRST][own], vectors[SMALL_SECOND][own], gradient[stop:start]
            first.lerp_(fresh, 1 - step.beta1)
            spread = update_second_moment(second, fresh, step)
            weights[stop:start].addcdiv_(first, spread, value=-step.rate / (1 - step.beta1 ** (step.count + 1)))
            used = own.stop
        stop = end


def _by_block(values: Tensor) -> Tensor:
    """Return (blocks, BLOCK) values, the last block filled with zeros."""
    missing = -values.numel() % BLOCK
    return torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK)


def _unscale(values: Tensor, scales: Tensor) -> Tensor:
    return (_by_block(values) * scales[:, None]).flatten()[: values.numel()]


def _scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values relative to the largest magnitude of their block, and these magnitudes."""
    rows = _by_block(values)
    scales = rows.abs().amax(1)
    inverse = torch.where(scales > 0, 1 / scales, 0.0).nan_to_num_(posinf=0.0)
    return (rows * inverse[:, None]).flatten()[: values.numel()], scales


def _noise(block: int, blocks: int, count: int, device: torch.device) -> Tensor:
    """Return a word of 32 bits for each value of these blocks."""
    numbers = torch.arange(block, block + blocks, device=device)
    keys = _mix_words((_mix_words(numbers) + count) & 0xFFFFFFFF)
    words = keys[:, None] + torch.arange(BLOCK, device=device)
    return _mix_words(words & 0xFFFFFFFF).flatten()


def _mix_words(words: Tensor) -> Tensor:
    """Compute `mix_bits` of words in int64."""
    words = (words ^ (words >> int(FIRST_SHIFT))) * int(FIRST_FACTOR) & 0xFFFFFFFF
    words = (words ^ (words >> int(SHIFT))) * int(SECOND_FACTOR) & 0xFFFFFFFF
    return words ^ (words >> int(SHIFT))


@kernel
def _step_blocks(
    weights: Floats, gradient: Floats, first_codes: Codes, first_scales: Floats, second_codes: Codes,
    second_scales: Floats, block: int, count: int, is_nearest: bool, constants: Floats,
) -> None:  # fmt: skip
    """Step all values of consecutive blocks, the first of which has this number."""
    first, second = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    first_noise, second_noise = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    first_bits, second_bits = first.view(np.int32), second.view(np.int32)
    beta1, beta2, rate, spread, epsilon = constants
    fresh1, fresh2 = np.float32(1) - beta1, np.float32(1) - beta2
    first_noise[:] = second_noise[:] = np.int32(NEAREST)
    for index in range(first_scales.size):
        start = index * BLOCK
        size = min(BLOCK, weights.size - start)
        row, fresh = weights[start : start + size], gradient[start : start + size]
        codes1, codes2 = first_codes[start : start + size], second_codes[start : start + size]
        for i in range(size):
            code = np.int32(codes1[i])
            bits = ((code & np.int32(127)) + np.int32(FIRST_BASE)) << np.int32(DROPPED)
            first_bits[i] = bits | ((code >> np.int32(7)) << np.int32(31)) if code & np.int32(127) else np.int32(0)
            second_bits[i] = (np.int32(codes2[i]) + np.int32(SECOND_BASE)) << np.int32(DROPPED)
        scale1, scale2 = first_scales[index], second_scales[index]
        peak1 = peak2 = np.float32(0)
        for i in range(size):
            value = fresh[i]
            m = first[i] * scale1 * beta1 + value * fresh1
            v = second[i] * scale2 * beta2 + value * value * fresh2
            row[i] -= rate * m / (np.sqrt(v) * spread + epsilon)
            first[i], second[i] = m, v
            peak1, peak2 = max(peak1, abs(m)), max(peak2, v)
        inverse1 = np.float32(1) / peak1 if peak1 > np.float32(1e-38) else np.float32(0)
        inverse2 = np.float32(1) / peak2 if peak2 > np.float32(1e-38) else np.float32(0)
        if not is_nearest:
            key = mix_bits(np.uint32(mix_bits(np.uint32(block + index)) + np.uint32(count)))
            for i in range(size):
                word = mix_bits(np.uint32(key + np.uint32(i)))
                first_noise[i] = np.int32((word & np.uint32(0xFFFF)) << np.uint32(4))
                second_noise[i] = np.int32((word >> np.uint32(16)) << np.uint32(4))
        for i in range(size):
            first[i] *= inverse1
            second[i] *= inverse2
        for i in range(size):
            code = ((second_bits[i] + second_noise[i]) >> np.int32(DROPPED)) - np.int32(SECOND_BASE)
            codes2[i] = np.uint8(min(max(code, np.int32(0)), np.int32(255)))
            size_bits = first_bits[i] & np.int32(0x7FFFFFFF)
            code = ((size_bits + first_noise[i]) >> np.int32(DROPPED)) - np.int32(FIRST_BASE)
            tiny = abs(first[i]) > np.float32(LEAST_FIRST * NOISE_UNIT) * np.float32(first_noise[i])
            code = min(code, np.int32(127)) if code >= np.int32(1) else np.int32(tiny)
            codes1[i] = np.uint8(code | (np.int32(128) if first_bits[i] < 0 else np.int32(0)))
        first_scales[index], second_scales[index] = peak1, peak2
