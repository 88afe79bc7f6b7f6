"""The interface of codecs: from values to bytes, and from untrusted bytes back to a vector.

A payload starts with the codec's number and the version of its format. Its length, counts and contents are checked
against what this peer expects before anything of that size is allocated; `numel` is always ours, never from the wire.
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
SAMPLE_SIZE = 1 << 20  # enough values to measure a codec's bits per parameter


@dataclass(frozen=True)
class Binding:
    """The facts about a contribution that all members know before they receive it."""

    layout: Layout
    round_number: int


class Codec(ABC):
    """A wire format.

    Parts of a vector that are encoded separately start at multiples of `alignment`. `binding` is not an option: codecs
    with the same options are equal whether they are bound or not.
    """

    kind: ClassVar[str]
    number: ClassVar[int]
    version: ClassVar[int]
    is_contractive: ClassVar[bool] = True  # the residual is shorter than the encoded vector
    binding: Binding | None = None

    @property
    def alignment(self) -> int:
        return 1

    @property
    def depends_on_round(self) -> bool:
        """Return whether the same bytes decode to other values in another round."""
        return False

    def bind(self, layout: Layout, round_number: int) -> Self:
        """Return this codec for vectors of these tensors in that round; most codecs use neither."""
        bound = copy.copy(self)
        object.__setattr__(bound, "binding", Binding(layout, round_number))
        return bound

    def encode(self, values: torch.Tensor) -> Payload:
        """Encode flat fp32 values on the CPU, at least one.

        Raises:
            CodecError: a value is not finite or beyond the format's range.
        """
        return self.encode_array(as_array(values), subtract=False)

    def encode_and_subtract(self, values: torch.Tensor) -> Payload:
        """Encode `values`, and subtract in place what the receiver will decode; `values` is invalid after an error."""
        return self.encode_array(as_array(values), subtract=True)

    def encode_updated(self, update: ResidualUpdate, values: torch.Tensor) -> Payload:
        """Apply an update to `values` in place, then encode and subtract."""
        update.apply(as_array(values))
        return self.encode_and_subtract(values)

    def decode(self, payload: Payload, numel: int) -> torch.Tensor:
        """Decode to flat fp32 of `numel` values, all finite.

        Raises:
            CodecError: the payload is malformed or has another length.
        """
        return torch.from_numpy(self.decode_vector(payload, numel).to_dense())

    def bits_per_parameter(self, numel: int) -> float:
        """Return the bits per parameter, measured on the encoded bytes of normally distributed values."""
        sample = np.random.default_rng(0).standard_normal(min(numel, SAMPLE_SIZE), np.float32)
        return 8 * len(self.encode_array(sample, subtract=False)) / sample.size

    @abstractmethod
    def max_bytes(self, numel: int) -> int:
        """Return the largest size of a payload of `numel` values."""

    @abstractmethod
    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        """Encode an array, and subtract the decoded values from it if `subtract`."""

    @abstractmethod
    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        """Check the whole payload and decode it.

        Raises:
            CodecError: the payload is malformed; the text says how.
        """

    def bound_layout(self, numel: int) -> Layout | None:
        """Return the layout that this codec is bound to, if any.

        Raises:
            ValueError: the layout does not have `numel` values.
        """
        if self.binding is None:
            return None
        layout = self.binding.layout
        if layout.numel != numel:
            raise ValueError(f"{numel} values for a codec that is bound to tensors of {layout.numel}")
        return layout

    def header(self) -> bytes:
        return struct.pack("<BB", self.number, self.version)

    def open_payload(self, payload: Payload, numel: int) -> "PayloadReader":
        """Return a reader positioned after the header, after checking the length and the header."""
        limit = self.max_bytes(numel)
        if len(payload) > limit:
            raise CodecError(f"payload of {len(payload)} bytes; {numel} values take at most {limit}")
        reader = PayloadReader(payload)
        number, version = reader.read("u1", 2).tolist()
        if (number, version) != (self.number, self.version):
            raise CodecError(f"codec {number} version {version}; expected {self.number} version {self.version}")
        return reader


class PayloadWriter:
    """A payload of known length, `size` bytes after its header, written in place.

    Joining arrays would take as long as encoding them. The memory is reused once the payload is dropped.
    """

    def __init__(self, header: bytes, size: int) -> None:
        before = -len(header) % ALIGNMENT  # the bytes after the header are aligned
        self._whole = empty_bytes(before + len(header) + size)[before:]
        self._whole[: len(header)] = np.frombuffer(header, np.uint8)
        self._position = len(header)

    def reserve(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return writable space for `count` little-endian values."""
        kind = np.dtype(dtype).newbyteorder("<")
        first, self._position = self._position, self._position + count * kind.itemsize
        return self._whole[first : self._position].view(kind)

    @property
    def payload(self) -> memoryview:
        return self._whole.data.toreadonly()


class PayloadReader:
    """Reads arrays from the front of a payload, never past its end."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._position = 0

    @property
    def remaining(self) -> int:
        return len(self._payload) - self._position

    def read(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return `count` little-endian values as a read-only view."""
        kind = np.dtype(dtype).newbyteorder("<")
        if self.remaining < count * kind.itemsize:
            raise CodecError(f"payload ends {count * kind.itemsize - self.remaining} bytes early")
        values = np.frombuffer(self._payload, kind, count, self._position)
        values.flags.writeable = False  # numba compiles a kernel again for writable arrays
        self._position += count * kind.itemsize
        return values

    def read_rest(self) -> memoryview:
        """Return all remaining bytes as a view."""
        rest = memoryview(self._payload)[self._position :]
        self._position = len(self._payload)
        return rest

    def expect_end(self) -> None:
        if self.remaining:
            raise CodecError(f"{self.remaining} bytes after the end of the payload")


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return rows and columns: dimensions after the first are merged, and a vector is one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def as_array(values: torch.Tensor) -> Floats:
    """Return the tensor's own memory as an array."""
    if values.dtype != torch.float32 or values.dim() != 1 or values.device.type != "cpu" or not values.is_contiguous():
        raise ValueError("a codec needs flat contiguous fp32 tensors on the CPU")
    if not values.numel():
        raise ValueError("nothing to encode")
    array: Floats = values.detach().numpy()
    return array
