"""Write the inner state of a trainer as bytes with one encoding, and check the bytes of others.

4 bytes    length of the header, big endian
header     JSON of the counters without the seconds, padded with spaces so that the vectors are aligned
vectors    raw little-endian fp32, in the order of the shared memory's layout
outbox     the parts of the outstanding contribution
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from pydantic import ValidationError
from torch import Tensor

from node.trainer.counters import Counters
from node.trainer.ipc.shared_memory import MAX_META_BYTES, SharedLayout, SharedMemory
from protocol.audits import MAX_POSITION, MAX_STEPS
from protocol.blobs.blob import Bytes
from protocol.errors import MalformedError
from protocol.fault_words import describe_faults

_LENGTH_BYTES = 4
_ALIGNMENT = 64
FLOAT_BYTES = 4


@dataclass(frozen=True)
class InnerState:
    """The state of a trainer right after a contribution; `outbox` holds the parts of that contribution."""

    counters: Counters
    vectors: Mapping[str, Tensor]
    outbox: bytes

    @classmethod
    def copy_of(cls, memory: SharedMemory, serial: int) -> "InnerState | None":
        """Copy the newest snapshot; None unless it is the one right after contribution number `serial`."""
        copied = memory.copy_snapshot()
        if copied is None:
            return None
        counters = Counters.model_validate(copied[0].meta)
        if counters.messages != serial or counters.outstanding is None or counters.anchors:
            return None
        if counters.since_message.steps or counters.position < 0:
            return None
        return cls(counters, copied[0].vectors, copied[1][: sum(counters.outstanding.sizes)])

    def to_bytes(self) -> tuple[Bytes, ...]:
        """Return the bytes, piece by piece, without a copy of the vectors."""
        values = self.counters.model_dump(mode="json", exclude={"seconds"})
        header = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + _LENGTH_BYTES) % _ALIGNMENT)
        vectors = [vector.numpy().data.cast("B") for vector in self.vectors.values()]
        return len(header).to_bytes(_LENGTH_BYTES, "big"), header, *vectors, self.outbox

    @classmethod
    def from_bytes(cls, raw: bytearray, layout: SharedLayout) -> "InnerState":
        """Parse the state of another peer. Raises MalformedError."""
        start = _LENGTH_BYTES + int.from_bytes(raw[:_LENGTH_BYTES], "big")
        if start > min(len(raw), MAX_META_BYTES) or start % _ALIGNMENT:
            raise MalformedError("an inner state without a header")
        counters = _parse_counters(bytes(raw[_LENGTH_BYTES:start]))
        assert counters.outstanding is not None
        ends = list(accumulate((layout.vector_bytes(*entry) for entry in layout.vectors), initial=start))
        outbox_bytes = sum(counters.outstanding.sizes)
        if outbox_bytes > layout.contribution_bytes or len(raw) != ends[-1] + outbox_bytes:
            raise MalformedError(f"an inner state of {len(raw)} bytes, which are too few or too many")
        vectors = {
            name: torch.frombuffer(raw, dtype=layout.dtype(name), count=size, offset=offset)
            for (name, size), offset in zip(layout.vectors, ends, strict=False)
        }
        return cls(counters, vectors, bytes(raw[ends[-1] :]))


def max_state_bytes(layout: SharedLayout) -> int:
    """Return the most bytes that an inner state may have."""
    return MAX_META_BYTES + sum(layout.vector_bytes(*entry) for entry in layout.vectors) + layout.contribution_bytes


def _parse_counters(header: bytes) -> Counters:
    try:
        counters = Counters.model_validate_json(header)
    except ValidationError as error:
        raise MalformedError(f"the header of an inner state: {describe_faults(error)}") from error
    if counters.outstanding is None or counters.seconds or counters.anchors or counters.obstacle:
        raise MalformedError("an inner state that is not right after a contribution")
    if max(counters.step, counters.began) > MAX_STEPS or counters.position > MAX_POSITION:
        raise MalformedError("an inner state whose counters are out of range")
    return counters
