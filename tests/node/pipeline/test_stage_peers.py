"""Who serves which stage, by records that anybody may write."""

import random

import pytest

from node.pipeline.stage_peers import stage_peers
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.routing import Router, StagePeer

HUGE = 1.7e308  # a finite amount, so the record is valid


def choose(peer: StagePeer) -> str | None:
    router = Router(random.Random(0))
    router.update([peer])
    return router.choose(0.0)


def test_a_claim_of_any_finite_rate_does_not_stop_routing() -> None:
    record = PeerRecord(role="trainer", stage=1, stage_life=1, stage_rate=HUGE)
    ((peer,),) = stage_peers({"a": record}, 1)
    assert choose(peer) == "a"
    with pytest.raises(OverflowError):
        choose(StagePeer("a", 1, 0, HUGE))
