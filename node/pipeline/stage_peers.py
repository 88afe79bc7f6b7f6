"""Read from the peers' records who serves which stage."""

from collections.abc import Iterable, Mapping

from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.routing import StagePeer


def stage_peers(records: Mapping[PeerId, PeerRecord], stages: int) -> tuple[tuple[StagePeer, ...], ...]:
    """Return the live peers of each stage whose trainer is ready; one that rests or leaves takes no new work."""
    return tuple(
        tuple(
            StagePeer(peer, record.stage_life, record.round, record.stage_rate, record.resting or record.leaving)
            for peer, record in records.items()
            if record.role == "trainer" and record.stage == stage + 1 and record.stage_life
        )
        for stage in range(stages)
    )


def lowest_round(records: Iterable[PeerRecord], own_stage: int) -> int | None:
    """Return the round that all other stages with a live peer have reached; None if there is no such stage.

    A stage without a peer holds nobody: when one comes back, it starts from a round that others know.
    """
    rounds: dict[int, int] = {}
    for record in records:
        if record.role == "trainer" and record.stage and record.stage != own_stage + 1:
            rounds[record.stage] = max(rounds.get(record.stage, 0), record.round)
    return min(rounds.values(), default=None)
