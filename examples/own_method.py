"""A method of one's own: a codec that sends each value as one of three.

    murmur sim averaging averaging:codec.kind=ternary --import examples/own_method.py
    murmur up --recipe averaging:codec.kind=ternary --import examples/own_method.py

`docs/user/own-method.md` explains it.
"""

from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from optim.codecs.base import Codec, Payload
from optim.errors import CodecError
from optim.kernels.vectors import ArrayVector, Floats, Vector
from optim.options import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ternary(Codec):
    """Each value becomes -s, 0 or s: s is the mean size of the values above `threshold` times the mean size of all."""

    kind: ClassVar[str] = "ternary"
    number: ClassVar[int] = 200
    version: ClassVar[int] = 1
    threshold: float = Field(default=0.7, ge=0, le=4)

    def max_bytes(self, numel: int) -> int:
        return len(self.header()) + 4 + -(-numel // 4)

    def encode_array(self, values: Floats, subtract: bool) -> Payload:
        sizes = np.abs(values)
        if not sizes.max() < 2.0**47:  # not a number, infinite or too large
            raise CodecError("values must be finite and below 2^47")
        is_large = sizes > self.threshold * sizes.mean(dtype=np.float64)
        scale = np.float32(sizes[is_large].mean(dtype=np.float64) if is_large.any() else 0)
        codes = np.where(is_large, np.where(values < 0, 2, 1), 0).astype(np.uint8)
        if subtract:
            values -= self._values(codes, scale)
        quads = np.pad(codes, (0, -codes.size % 4)).reshape(-1, 4) << np.array([0, 2, 4, 6], np.uint8)
        packed: bytes = np.bitwise_or.reduce(quads, axis=1).tobytes()
        return self.header() + np.array(scale, "<f4").tobytes() + packed

    def decode_vector(self, payload: Payload, numel: int) -> Vector:
        reader = self.open_payload(payload, numel)
        scale, quads = reader.read("f4", 1)[0], reader.read("u1", -(-numel // 4))
        reader.expect_end()
        codes = (quads[:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1)
        if not 0 <= scale < 2.0**47 or codes[numel:].any() or (codes == 3).any():
            raise CodecError("a ternary payload with an invalid scale or code")
        return ArrayVector(self._values(codes[:numel], scale))

    @staticmethod
    def _values(codes: np.typing.NDArray[np.integer[Any]], scale: np.float32) -> Floats:
        values: Floats = np.array([0, scale, -scale], np.float32)[codes]
        return values
