"""Keep how our last contributions were made, for the case that one of them is audited."""

from collections import deque
from collections.abc import Collection
from typing import Protocol

from node.daemon.audits.inner_state import InnerState
from node.trainer.ipc.channel import ContributionHeader
from node.trainer.ipc.shared_memory import SharedMemory
from protocol.audits import BlobName, WorkRecord
from protocol.blobs.blob import Blob, Bytes
from protocol.consensus.messages.signed import Digest

KEPT_STATES = 4  # an audit begins at the commit, which may be MAX_AGE_ROUNDS after the contribution
KEPT_RECORDS = 64


class BlobSink(Protocol):
    def put(self, *data: Bytes) -> Blob: ...


class WorkKeeper:
    """Writes a work record and the inner state for each contribution of one trainer, and keeps the last ones."""

    def __init__(self, store: BlobSink, memory: SharedMemory) -> None:
        self._store = store
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
        """Store the record and the state of the newest contribution; return the record's name."""
        if header.trace.start is not None:
            self._before, self._previous, self._position = None, None, 0
        state = InnerState.copy_of(self._memory, header.serial)
        after = None if state is None else self._store.put(*state.to_bytes())
        record = WorkRecord(
            round=header.round,
            position=self._position,
            before=self._before,
            after=None if after is None else BlobName.of(after),
            previous=self._previous,
            trace=header.trace,
            conditions=header.conditions,
        )
        blob = self._store.put(record.to_bytes())
        self._previous, self._before = BlobName.of(blob), record.after
        self._position = 0 if state is None else state.counters.position
        self._records.append(blob.digest)
        if after is not None:
            self._states.append(after.digest)
        return blob
