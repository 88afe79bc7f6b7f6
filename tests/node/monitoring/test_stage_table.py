"""The stages of a pipeline in `murmur status`."""

import asyncio
from functools import partial
from typing import get_args

from node.daemon.stages.stage_effects import SERVED_COUNTS
from node.daemon.stages.stage_peers import served_stages
from node.monitoring.metrics import Metrics, serve_metrics
from node.monitoring.stage_table import StageReport, build_stage_table
from node.monitoring.status import NodeStatus
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.microbatch import DropReason
from tests.node.monitoring.fixed_status import FixedStatus
from tests.node.monitoring.test_metrics import get, samples
from tests.node.monitoring.test_status import explained_reasons

PEERS = [StageReport(0, 4.0, 12), StageReport(0, 4.0, 11), StageReport(2, 2.0, 12), StageReport(3, 0.0, 12)]
TABLE = build_stage_table(PEERS, (0, 5, 1, 0))
STATUS = NodeStatus(
    peer_id="me",
    run="test",
    run_id="00",
    phase="training",
    stage=2,
    round=12,
    stages=TABLE,
    stage_rate=2.0,
    microbatches={
        "done": 40,
        "partly counted": 0,
        "lost": 1,
        "replayed": 2,
        "dropped: stalled": 1,
        "served: computed": 90,
    },
)


def test_status_shows_each_stage_with_its_peers_rate_round_and_bar() -> None:
    assert STATUS.reason_lines() == (
        "stage 0: ██████████ 2 peers · 8 microbatches/s · round 12",
        "stage 1: nobody serves it · 5 microbatches wait",
        "stage 2 (this node's): ██         1 peer · 2 microbatches/s · round 12 · 1 microbatch waits",
        "stage 3: -          1 peer · 0 microbatches/s · round 12",
        "microbatches: served: computed 90, done 40, replayed 2, dropped: stalled 1, lost 1",
    )


def test_status_line_names_the_own_stage_and_the_empty_one() -> None:
    line = STATUS.summary()
    assert line.startswith("round 12 · stage 2 of 4 · step 0")
    assert "nobody serves stage 1, and 5 microbatches wait" in line and "nobody serves stage 3" not in line
    assert NodeStatus.model_validate_json(STATUS.model_dump_json()) == STATUS


def test_peer_record_has_the_own_counts_with_all_reasons_for_drops_together() -> None:
    fields = STATUS.model_copy(update={"microbatches": {**STATUS.microbatches, "dropped: refused": 2}}).record_fields()
    found = {name: value for name, value in fields.items() if name.startswith("microbatches_")}
    assert PeerRecord(**found) == PeerRecord(  # type: ignore[arg-type]
        microbatches_done=40, microbatches_lost=1, microbatches_replayed=2, microbatches_dropped=3
    )


def test_run_that_is_not_cut_shows_no_stages() -> None:
    whole = NodeStatus(peer_id="me", run="test", run_id="00", phase="training", round=12)
    assert "stage" not in whole.summary() and whole.reason_lines() == ()


def test_only_ready_trainers_of_stages_that_exist_serve_one() -> None:
    ready = partial(PeerRecord, role="trainer", stage_life=7, round=3)
    records = [
        ready(stage=1, stage_rate=2.0),
        ready(stage=1, stage_rate=2.0, resting=True),
        ready(stage=2, stage_rate=1e300),
        PeerRecord(role="trainer", stage=2, stage_rate=2.0),  # its trainer is not ready
        PeerRecord(role="observer", stage=2, stage_life=7),
        ready(stage=0),
        ready(stage=2**32 - 1),
    ]
    assert served_stages(records, 2) == [StageReport(0, 2.0, 3), StageReport(0, 0.0, 3), StageReport(1, 1e9, 3)]


async def test_metrics_count_microbatches_by_result() -> None:
    async with asyncio.timeout(10), serve_metrics("127.0.0.1:0", Metrics(), FixedStatus(STATUS)) as port:
        values = samples((await get(port, "/metrics"))[2])
    assert values["murmur_stage_rate", ()] == 2.0
    assert values["murmur_microbatches_total", ("done",)] == 40
    assert values["murmur_microbatches_total", ("dropped: stalled",)] == 1


def test_status_page_explains_each_result_of_a_microbatch() -> None:
    own = {"done", "partly counted", "lost", "duplicates", "replayed", "outdated", "overdue"}
    own |= {"audited", "contradicted", "unaudited"}
    dropped = {f"dropped: {reason}" for reason in get_args(DropReason)}
    assert explained_reasons("Pipelines") == own | dropped | {f"served: {name}" for name in SERVED_COUNTS}
