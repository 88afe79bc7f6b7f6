"""Initial weights that are bit-equal on every machine.

All peers of a run must start from the same anchor, whatever their processor, library build or number of threads, and
torch's normal generator does not promise that across instruction sets. So each parameter has a Philox stream of its
own, whose integers NumPy keeps fixed. A value is the exact sum of four 16-bit uniforms, times one fp32 factor: a bell
curve (Irwin-Hall) that ends at 3.46 standard deviations.

The model family gives the standard deviation of each matrix. Gains of the norms are 1.
"""

import hashlib
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from node.model.cut import WHOLE, Cut
from node.model.families import model_family, shape_table
from protocol.manifest import ModelSection

CHUNK_ELEMENTS = 2**20  # drawn at a time, which bounds the working memory to a few arrays of 8 MiB

SUM_MEAN = 4 * 65535 // 2
SUM_DEVIATION = math.sqrt(4 * (65536**2 - 1) / 12)


def initial_weights(config: ModelSection, seed: int, cut: Cut = WHOLE) -> Tensor:
    """Return the weights of round 0, of the model or of a stage: a flat fp32 vector (numel,) on the CPU.

    They depend on names, shapes and the seed only, so those of a stage are a slice of the whole model's.
    """
    family, table = model_family(config), shape_table(config, cut)
    flat = torch.ones(table.numel)
    for name, view in table.views(flat).items():
        if view.ndim == 2:
            _fill_irwin_hall(view.view(-1), family.standard_deviation(config, name), _stream_key(seed, name))
    return flat


def _stream_key(seed: int, name: str) -> int:
    """Return a 128-bit key for one parameter, so that its values do not depend on the other parameters."""
    return int.from_bytes(hashlib.sha256(f"murmur initial 1 {seed} {name}".encode()).digest()[:16], "big")


def _fill_irwin_hall(out: Tensor, deviation: float, key: int) -> None:
    stream = np.random.Philox(key=key)
    scale = np.float32(deviation / SUM_DEVIATION)
    for start in range(0, out.numel(), CHUNK_ELEMENTS):
        chunk = out[start : start + CHUNK_ELEMENTS]
        chunk.copy_(torch.from_numpy(_draw_uniform_sums(stream, chunk.numel()).astype(np.float32) * scale))


def _draw_uniform_sums(stream: np.random.Philox, count: int) -> npt.NDArray[np.int64]:
    """Draw sums of four 16-bit uniforms minus their mean; they are below 2**18, so exact in fp32."""
    raw: npt.NDArray[np.uint64] = np.asarray(stream.random_raw(count), dtype=np.uint64)
    total = sum(((raw >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    return np.asarray(total - SUM_MEAN, dtype=np.int64)
