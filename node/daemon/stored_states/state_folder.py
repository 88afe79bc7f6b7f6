"""Store one state of a run in a node's folder: as a blob for other peers, and as a checkpoint for users.

The blob stays on disk, and the checkpoint is written from a mapping of it, so that a host with little memory can store
a large model.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from node.daemon.checkpoints import checkpoint
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain
from node.daemon.run_limits import contribution_limits, max_store_bytes
from node.daemon.state.contributions import TRACKER_KEY
from node.daemon.state.outer_state import OuterState, state_bytes
from node.model import cut_of, shapes_of
from node.model.weight_files import start_weights
from node.run_dir import RunDir
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.blobs.storage import disk_errors
from protocol.blobs.store import BlobStore
from protocol.consensus.chain import Chain, ChainHead, ChainLog
from protocol.errors import MalformedError
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import stage_of

MIN_STAGE_CHECKPOINTS = 2  # while states arrive, stages are a round apart; they join only at a common round
STATE_KEY = "state"  # in the chain's table of a checkpoint: the digest of the state
VALIDATION_KEY = "validation"  # the newest validation: round and loss


@dataclass(frozen=True)
class ReportedLoss:
    """The newest validation loss of a run, as its peers report it; round 0 means that there is none."""

    round: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class StoredState:
    """A state, the head of its chain, and the last commits that lead to it."""

    head: ChainHead
    log: ChainLog
    blob: Blob
    validation: ReportedLoss = ReportedLoss()


class StateFolder:
    """The blobs and the checkpoints of a node that does not train."""

    def __init__(self, run_dir: RunDir, manifest: Manifest, planner: RoundPlanner) -> None:
        self._run_dir = run_dir
        self._manifest = manifest
        self._planner = planner
        self._shapes = shapes_of(manifest)
        self.state_bytes = state_bytes(planner.numel, planner.method)
        self.store = BlobStore(run_dir.blobs, max_store_bytes(planner))  # all of it on disk

    def load(self) -> StoredState | None:
        """Return the state of the newest checkpoint. Raises CheckpointError or OtherRunError."""
        saved = checkpoint.load_newest_chain(self._run_dir.checkpoints, self._manifest.run_id, self._shapes)
        if saved is None:
            return None
        chain, name = self._restore(saved), saved.table.get(STATE_KEY)
        if isinstance(name, str) and self.store.has(bytes.fromhex(name)):
            round_number, loss = saved.table.get(VALIDATION_KEY) or (0, 0.0)
            validation = ReportedLoss(int(round_number), float(loss))
            return StoredState(chain.head, chain.log, self.store.blob(bytes.fromhex(name)), validation)
        return self._restore_blob()

    def first_state(self, base: Path) -> StoredState | None:
        """Return the state of round 0 of a run that starts from weights; `None` if this machine lacks them.

        While no peer with the weights trains, newcomers can get them only here. Raises MurmurError for wrong weights.
        """
        manifest = self._manifest
        weights = start_weights(manifest, base, cut_of(manifest)) if manifest.model.weights else None
        if weights is None:
            return None
        blob = self.store.put(*OuterState.initial(weights, self._planner.method).byte_views())
        chain = Chain.from_genesis(manifest.run_id, manifest.admission)
        return StoredState(chain.head, chain.log, blob)

    def _restore_blob(self) -> StoredState | None:
        """Rebuild the blob of a checkpoint without one: the node trained before, or the blob was removed."""
        saved, _ = checkpoint.load_newest(self._run_dir.checkpoints, self._manifest.run_id, self._shapes)
        if saved is None:
            return None
        blob = self.store.put(*OuterState(saved.anchor, saved.outer).byte_views())
        chain = self._restore(saved.chain)
        return StoredState(chain.head, chain.log, blob)

    def _restore(self, saved: SavedChain) -> Chain:
        return saved.restore(self._manifest.admission, contribution_limits(self._manifest, self._planner))

    def save(self, kept: StoredState) -> None:
        """Write a checkpoint of a state whose blob is complete.

        Raises:
            MalformedError: The state is not finite or not of this run.
            StorageError: The disk is full or fails; the checkpoint before it is kept.
        """
        state, head = self.map_state(kept.blob), kept.head
        saved = Checkpoint(
            run_id=self._manifest.run_id,
            shapes=self._shapes.hash(),
            round=head.round,
            digest=head.digest,
            chain=SavedChain.of(
                head,
                kept.log,
                **{
                    TRACKER_KEY: None,
                    STATE_KEY: kept.blob.name,
                    VALIDATION_KEY: [kept.validation.round, kept.validation.loss],
                },
            ),
            anchor=state.anchor,
            outer=dict(state.slots),
            inner={},
            inner_meta={},
        )
        keep = self._manifest.checkpoint.keep
        if stage_of(self._manifest) is not None:
            keep = max(MIN_STAGE_CHECKPOINTS, keep)
        checkpoint.save(self._run_dir.checkpoints, saved, self._shapes, keep)

    def retain(self, *digests: bytes) -> None:
        """Remove all other blobs, except the ones in download."""
        self.store.retain(digests)

    def requested(self, digests: Collection[bytes]) -> set[bytes]:
        """Return the digests whose blobs are in this folder."""
        return {digest for digest in digests if self.store.has(digest)}

    def map_state(self, blob: Blob) -> OuterState:
        """Return a state whose blob is complete; its vectors stay on disk until they are read.

        Raises MalformedError if it is not finite or not of this run.
        """
        path = self.store.path(blob.digest)
        with disk_errors(path), path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # lives as long as the tensors
        if len(mapped) != self.state_bytes:
            raise MalformedError(f"the state has {len(mapped)} bytes instead of {self.state_bytes}")
        return OuterState.from_bytes(mapped, self._planner.numel, self._planner.method)
