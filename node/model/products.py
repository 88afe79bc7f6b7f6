"""Products of matrices: in bf16 where the device has that, in fp8 on request, and of matrices that are joined first.

Devices without bf16 units emulate it, more slowly than fp32. In fp8 each tensor has one scale (arXiv 2209.05433):

    scale(t) = max |t| / largest value of the type,   t8 = round(t / scale),   a b^T ~ scale(a) scale(b) a8 b8^T

Values and weights are in e4m3, which has 3 bits of mantissa; gradients in e5m2, which has a wider range. Scales follow
the present tensor, so nothing is carried from step to step. Sums are in fp32, and a value that is not finite makes the
product not finite.

Attention multiplies its input by query, key and value weights, the MLP by gate and up weights. One product with the
joined matrix is faster than two or three, and large neighbours in memory are joined without a copy.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from protocol.errors import DeviceError
from protocol.manifest.model import ModelSection

BF16_CAPABILITY: Final = (8, 0)  # of NVIDIA's cards: those from 2020 on
CPU_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one on Arm
FP8_CAPABILITY: Final = (8, 9)  # of NVIDIA's cards: Ada and Hopper, those from 2022 on
MULTIPLE: Final = 16  # the sizes of a product must be multiples of it
LEAST_SCALE: Final = 1e-30  # of a tensor of zeros
Scaled: TypeAlias = tuple[Tensor, Tensor]  # in fp8, and its scale () in fp32
COPY_ELEMENTS = 2**18  # copying fewer is faster than a Python function in the autograd graph


def has_bf16(device: torch.device) -> bool:
    """Return whether products of matrices in bf16 are the fastest way on this device."""
    if device.type == "mps":
        return False  # nobody has measured it there
    if device.type == "cpu":
        return not CPU_FLAGS.isdisjoint(_cpu_flags())
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY


@cache
def _cpu_flags() -> frozenset[str]:
    """Return the features of the first processor; empty where the system does not list them."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in these types."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def require_fp8_sizes(model: ModelSection) -> None:
    """Raise DeviceError unless all products of a layer have sizes that are multiples of `MULTIPLE`."""
    sizes = {
        "width": model.width,
        "hidden": model.hidden,
        "heads * head width": model.heads * model.head_width,
        "kv_heads * head width": model.key_heads * model.head_width,
        "subspace": model.stream_width,
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise DeviceError(f"--fp8 needs multiples of {MULTIPLE}, and the model's {name} is {size}; leave it out")


def multiply(values: Tensor, weight: Tensor, in_fp8: bool) -> Tensor:
    """Return values (..., K) times the transposed weight (O, K): (..., O).

    Its type is that of `torch.autocast`, or that of the values. In fp8, K and O must be multiples of `MULTIPLE`.
    """
    if not in_fp8:
        return F.linear(values, weight)
    rows = values.reshape(-1, values.shape[-1])
    lack = -len(rows) % MULTIPLE
    padded = F.pad(rows, (0, 0, 0, lack)) if lack else rows  # without a lack, F.pad would copy all rows
    product: Tensor = _Product.apply(padded, weight)  # type: ignore[no-untyped-call]
    return product[: len(rows)].view(*values.shape[:-1], len(weight))


class _Product(torch.autograd.Function):
    """The product of values (N, K) and a weight (O, K), and both gradients, each as one product in fp8."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        scaled, scaled_weight = _scale(values, torch.float8_e4m3fn), _scale(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*scaled, *scaled_weight)
        ctx.types = values.dtype, weight.dtype
        device = values.device.type
        out = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype
        return _multiply_scaled(scaled, scaled_weight, out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        values, values_scale, weight, weight_scale = ctx.saved_tensors
        values_type, weight_type = ctx.types
        gradient, scale = _scale(gradients[0], torch.float8_e5m2)
        of_values = _multiply_scaled((gradient, scale), (_transposed(weight), weight_scale), values_type)
        of_weight = _multiply_scaled((_transposed(gradient), scale), (_transposed(values), values_scale), weight_type)
        return of_values, of_weight


def _scale(tensor: Tensor, dtype: torch.dtype) -> Scaled:
    largest = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / largest).clamp(min=LEAST_SCALE)
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def _multiply_scaled(left: Scaled, right: Scaled, out: torch.dtype) -> Tensor:
    """Return left (N, K) times the transposed right (O, K); both lie row by row in memory."""
    product: Tensor = torch._scaled_mm(left[0], right[0].t(), scale_a=left[1], scale_b=right[1], out_dtype=out)
    return product


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.t().contiguous()


def join_rows(*matrices: Tensor) -> Tensor:
    """Return one matrix with the rows of all `matrices`, which have equally many columns.

    A large result shares the memory of its parts if they are neighbours.
    """
    if torch.compiler.is_compiling() or sum(matrix.numel() for matrix in matrices) < COPY_ELEMENTS:
        return torch.cat(matrices)
    if not _are_neighbours(matrices):
        return torch.cat(matrices)
    return _SharedRows.apply(*matrices)  # type: ignore[no-any-return, no-untyped-call]


def _are_neighbours(matrices: Sequence[Tensor]) -> bool:
    address, storage = matrices[0].data_ptr(), matrices[0].untyped_storage().data_ptr()
    for matrix in matrices:
        in_place = matrix.data_ptr() == address and matrix.untyped_storage().data_ptr() == storage
        if not in_place or not matrix.is_contiguous():
            return False
        address += matrix.nbytes
    return True


class _SharedRows(torch.autograd.Function):
    """Concatenate rows that are neighbours in memory, without a copy."""

    @staticmethod
    def forward(ctx: Any, *matrices: Tensor) -> Tensor:
        ctx.rows = [len(matrix) for matrix in matrices]
        first = matrices[0].detach()
        return first.as_strided((sum(ctx.rows), first.shape[1]), first.stride())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return torch.split(gradients[0], ctx.rows)
