"""Who serves which stage, by records that anybody may write."""

import random
from typing import Any

import pytest

from node.daemon.stages.stage_peers import list_seats, stage_peers
from protocol.membership.record_fields import ServedStage, encode_served_stages
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.balance import MOVABLE, PINNED, StageAssignment
from protocol.pipeline.routing import Router, StagePeer

HUGE = 1.7e308  # a finite amount, so the record is valid


def choose(peer: StagePeer) -> str | None:
    router = Router(random.Random(0))
    router.update([peer])
    return router.choose(0.0)


def test_a_claim_of_any_finite_rate_does_not_stop_routing() -> None:
    record = PeerRecord(role="trainer", stage=1, stage_life=1, stage_rate=HUGE)
    ((peer,),) = stage_peers({"a": record}, 1, "a")
    assert choose(peer) == "a"
    with pytest.raises(OverflowError):
        choose(StagePeer("a", 1, 0, HUGE))


def test_seats_are_those_of_ready_trainers_that_stay_and_a_full_replica_is_pinned() -> None:
    ready: dict[str, Any] = {"role": "trainer", "stage_life": 1, "stage_rate": 2.0, "stage_move": MOVABLE}
    records = {
        "ready": PeerRecord(stage=1, **ready),
        "starting": PeerRecord(stage=1, **{**ready, "stage_life": 0}),
        "leaving": PeerRecord(stage=1, leaving=True, **ready),
        "resting": PeerRecord(stage=2, resting=True, **ready),
        "all": PeerRecord(stage=1, more_stages=encode_served_stages([ServedStage(1, 1, 1.0)]), **ready),
    }
    assert list_seats(records, 2) == [
        StageAssignment("ready", 0, 2.0, MOVABLE),
        StageAssignment("all", 0, 2.0, PINNED),
        StageAssignment("all", 1, 1.0, PINNED),
    ]
