"""Findings on the wire, and work records: each has one encoding and bounds."""

import json

import pytest

from protocol.audits import (
    MAX_POSITION,
    VERDICTS,
    AppliedAnchor,
    BlobName,
    Conditions,
    WorkRecord,
    WorkTrace,
    open_finding,
)
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import MAX_WORK_RECORD_BYTES
from protocol.errors import ForgedError, LimitError, MalformedError
from tests.node.small_run import PEERS, RUN_ID
from tests.protocol.audits.panel import audits_of, finding_of

AUDIT = audits_of()[0]
STATE = BlobName.of(Blob.of(b"state"))
RECORD = WorkRecord(
    round=3,
    position=7,
    before=STATE,
    after=STATE,
    previous=BlobName.of(Blob.of(b"record")),
    trace=WorkTrace(steps=5, anchors=(AppliedAnchor(steps=0, round=3, outcome="included"),)),
    conditions=Conditions(device="cpu", threads=2, microbatch=8),
)


@pytest.mark.parametrize("verdict", VERDICTS)
def test_finding_survives_the_wire(verdict: str) -> None:
    finding = finding_of(AUDIT, 0, verdict)  # type: ignore[arg-type]
    assert open_finding(finding.signed, RUN_ID) == finding


def test_finding_in_anothers_name_is_refused() -> None:
    signed = finding_of(AUDIT, 0, "different").signed
    signed.peer = next(peer.peer_id for peer in PEERS if peer.peer_id != signed.peer)
    with pytest.raises(ForgedError):
        open_finding(signed, RUN_ID)


def test_record_survives_the_wire() -> None:
    far = RECORD.model_copy(update={"position": MAX_POSITION})  # in the last of the most sources
    for record in (RECORD, far):
        assert WorkRecord.from_bytes(record.to_bytes()) == record
    assert RECORD.anchor_rounds == (3,)
    assert RECORD.find_obstacle() == ""


ANCHOR = {"steps": 0, "round": 3, "outcome": "included"}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("round", -1),
        ("round", 2**60),
        ("round", "3"),
        ("position", -1),
        ("position", MAX_POSITION + 1),
        ("before", {"digest": "00", "size": 1}),
        ("after", {"digest": "0" * 64, "size": 2**40}),
        ("after", {"digest": "0" * 64, "size": 0}),
        ("trace", {"steps": 2**40}),
        ("trace", {"steps": 1, "anchors": [ANCHOR] * 9}),
        ("trace", {"steps": 1, "anchors": [{**ANCHOR, "outcome": "perhaps"}]}),
        ("trace", {"obstacle": "x" * 65}),
        ("conditions", {"threads": 10**6}),
        ("conditions", {"text": "\x1b[2J"}),
        ("unknown", 1),
    ],
)
def test_record_out_of_bounds_is_refused(path: str, value: object) -> None:
    values = json.loads(RECORD.to_bytes())
    with pytest.raises(MalformedError):
        WorkRecord.from_bytes(json.dumps({**values, path: value}).encode())


def test_record_that_is_too_long_is_refused_unread() -> None:
    with pytest.raises(LimitError):
        WorkRecord.from_bytes(b" " * (MAX_WORK_RECORD_BYTES + 1))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"trace": WorkTrace(obstacle="restarted")}, "restarted"),
        ({"before": None}, "no state before it"),
        ({"after": None}, "no state after it"),
    ],
)
def test_work_that_nobody_can_repeat_says_why(values: dict[str, object], reason: str) -> None:
    assert RECORD.model_copy(update=values).find_obstacle() == reason
