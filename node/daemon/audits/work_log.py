"""Log how our last contributions were made, for audits: a work record and the trainer's inner state for each.

The inner state has one encoding, so that auditors can compare it by hash:

4 bytes    length of the header, big endian
header     JSON of the counters without the seconds, padded with spaces so that the vectors are aligned
vectors    raw little-endian fp32, in the order of the shared memory's layout
outbox     the parts of the outstanding contribution
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from pydantic import ValidationError
from torch import Tensor

from node.loop.contributions import StoredContribution
from node.trainer.counters import Counters
from node.trainer.ipc.channel import ContributionHeader
from node.trainer.ipc.shared_memory import MAX_META_BYTES, SharedLayout, SharedMemory
from protocol.audits import MAX_POSITION, MAX_STEPS, BlobName, WorkRecord, WorkTrace
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.messages.signed import Digest
from protocol.errors import MalformedError
from protocol.fault_words import describe_faults

_LENGTH_BYTES = 4
_ALIGNMENT = 64
FLOAT_BYTES = 4
KEPT_STATES = 5  # an audit begins a round after the commit, which may be MAX_AGE_ROUNDS after the contribution
KEPT_RECORDS = 64


@dataclass(frozen=True)
class InnerState:
    """The state of a trainer right after a contribution; `outbox` holds the contribution's parts."""

    counters: Counters
    vectors: Mapping[str, Tensor]
    outbox: bytes

    @classmethod
    def copy_of(cls, memory: SharedMemory, serial: int) -> "InnerState | None":
        """Copy the newest snapshot; `None` unless it was taken right after contribution `serial`."""
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
        """Encode the state, piece by piece, without a copy of the vectors."""
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
            raise MalformedError(f"an inner state of {len(raw)} bytes, which is the wrong size")
        vectors = {
            name: torch.frombuffer(raw, dtype=layout.dtype(name), count=size, offset=offset)
            for (name, size), offset in zip(layout.vectors, ends, strict=False)
        }
        return cls(counters, vectors, bytes(raw[ends[-1] :]))


def max_state_bytes(layout: SharedLayout) -> int:
    """Return the maximal size of an encoded inner state."""
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


def record_interrupted(put: Callable[..., Blob], contribution: StoredContribution) -> StoredContribution:
    """Give a contribution from before a restart a record, if it has none: nobody can repeat its work."""
    if contribution.work is not None:
        return contribution
    header = contribution.header
    trace = WorkTrace(obstacle="its peer was restarted")
    record = WorkRecord(
        round=header.round,
        position=0,
        before=None,
        after=None,
        previous=None,
        trace=trace,
        conditions=header.conditions,
    )
    return replace(contribution, work=put(record.to_bytes()))


class WorkLog:
    """Writes a work record and the inner state for each contribution of one trainer, and keeps the newest.

    `put` stores the bytes of a blob.
    """

    def __init__(self, put: Callable[..., Blob], memory: SharedMemory) -> None:
        self._put = put
        self._memory = memory
        self._before: BlobName | None = None
        self._position = 0
        self._previous: BlobName | None = None
        self._states: deque[Digest] = deque(maxlen=KEPT_STATES)
        self._records: deque[Digest] = deque(maxlen=KEPT_RECORDS)

    @property
    def kept_digests(self) -> Collection[Digest]:
        """Return the blobs that an auditor may ask for."""
        return [*self._states, *self._records]

    def record(self, header: ContributionHeader) -> Blob:
        """Store the record and the state of the newest contribution, and return the record's blob."""
        if header.trace.start is not None:
            self._before, self._previous, self._position = None, None, 0
        state = InnerState.copy_of(self._memory, header.serial)
        after = None if state is None else self._put(*state.to_bytes())
        record = WorkRecord(
            round=header.round,
            position=self._position,
            before=self._before,
            after=None if after is None else BlobName.of(after),
            previous=self._previous,
            trace=header.trace,
            conditions=header.conditions,
        )
        blob = self._put(record.to_bytes())
        self._previous, self._before = BlobName.of(blob), record.after
        self._position = 0 if state is None else state.counters.position
        self._records.append(blob.digest)
        if after is not None:
            self._states.append(after.digest)
        return blob
