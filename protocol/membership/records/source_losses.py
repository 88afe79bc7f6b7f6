"""The validation losses of the sources of a mixture, as a peer's record names them: doubles in the manifest's order."""

import math
import struct
from collections.abc import Iterable
from typing import Final

from protocol.errors import MalformedError
from protocol.manifest.sections import MAX_SOURCES

DOUBLE_BYTES: Final = 8


def encode_source_losses(losses: Iterable[float]) -> bytes:
    """Return the field of the record."""
    listed = tuple(losses)
    return struct.pack(f"<{len(listed)}d", *listed)


def parse_source_losses(data: bytes) -> tuple[float, ...]:
    """Return the losses in a field. Raises MalformedError."""
    count, rest = divmod(len(data), DOUBLE_BYTES)
    if rest or count > MAX_SOURCES:
        raise MalformedError(f"losses of sources in {len(data)} bytes")
    losses = struct.unpack(f"<{count}d", data)
    if not all(math.isfinite(loss) and loss >= 0 for loss in losses):
        raise MalformedError("a loss of a source that is negative or not finite")
    return losses
