"""One bit a value: its sign, under the mean magnitude of its block (arXiv 2102.02888).

    scale = sum |x| / n;  decoded = scale where x >= 0, else -scale

Of all scales the mean leaves the least squared error (the root of the mean square would keep the norm instead). 1.02
bits a parameter; on normally distributed values the relative error is 0.60, so error feedback is needed.
"""

from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.blocks import BlockCodec, Integers
from optim.parts import STRICT
from optim.threads import scratch
from optim.vectors import Floats

NARROW = 16


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BlockSign(BlockCodec):
    kind: ClassVar[str] = "sign"
    number: ClassVar[int] = 8
    version: ClassVar[int] = 2
    bits: ClassVar[int] = 1
    round_up: ClassVar[int] = 0x8000  # to nearest

    block: int = Field(default=1024, ge=16, le=65_536, multiple_of=8, description="values that share a scale")

    def _scale(self, rows: torch.Tensor, sizes: Floats) -> Floats:
        sums = torch.from_numpy(scratch("floats", np.float32, rows.numel())).view(rows.shape)
        torch.abs(rows, out=sums)
        narrow = _folded(sums.T, NARROW).contiguous()  # short rows take long
        totals: Floats = _folded(narrow, 1)[0].numpy()
        return totals / sizes

    def _quantize(self, rows: torch.Tensor, scales: Floats, place: int, codes: Integers) -> None:
        np.less(rows.numpy(), 0, out=codes.view(np.bool_))

    def multiples(self, codes: Integers) -> None:
        codes *= np.int8(-2)
        codes += np.int8(1)


def _folded(sums: torch.Tensor, least: int) -> torch.Tensor:
    """The second half of the rows is added to the first until `least` are left: an order that never depends on the
    machine. Changes `sums`."""
    while (count := sums.shape[0]) > least:
        half = -(-count // 2)
        sums[: count - half] += sums[half:]
        sums = sums[:half]
    return sums
