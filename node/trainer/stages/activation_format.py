"""The formats in which activations and their gradients travel between stages (`pipeline.activations`).

A trainer encodes and decodes them on its device. Values that are not finite are neither sent nor taken.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from optim.codecs.int8_on_device import decode_int8, encode_int8
from optim.errors import CodecError


class ActivationFormat(ABC):
    """A format; `PipelineSection.activation_bytes` gives the size of its payloads."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Return the payload (bytes,) uint8 of a tensor on its device. Raises CodecError if a value is not finite."""

    @abstractmethod
    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return fp32 values of this shape on the payload's device. Raises CodecError for a malformed payload."""

    def round_trip(self, values: Tensor) -> Tensor:
        """Return the values as the next stage receives them."""
        return self.decode(self.encode(values), tuple(values.shape))


@dataclass(frozen=True)
class FloatFormat(ActivationFormat):
    """Floating-point numbers of one type."""

    dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        """Return the numbers, rounded to nearest."""
        return _require_finite(values.detach().to(self.dtype).contiguous()).view(-1).view(torch.uint8)

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the numbers, in the payload's memory if they are fp32."""
        return _require_finite(payload.view(self.dtype).float()).view(shape)


class Int8Format(ActivationFormat):
    """Integers of 8 bits with a scale for each block of 256, as the codec `int8` of contributions."""

    def encode(self, values: Tensor) -> Tensor:
        """Return header, scales and integers."""
        return encode_int8(values)

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return integers times scales."""
        return decode_int8(payload, math.prod(shape)).view(shape)


FORMATS: Final[dict[str, ActivationFormat]] = {
    "fp32": FloatFormat(torch.float32),
    "bf16": FloatFormat(torch.bfloat16),
    "int8": Int8Format(),
}


def _require_finite(values: Tensor) -> Tensor:
    if not bool(torch.isfinite(values).all()):
        raise CodecError("a value is not finite")
    return values
