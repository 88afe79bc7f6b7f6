"""Low-rank adapters (LoRA, arXiv 2106.09685) of a frozen model, for all families alike.

    y = W x + alpha / rank B A x        W (O, K) frozen, A (rank, K), B (O, rank)

A begins with the deviation of Kaiming's uniform values (1 / sqrt(3 K)), B with zeros, so the model begins as it is.
Only A and B of all layers are in the run's flat vector, which rounds exchange; names are PEFT's without its prefix.

Frozen matrices of the layers are held as they are, or with fewer bits (the run's `adapter.base`, the same on all peers,
so that an auditor repeats the same numbers):

    bf16    rounded to nearest
    int8    each row has a scale: the largest magnitude / 127
    nf4     blocks of 64 values have a scale; a value is one of 16 quantiles of a normal distribution (2305.14314)

A product expands its matrix and forgets it, in the backward pass too; so one expanded matrix is in memory at a time.
Embedding and output matrix are in bf16 then, norms in fp32.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from node.model.shapes import Entry, ShapeTable
from protocol.manifest.sections import ADAPTED, AdapterSection, FrozenType

LORA_A: Final = ".lora_A.weight"
LORA_B: Final = ".lora_B.weight"
WEIGHT: Final = ".weight"
INT8_LARGEST: Final = 127
BLOCK: Final = 64
LEAST_SCALE: Final = 1e-30
PAIR_BYTES: Final = 4 * 2 * 256  # of the table of a matrix in nf4
LEVELS: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
Held = tuple[Tensor, ...]  # a matrix as it is; or codes, and their scales


def adapter_table(blocks: Iterable[Iterable[Entry]], adapter: AdapterSection) -> ShapeTable:
    """Return the shape table of the adapter of a model with these blocks; blocks without a target are left out."""
    found = (tuple(_factors(block, adapter)) for block in blocks)
    return ShapeTable.from_blocks(entries for entries in found if entries)


def _factors(block: Iterable[Entry], adapter: AdapterSection) -> Iterator[Entry]:
    for name, shape in block:
        stem = name.removesuffix(WEIGHT)
        if stem.rpartition(".")[2] in adapter.targets:
            yield stem + LORA_A, (adapter.rank, shape[1])
            yield stem + LORA_B, (shape[0], adapter.rank)


def first_factors(entry: Entry) -> tuple[float, float]:
    """Return mean and standard deviation of the first values of a factor."""
    name, shape = entry
    return 0.0, 1 / math.sqrt(3 * shape[1]) if name.endswith(LORA_A) else 0.0


class AdaptedLinear(nn.Module):
    """A frozen matrix (O, K) and, if `adapter` names it, the two factors that are added to it."""

    def __init__(self, inputs: int, outputs: int, adapter: AdapterSection, is_target: bool) -> None:
        super().__init__()
        self.scale = adapter.alpha / adapter.rank
        self.held: Held = ()
        self.lora_A = nn.Linear(inputs, adapter.rank, bias=False) if is_target else None
        self.lora_B = nn.Linear(adapter.rank, outputs, bias=False) if is_target else None

    def forward(self, values: Tensor) -> Tensor:
        """Return the product of values (..., K): (..., O)."""
        product: Tensor = _FrozenProduct.apply(values, *self.held)  # type: ignore[no-untyped-call]
        if self.lora_A is None or self.lora_B is None:
            return product
        return product + self.scale * F.linear(F.linear(values, self.lora_A.weight), self.lora_B.weight)

    def _apply(self, fn: Any, recurse: bool = True) -> "AdaptedLinear":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.held = tuple(map(fn, self.held))
        return self


def adapt(layers: nn.Module, adapter: AdapterSection) -> None:
    """Replace the matrices of all layers by frozen ones, with factors where the adapter wants them."""
    for name, module in list(layers.named_modules()):
        parent, _, attribute = name.rpartition(".")
        if isinstance(module, nn.Linear) and attribute in ADAPTED:
            is_target = attribute in adapter.targets and ".experts." not in name
            new = AdaptedLinear(module.in_features, module.out_features, adapter, is_target)
            setattr(layers.get_submodule(parent), attribute, new)


class _FrozenProduct(torch.autograd.Function):
    """Multiply values (..., K) by a frozen matrix (O, K), which is expanded in each pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, *held: Tensor) -> Tensor:
        if not held:
            raise RuntimeError("the frozen weights of the model are not read yet")
        ctx.save_for_backward(*held)
        ctx.type, device = values.dtype, values.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
        return F.linear(values.to(dtype), expand(held, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), held = gradients, ctx.saved_tensors
        return (gradient @ expand(held, gradient.dtype)).to(ctx.type), *(None for _ in held)


def compress(matrix: Tensor, kind: FrozenType) -> Held:
    """Return a matrix (O, K), fp32, as it is held."""
    match kind:
        case "fp32":
            return (matrix.clone(),)
        case "bf16":
            return (matrix.bfloat16(),)
        case "int8":
            scales = (matrix.abs().amax(dim=1, keepdim=True) / INT8_LARGEST).clamp(min=LEAST_SCALE)
            return (matrix / scales).round().to(torch.int8), scales
        case "nf4":
            return _compress_nf4(matrix)


def _compress_nf4(matrix: Tensor) -> Held:
    """Return two codes a byte (O, blocks, 32), scales in bf16 (O, blocks, 1), a tensor as long as a row, and `_pairs`.

    A table that each product made on a card would let the processor wait for it.
    """
    rows, columns = matrix.shape
    blocks = F.pad(matrix, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(dim=-1, keepdim=True).clamp(min=LEAST_SCALE).bfloat16()
    levels = torch.tensor(LEVELS)
    borders = (levels[1:] + levels[:-1]) / 2
    codes = torch.bucketize(blocks / scales, borders).to(torch.uint8)
    return codes[..., 0::2] << 4 | codes[..., 1::2], scales, torch.empty(columns, 0), _pairs()


def expand(held: Held, dtype: torch.dtype) -> Tensor:
    """Return the matrix (O, K)."""
    match held:
        case (matrix,):
            return matrix.to(dtype)
        case (codes, scales):
            return (codes * scales).to(dtype)
        case (packed, scales, shape, pairs):
            values = (pairs[packed.int()].flatten(-2) * scales).flatten(1)
            return values[:, : len(shape)].to(dtype)
    raise ValueError("no matrix is held so")


def _pairs() -> Tensor:
    """Return the two values (256, 2) of each byte."""
    levels, byte = torch.tensor(LEVELS), torch.arange(256)
    return torch.stack((levels[byte >> 4], levels[byte & 15]), dim=-1)


@dataclass
class FrozenWeights:
    """The weights of a model that does not change, as they are held; by name."""

    kind: FrozenType
    _held: dict[str, Held] = field(default_factory=dict)

    def add(self, named: Mapping[str, Tensor]) -> None:
        """Hold some weights, fp32, in the run's type."""
        for name, values in named.items():
            self._held[name] = compress(values, type_of(name, values.shape, self.kind))

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Give them to a model."""
        for name, held in self._held.items():
            stem, _, attribute = name.rpartition(".")
            module, placed = model.get_submodule(stem), tuple(each.to(device) for each in held)
            if isinstance(module, AdaptedLinear):
                module.held = placed
            else:
                setattr(module, attribute, nn.Parameter(placed[0], requires_grad=False))


def type_of(name: str, shape: tuple[int, ...], kind: FrozenType) -> FrozenType:
    """Return how a frozen parameter is held: embedding and output matrix with 16 bits at least, gains with 32."""
    if len(shape) < 2:
        return "fp32"
    return kind if is_projection(name) or kind == "fp32" else "bf16"


def is_projection(name: str) -> bool:
    """Return whether a parameter is a matrix that an adapter may change."""
    return name.removesuffix(WEIGHT).rpartition(".")[2] in ADAPTED


def frozen_bytes(entries: Iterable[Entry], kind: FrozenType) -> int:
    """Return the bytes of a frozen model with these parameters."""
    return sum(_held_bytes(shape, type_of(name, shape, kind)) for name, shape in entries)


def _held_bytes(shape: tuple[int, ...], kind: FrozenType) -> int:
    match kind:
        case "fp32":
            return 4 * math.prod(shape)
        case "bf16":
            return 2 * math.prod(shape)
        case "int8":
            return math.prod(shape) + 4 * shape[0]
        case "nf4":
            return shape[0] * -(-shape[1] // BLOCK) * (BLOCK // 2 + 2) + PAIR_BYTES


def add_adapter(weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], adapter: AdapterSection) -> None:
    """Add an adapter to the weights of its model, fp32, in place."""
    for name, down in factors.items():
        if name.endswith(LORA_A):
            stem = name.removesuffix(LORA_A)
            weights[stem + WEIGHT].addmm_(factors[stem + LORA_B], down, alpha=adapter.alpha / adapter.rank)
