"""Random values that are bit-equal on every machine.

torch's normal generator does not promise that across instruction sets, and NumPy keeps the integers of Philox fixed. A
value is the exact sum of four 16-bit uniforms, times one fp32 factor: a bell curve (Irwin-Hall) that ends at 3.46
standard deviations.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**20  # drawn at a time, which bounds the working memory to a few arrays of 8 MiB

SUM_MEAN = 4 * 65535 // 2
SUM_DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)


def stream_of(text: str) -> np.random.Philox:
    """Return the generator of a text; those of other texts are independent of it."""
    return np.random.Philox(key=int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def fill_bell_curve(out: Tensor, deviation: float, stream: np.random.Philox) -> None:
    """Fill a flat fp32 tensor on the CPU."""
    scale = np.float32(deviation / SUM_DEVIATION)
    for start in range(0, out.numel(), CHUNK_ELEMENTS):
        chunk = out[start : start + CHUNK_ELEMENTS]
        chunk.copy_(torch.from_numpy(_draw_uniform_sums(stream, chunk.numel()).astype(np.float32) * scale))


def random_signs(stream: np.random.Philox, count: int) -> Tensor:
    """Return `count` fp32 numbers, each 1 or -1."""
    return 1.0 - 2.0 * torch.from_numpy((_draw_words(stream, count) >> np.uint64(63)).astype(np.float32))


def random_order(stream: np.random.Philox, count: int) -> Tensor:
    """Return the numbers below `count` in random order."""
    return torch.from_numpy(np.argsort(_draw_words(stream, count), kind="stable"))


def _draw_words(stream: np.random.Philox, count: int) -> npt.NDArray[np.uint64]:
    return np.asarray(stream.random_raw(count), dtype=np.uint64)


def _draw_uniform_sums(stream: np.random.Philox, count: int) -> npt.NDArray[np.int64]:
    """Draw sums of four 16-bit uniforms minus their mean; they are below 2**18, so exact in fp32."""
    raw = _draw_words(stream, count)
    total = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    return np.asarray(total - SUM_MEAN, dtype=np.int64)
