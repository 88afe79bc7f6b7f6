"""Show the stages that a node serves in its peer record.

A node that serves several stages has a replica for each. The first replica reads the node's text and owns its
microbatches. Its head is in the main fields of the record; the heads of the others are in `more_stages`.
"""

from dataclasses import asdict, replace
from typing import Any

from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import FieldValue
from protocol.membership.record_fields import ServedStage, encode_served_stages
from protocol.pipeline.exact import StepDecisions
from protocol.pipeline.stage import StageManifest

ENTRY_FIELDS = frozenset(asdict(ServedStage(0))) - {"stage"}


class StageRecord:
    """The fields of one stage in the record of its node."""

    def __init__(self, records: "StageRecords", manifest: StageManifest) -> None:
        self.stage = manifest.stage
        self.timing = manifest.membership
        self._records = records

    @property
    def decisions(self) -> StepDecisions | None:
        """Return how all stages decide exact steps; None where steps are not exact."""
        return self._records.decisions

    @property
    def is_first(self) -> bool:
        """Whether the replica of this stage reads the text of the node."""
        return self.stage == self._records.first

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        """Set fields of the stage, and publish the record."""
        self._records.directory.publish(urgent=urgent, **self._records.fields_of(self.stage, fields))

    def update(self, **fields: FieldValue) -> None:
        """Set fields of the stage, to be published with the next renewal of the record."""
        self._records.directory.update(**self._records.fields_of(self.stage, fields))


class StageRecords:
    """The stages of one node, in the order in which it began to serve them.

    `decisions`: how all stages of the run decide exact steps; None where steps are not exact.
    """

    def __init__(self, directory: PeerDirectory, decisions: StepDecisions | None = None) -> None:
        self.directory = directory
        self.decisions = decisions
        self.first: int | None = None
        self._others: dict[int, ServedStage] = {}

    def record_of(self, manifest: StageManifest) -> StageRecord:
        """Return the record of a stage; the first stage requested owns the node's microbatches."""
        if self.first is None:
            self.first = manifest.stage
        return StageRecord(self, manifest)

    def fields_of(self, stage: int, fields: dict[str, FieldValue]) -> dict[str, FieldValue]:
        """Convert fields of a stage to fields of our record."""
        if stage == self.first:
            return fields
        changes: dict[str, Any] = {name: fields[name] for name in ENTRY_FIELDS & fields.keys()}
        self._others[stage] = replace(self._others.get(stage, ServedStage(stage)), **changes)
        return {"more_stages": encode_served_stages(self._others.values())}
