"""Products of matrices in fp8, with one scale for each tensor (arXiv 2209.05433).

    scale(t) = max |t| / largest value of the type,   t8 = round(t / scale),   a b^T ~ scale(a) scale(b) a8 b8^T

Values and weights are in e4m3, which has 3 bits of mantissa; gradients in e5m2, which has a wider range. Scales follow
the tensor at hand, so nothing is carried from step to step. Sums are in fp32, and a value that is not finite makes the
product not finite.
"""

from typing import Any, Final, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from protocol.errors import DeviceError
from protocol.manifest.model import ModelSection

LEAST_CAPABILITY: Final = (8, 9)  # of NVIDIA's cards: Ada and Hopper, those from 2022 on
MULTIPLE: Final = 16  # the sizes of a product must be multiples of it
LEAST_SCALE: Final = 1e-30  # of a tensor of zeros
Scaled: TypeAlias = tuple[Tensor, Tensor]  # in fp8, and its scale () in fp32


def has_fp8(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in these types."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


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
