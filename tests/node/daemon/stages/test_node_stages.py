"""A node with two stages: its record, and whose work a call is."""

from typing import Any, cast

from node.daemon.stages.stage_effects import NodeStages
from node.daemon.stages.stage_peers import lowest_round, stage_peers
from node.daemon.stages.stage_record import StageRecords
from protocol.blobs.blob import hash_of
from protocol.membership.peer_table import FieldValue
from protocol.membership.record_fields import record_of_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.owner_events import OutcomeReceived
from protocol.pipeline.server_events import ReleasedBy
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST, admitted_of

CUT = MANIFEST.model_copy(update={"pipeline": MANIFEST.pipeline.model_copy(update={"stages": 2, "microbatch": 1})})
FIRST, SECOND = (StageManifest.of(CUT, stage) for stage in (0, 1))


class Directory:
    """Keeps what was published."""

    def __init__(self) -> None:
        self.record = PeerRecord(role="trainer")

    def publish(self, *, urgent: bool = False, **fields: FieldValue) -> None:
        for name, value in fields.items():
            setattr(self.record, name, value)

    update = publish


class Stage:
    """In the place of StageEffects."""

    def __init__(self, *blobs: bytes) -> None:
        self.calls: list[object] = []
        self.store = self
        self.blobs = {hash_of(blob): blob for blob in blobs}

    def answer(self, task: Any) -> None:
        self.calls.append(task.run)

    def post(self, event: object) -> None:
        self.calls.append(event)

    def has(self, digest: bytes) -> bool:
        return digest in self.blobs

    def view(self, digest: bytes) -> bytes:
        return self.blobs[digest]


class Task:
    def __init__(self, run: str) -> None:
        self.run = run


def test_record_has_the_head_of_each_stage() -> None:
    directory = Directory()
    records = StageRecords(cast(Any, directory))
    first, second = records.record_of(FIRST), records.record_of(SECOND)
    first.publish(stage=1, stage_life=5, round=8, step=77)
    second.publish(stage=2, stage_life=6, stage_rate=2.0)
    second.publish(urgent=True, round=7, digest=bytes(32), step=3)
    second.update(stage_rate=3.0)
    seen = record_of_stage(directory.record, 1)
    assert seen is not None and (seen.round, seen.stage_life, seen.stage_rate, seen.digest) == (7, 6, 3.0, bytes(32))
    assert (directory.record.round, directory.record.stage, directory.record.step) == (8, 1, 77)
    stages = stage_peers({"me": directory.record}, 2, ["me"])
    assert [[(entry.life, entry.round) for entry in peers] for peers in stages] == [[(5, 8)], [(6, 7)]]
    assert lowest_round([directory.record], own_stage=0) == 7


def test_calls_reach_the_stage_that_they_concern_and_outcomes_the_first() -> None:
    node, one, other = NodeStages(admitted_of(Directory(), stages=2), cast(Any, None)), Stage(b"ours"), Stage(b"theirs")
    first, second = node.records.record_of(FIRST), node.records.record_of(SECOND)
    node.add("first", cast(Any, one))
    node.add("second", cast(Any, other))
    node.answer(cast(Any, Task("second")))
    node.answer(cast(Any, Task("unknown")))
    node.take_outcome("peer", cast(Any, "outcome"))
    node.release("peer", "second", (1,))
    node.release("peer", "unknown", (2,))
    assert (one.calls, other.calls) == (
        ["unknown", OutcomeReceived("peer", cast(Any, "outcome"))],
        ["second", ReleasedBy("peer", (1,))],
    )
    assert [first.is_first, second.is_first] == [True, False]
    assert node.blobs.view(hash_of(b"theirs")) == b"theirs" and node.blobs.view(bytes(32)) is None
