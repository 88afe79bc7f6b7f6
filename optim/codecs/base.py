"""What every codec offers: values to bytes, and untrusted bytes back to a vector.

A payload starts with the codec's number and the version of its format. Its length, counts and contents are checked
against what this peer expects (`numel` is ours, never the wire's) before anything of that size is allocated.
"""

import copy
import math
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from optim.codecs.residual_update import ResidualUpdate
from optim.errors import CodecError
from optim.kernels.buffer_pool import empty_bytes
from optim.kernels.parallel import ALIGNMENT
from optim.kernels.vectors import Floats, Vector
from optim.layout import Layout, Shape

Payload = bytes | bytearray | memoryview
SAMPLE_SIZE = 1 << 20  # values that are enough to tell a codec's rate


@dataclass(frozen=True)
class Binding:
    """What all members know of a message before they have it."""

    layout: Layout
    round_number: int


class Codec(ABC):
    """A wire format. `alignment`: parts of a vector that are encoded apart start at multiples of it. `binding` is no
    option: codecs with the same options are equal, bound or not."""

    kind: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int]
    is_contractive: ClassVar[bool] = True  # what a message leaves over is shorter than what was to be sent
    binding: Binding | None = None

    @property
    def alignment(self) -> int:
        return 1

    @property
    def depends_on_round(self) -> bool:
        """Whether the same bytes are other values in another round."""
        return False

    def bind(self, layout: Layout, round_number: int) -> Self:
        """This codec for vectors of these tensors in that round. Most codecs care for neither."""
        bound = copy.copy(self)
        object.__setattr__(bound, "binding", Binding(layout, round_number))
        return bound

    def encode(self, values: torch.Tensor) -> Payload:
        """`values`: flat fp32 on the CPU, not empty. CodecError if one is not finite or beyond the format's range."""
        return self.encode_array(as_array(values), subtract=False)

    def encode_and_subtract(self, values: torch.Tensor) -> Payload:
        """As `encode`, and subtract in place what the receiver will decode; `values` is of no use after an error."""
        return self.encode_array(as_array(values), subtract=True)

    def encode_updated(self, update: ResidualUpdate, values: torch.Tensor) -> Payload:
        """The same of what `values` become by that, in place."""
        update.apply(as_array(values))
        return self.encode_and_subtract(values)

    def decode(self, payload: Payload, numel: int) -> torch.Tensor:
        """Flat fp32 of `numel` values, all finite. CodecError if the payload is malformed or of another length."""
        return torch.from_numpy(self.decode_vector(payload, numel).to_dense())

    def bits_per_parameter(self, numel: int) -> float:
        """Measured on the encoded bytes of normally distributed values."""
        sample = np.random.default_rng(0).standard_normal(min(numel, SAMPLE_SIZE), np.float32)
        return 8 * len(self.encode_array(sample, subtract=False)) / sample.size

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """No payload of `numel` values is longer."""

    @abstractmethod
    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        """`encode` or `extract` on an array."""

    @abstractmethod
    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        """Check everything and decode; CodecError says what is wrong."""

    def bound_layout(self, numel: int) -> Layout | None:
        """The tensors that this codec was bound to, if it was. ValueError unless they have `numel` values."""
        if self.binding is None:
            return None
        layout = self.binding.layout
        if layout.numel != numel:
            raise ValueError(f"{numel} values for a codec that was bound to tensors of {layout.numel}")
        return layout

    def header(self) -> bytes:
        return struct.pack("<BB", self.number, self.version)

    def open_payload(self, payload: Payload, numel: int) -> "PayloadReader":
        """A reader behind the head, after what can be told from the length and the head alone."""
        limit = self.max_bytes(numel)
        if len(payload) > limit:
            raise CodecError(f"payload of {len(payload)} bytes where {numel} values take at most {limit}")
        reader = PayloadReader(payload)
        number, version = reader.read("u1", 2).tolist()
        if (number, version) != (self.number, self.version):
            raise CodecError(f"codec {number} version {version} where {self.number} version {self.version} was agreed")
        return reader


class PayloadWriter:
    """A payload whose length is known before, `size` bytes behind its head: written in place, as joining arrays takes
    as long as encoding them. Its memory is given out again once nobody holds the payload."""

    def __init__(self, header: bytes, size: int) -> None:
        before = -len(header) % ALIGNMENT  # what follows the head is aligned
        self._whole = empty_bytes(before + len(header) + size)[before:]
        self._whole[: len(header)] = np.frombuffer(header, np.uint8)
        self._position = len(header)

    def reserve(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Room for `count` little-endian values."""
        kind = np.dtype(dtype).newbyteorder("<")
        first, self._position = self._position, self._position + count * kind.itemsize
        return self._whole[first : self._position].view(kind)

    @property
    def payload(self) -> memoryview:
        return self._whole.data.toreadonly()


class PayloadReader:
    """Takes arrays off the front of a payload; never past its end."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._position = 0

    @property
    def remaining(self) -> int:
        return len(self._payload) - self._position

    def read(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """`count` little-endian values of `dtype`, not copied, to be read only."""
        kind = np.dtype(dtype).newbyteorder("<")
        if self.remaining < count * kind.itemsize:
            raise CodecError(f"payload ends {count * kind.itemsize - self.remaining} bytes early")
        values = np.frombuffer(self._payload, kind, count, self._position)
        values.flags.writeable = False  # numba compiles a kernel again for writable arrays
        self._position += count * kind.itemsize
        return values

    def read_rest(self) -> memoryview:
        """All that is left, not copied."""
        rest = memoryview(self._payload)[self._position :]
        self._position = len(self._payload)
        return rest

    def expect_end(self) -> None:
        if self.remaining:
            raise CodecError(f"{self.remaining} bytes after the end of the payload")


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Rows and columns: all dimensions behind the first are one; a vector is a row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def as_array(values: torch.Tensor) -> Floats:
    """The tensor's own memory as an array."""
    if values.dtype != torch.float32 or values.dim() != 1 or values.device.type != "cpu" or not values.is_contiguous():
        raise ValueError("a codec takes flat contiguous fp32 tensors on the CPU")
    if not values.numel():
        raise ValueError("nothing to encode")
    array: Floats = values.detach().numpy()
    return array
