"""Read from the peers' records which peers serve which stage."""

from collections.abc import Iterable, Mapping

from node.monitoring.stage_table import StageReport
from protocol.identity import PeerId
from protocol.membership.record_fields import records_by_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.balance import PINNED, StageAssignment
from protocol.pipeline.routing import StagePeer
from protocol.transport.nat import is_relay_only

MAX_STAGE_RATE = 1e9  # limit for one peer, so that sums of reported rates stay finite


def stage_peers(records: Mapping[PeerId, PeerRecord], stages: int) -> tuple[tuple[StagePeer, ...], ...]:
    """Return the live peers of each stage whose trainer is ready; resting or leaving peers are draining."""
    found: list[list[StagePeer]] = [[] for _ in range(stages)]
    for peer, record in ((peer, seen) for peer, each in records.items() for seen in records_by_stage(each)):
        if is_ready(record, stages):
            is_away = record.resting or record.leaving
            is_hidden = is_relay_only(record.addresses)
            rate = min(record.stage_rate, MAX_STAGE_RATE)
            entry = StagePeer(peer, record.stage_life, record.round, rate, is_away, is_hidden)
            found[record.stage - 1].append(entry)
    return tuple(map(tuple, found))


def is_ready(record: PeerRecord, stages: int) -> bool:
    """Return whether the trainer of a peer serves one of these stages."""
    return record.role == "trainer" and record.stage_life > 0 and 0 < record.stage <= stages


def served_stages(records: Iterable[PeerRecord], stages: int) -> list[StageReport]:
    """Return the stage of each ready trainer; resting or leaving trainers have no rate."""
    found = (served_stage(each, stages) for record in records for each in records_by_stage(record))
    return [served for served in found if served is not None]


def served_stage(record: PeerRecord, stages: int) -> StageReport | None:
    """Return the stage that a peer serves; None before its trainer is ready, and for a stage that does not exist."""
    if not is_ready(record, stages):
        return None
    rate = 0.0 if record.resting or record.leaving else min(record.stage_rate, MAX_STAGE_RATE)
    return StageReport(record.stage - 1, rate, record.round)


def list_seats(records: Mapping[PeerId, PeerRecord], stages: int) -> list[StageAssignment]:
    """Return the ready trainers that neither rest nor leave; a peer with several stages cannot move."""
    found: list[StageAssignment] = []
    for peer, record in records.items():
        for seen in records_by_stage(record):
            if is_ready(seen, stages) and not (seen.resting or seen.leaving):
                move = PINNED if record.more_stages else seen.stage_move
                found.append(StageAssignment(peer, seen.stage - 1, min(seen.stage_rate, MAX_STAGE_RATE), move))
    return found


def lowest_round(records: Iterable[PeerRecord], own_stage: int) -> int | None:
    """Return the round that all other stages with a live peer have reached; None if there is no such stage.

    A stage without peers does not count: its next peer starts from a round that others know.
    """
    rounds: dict[int, int] = {}
    for record in (seen for each in records for seen in records_by_stage(each)):
        if record.role == "trainer" and record.stage and record.stage != own_stage + 1:
            rounds[record.stage] = max(rounds.get(record.stage, 0), record.round)
    return min(rounds.values(), default=None)
