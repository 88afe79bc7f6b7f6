"""Measure the time of every codec, in passes over the same tensor, and the share of the tensor that it keeps.

Encoding is compared with one `torch.topk` of 64 in each 4096 magnitudes (codecs that keep a few values) or with one
copy of the tensor (codecs that keep all). Decoding and adding one peer's message to a total is compared with the same
`torch.topk`, or with one copy and one accumulation. Codec and comparison take turns in one process; each figure is the
median of their ratios. The values are normally distributed; `relative_error` is of the whole decoded tensor, and for
codecs that keep a few values mostly says how many they keep.

    python benchmarks/codecs.py [--numel 25000000] [--turns 7] [--threads 2] [--only NAME ...] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Final

import torch

from optim.codecs.base import Codec
from optim.codecs.dct_topk import DctTopK
from optim.codecs.e2m1 import BlockE2M1
from optim.codecs.e3m0 import BlockE3M0
from optim.codecs.floats import BFloat16, Float16, Uncompressed
from optim.codecs.int_blocks import BlockInt4, BlockInt8
from optim.codecs.lloyd_max import BlockLloydMax
from optim.codecs.low_rank import LowRank
from optim.codecs.sign import BlockSign
from optim.codecs.subset import RandomSubset
from optim.codecs.topk import ChunkTopK
from optim.kernels.buffer_pool import zeros
from optim.layout import Layout

DENSE: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        "none": Uncompressed(),
        "fp16": Float16(),
        "bf16": BFloat16(),
        "int8": BlockInt8(),
        "int4": BlockInt4(),
        "e2m1": BlockE2M1(),
        "e3m0": BlockE3M0(),
        "e3m0-stochastic": BlockE3M0(rounding="stochastic"),
        "lloyd-max": BlockLloydMax(),
        "sign": BlockSign(),
    }
)
SPARSE: Final[Mapping[str, Codec]] = MappingProxyType(
    {
        "topk-1-bit": ChunkTopK(bits=1),
        "topk": ChunkTopK(),
        "topk-3-bit": ChunkTopK(bits=3),
        "dct-topk": DctTopK(),
        "subset": RandomSubset(),
        "low-rank": LowRank(),
    }
)
CODECS: Final[Mapping[str, Codec]] = MappingProxyType({**DENSE, **SPARSE})
# At most so many times the comparison: encoding; decoding and adding.
TARGETS: Final = MappingProxyType({"dense": (1.5, 0.5), "sparse": (1.5, 0.1)})
CHUNK, KEEP = 4096, 64
MATRIX: Final = (2048, 512)


@dataclass(frozen=True)
class Cost:
    encode_ratio: float
    decode_ratio: float
    bits_per_parameter: float
    relative_error: float
    encode_milliseconds: float
    decode_milliseconds: float


class Comparison:
    """The passes over memory that codecs are measured against, all into memory that is already there."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self._chunks = values[: values.numel() // CHUNK * CHUNK].view(-1, CHUNK)
        self._copy = torch.zeros_like(values)
        self._total = torch.zeros_like(values)

    def top(self) -> None:
        torch.topk(self._chunks.abs(), KEEP)

    def copy(self) -> None:
        self._copy.copy_(self._values)

    def accumulate(self) -> None:
        self._copy.copy_(self._values)
        self._total.add_(self._copy)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(CODECS), default=list(CODECS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    values = torch.randn(options.numel, generator=torch.Generator().manual_seed(0))
    comparison = Comparison(values)
    costs = {}
    for name in options.only:
        costs[name] = measure(name, values, comparison, options.turns)
        if not options.json:
            print(f"  measured {name}", file=sys.stderr)
    print(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=2) if options.json else table(costs))


def measure(name: str, values: torch.Tensor, comparison: Comparison, turns: int) -> Cost:
    numel = values.numel()
    codec = CODECS[name].bind(tensors(numel), 0)
    total = zeros(numel)
    payload = codec.encode(values)
    base = (comparison.copy, comparison.accumulate) if name in DENSE else (comparison.top, comparison.top)
    encode = alternate(lambda: codec.encode(values), base[0], turns)
    decode = alternate(lambda: codec.decode_vector(payload, numel).add_to(total, 1.0), base[1], turns)
    error = torch.linalg.vector_norm(codec.decode(payload, numel) - values) / torch.linalg.vector_norm(values)
    return Cost(
        encode_ratio=encode[0],
        decode_ratio=decode[0],
        bits_per_parameter=8 * len(payload) / numel,
        relative_error=float(error),
        encode_milliseconds=encode[1],
        decode_milliseconds=decode[1],
    )


def tensors(numel: int) -> Layout:
    """Matrices such as a model has, and a vector of what is left."""
    rows, columns = MATRIX
    matrices, rest = divmod(numel, rows * columns)
    return Layout((MATRIX,) * matrices + (((rest,),) if rest else ()))


def alternate(subject: Callable[[], object], base: Callable[[], object], turns: int) -> tuple[float, float]:
    """The median ratio of both times, and the median time of the subject in milliseconds. Each first runs once."""
    seconds(subject), seconds(base)
    times = [(seconds(subject), seconds(base)) for _ in range(turns)]
    ratio = statistics.median(one / other for one, other in times)
    return ratio, 1000 * statistics.median(one for one, _ in times)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def table(costs: Mapping[str, Cost]) -> str:
    """One line a codec; a star where a target is missed."""
    lines = [f"{'codec':16}{'encode':>10}{'decode':>10}{'bits':>10}{'error':>10}{'enc ms':>10}{'dec ms':>10}"]
    for name, cost in costs.items():
        limits = TARGETS["dense" if name in DENSE else "sparse"]
        ratios = zip((cost.encode_ratio, cost.decode_ratio), limits, strict=True)
        shown = "".join(f"{ratio:9.2f}{'*' if ratio > limit else ' '}" for ratio, limit in ratios)
        rest = f"{cost.bits_per_parameter:10.4f}{cost.relative_error:10.4f}"
        lines.append(f"{name:16}{shown}{rest}{cost.encode_milliseconds:10.0f}{cost.decode_milliseconds:10.0f}")
    return "\n".join([*lines, "encode, decode: ratios (see --help); * above the target"])


if __name__ == "__main__":
    main(sys.argv[1:])
