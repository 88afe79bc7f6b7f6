"""One record for a peer that trains several stages of a pipeline."""

import pytest

from protocol.errors import MalformedError
from protocol.membership.record_fields import (
    MAX_MORE_STAGES,
    ServedStage,
    encode_served_stages,
    parse_served_stages,
    record_of_stage,
    records_by_stage,
)
from protocol.murmur_pb2 import PeerRecord

SECOND = ServedStage(2, stage_life=9, stage_rate=1.5, round=4, digest=bytes(32), chain_tokens=7, state_digest=bytes(32))
RECORD = PeerRecord(
    role="trainer", name="both", stage=1, stage_life=8, round=5, digest=b"\1" * 32,
    more_stages=encode_served_stages([SECOND]),
)  # fmt: skip


def test_each_stage_of_a_record_is_seen_as_if_it_were_the_only_one() -> None:
    first, second = record_of_stage(RECORD, 0), record_of_stage(RECORD, 2)
    assert first is not None and second is not None
    assert (first.round, first.stage_life, second.round, second.stage_life) == (5, 8, 4, 9)
    assert (second.stage, second.digest, second.name) == (3, bytes(32), "both")
    assert record_of_stage(RECORD, 1) is None
    assert [seen.stage for seen in records_by_stage(RECORD)] == [1, 3]
    assert RECORD.stage == 1 and RECORD.more_stages, "the record itself is as it was"


def test_observer_serves_no_stage() -> None:
    observer = PeerRecord(role="observer", more_stages=encode_served_stages([SECOND]))
    assert record_of_stage(observer, 2) is None


@pytest.mark.parametrize(
    "stages",
    [
        [ServedStage(number) for number in range(MAX_MORE_STAGES + 1)],
        [SECOND, SECOND],
        [ServedStage(128)],
        [ServedStage(1, digest=b"short")],
        [ServedStage(1, stage_rate=float("nan"))],
        [ServedStage(1, stage_rate=-1.0)],
        [ServedStage(1, round=2**24 + 1)],
        [ServedStage(1, chain_tokens=2**60 + 1)],
    ],
)
def test_stages_out_of_bounds_are_refused(stages: list[ServedStage]) -> None:
    with pytest.raises(MalformedError):
        parse_served_stages(encode_served_stages(stages))
    assert parse_served_stages(encode_served_stages([SECOND])) == (SECOND,), "the control"
