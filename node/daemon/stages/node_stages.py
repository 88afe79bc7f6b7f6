"""The stages of a pipeline that one node serves: whose work a call is, and what the peer record says of each.

A node that serves several stages has a replica for each. The first one reads the text of the node and owns its
microbatches; its head is in the record's own fields, and those of the others are in `more_stages`.
"""

from dataclasses import asdict, replace
from typing import Any, Protocol

from node.daemon.stages.service import StagePeer
from protocol.blobs.blob import Bytes
from protocol.blobs.store import BlobStore
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import FieldValue
from protocol.membership.records.served_stages import ServedStage, encode_served_stages
from protocol.murmur_pb2 import StepStatement
from protocol.pipeline.messages import Answer, Outcome, Task
from protocol.pipeline.stages.stage import StageManifest

ENTRY_FIELDS = frozenset(asdict(ServedStage(0))) - {"stage"}


class ServedPipeline(StagePeer, Protocol):
    """The pipeline of one replica; Pipeline."""

    @property
    def store(self) -> BlobStore:
        """Return the blobs that other peers fetch."""


class NodeStages:
    """The pipelines of a node by run id. A node of one stage has one."""

    def __init__(self, directory: PeerDirectory) -> None:
        self.directory = directory
        self._pipelines: dict[RunId, ServedPipeline] = {}
        self._first: int | None = None
        self._others: dict[int, ServedStage] = {}

    def __bool__(self) -> bool:
        return bool(self._pipelines)

    def __len__(self) -> int:
        return len(self._pipelines)

    def add(self, run: RunId, pipeline: ServedPipeline) -> None:
        """Pass the calls for a stage to its pipeline."""
        self._pipelines[run] = pipeline

    def board_of(self, manifest: StageManifest) -> "StageBoard":
        """Return the place where the replica of a stage shows its state."""
        if self._first is None:
            self._first = manifest.stage
        return StageBoard(self, manifest)

    # Calls of peers, and of this node to itself.

    @property
    def _owner(self) -> ServedPipeline:
        return next(iter(self._pipelines.values()))

    def answer(self, task: Task) -> Answer:
        """Answer a task at once; the first stage answers for those that this node does not serve."""
        return self._pipelines.get(task.run, self._owner).answer(task)

    def take_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        """Take the outcome of a task of ours."""
        self._owner.take_outcome(peer, outcome)

    def release(self, peer: PeerId, run: RunId, serials: tuple[int, ...]) -> None:
        """Forget microbatches of a peer that have ended."""
        if run in self._pipelines:
            self._pipelines[run].release(peer, run, serials)

    def take_invitation(self, peer: PeerId, run: RunId) -> None:
        """Send forwards to a peer that has room again."""
        self._owner.take_invitation(peer, run)

    def take_statement(self, peer: PeerId, body: StepStatement) -> None:
        """Take what a server counts in the open exact step."""
        self._owner.take_statement(peer, body)

    def owns_microbatches(self, stage: int) -> bool:
        """Return whether the replica of this stage reads the text of the node."""
        return stage == self._first

    def view(self, digest: bytes) -> Bytes | None:
        """Return a blob that one of our stages holds for another."""
        stores = (pipeline.store for pipeline in self._pipelines.values())
        return next((store.view(digest) for store in stores if store.has(digest)), None)

    # The peer record.

    def fields_of(self, stage: int, fields: dict[str, FieldValue]) -> dict[str, FieldValue]:
        """Return the fields of our record that change with those of a stage."""
        if stage == self._first:
            return fields
        changes: dict[str, Any] = {name: fields[name] for name in ENTRY_FIELDS & fields.keys()}
        self._others[stage] = replace(self._others.get(stage, ServedStage(stage)), **changes)
        return {"more_stages": encode_served_stages(self._others.values())}


class StageBoard:
    """Shows the state of one stage in the record of its node."""

    def __init__(self, node: NodeStages, manifest: StageManifest) -> None:
        self.stage = manifest.stage
        self.timing = manifest.membership
        self.exact_stages = manifest.pipeline.stages if manifest.pipeline.is_exact else 0
        self._node = node

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        """Change fields of the record that concern the stage."""
        self._node.directory.publish(urgent=urgent, **self._node.fields_of(self.stage, fields))

    def update(self, **fields: FieldValue) -> None:
        """Change figures of the stage; the next renewal of the record carries them."""
        self._node.directory.update(**self._node.fields_of(self.stage, fields))
