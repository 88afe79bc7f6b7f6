"""Read from the peers' records which peers serve which stage, and which peers the whole run misses. PURE."""

from collections.abc import Container, Iterable, Mapping

from node.monitoring.stage_table import StageReport
from protocol.identity import PeerId
from protocol.manifest.sections import MembershipSection
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft
from protocol.membership.record_fields import records_by_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.balance import PINNED, StageAssignment
from protocol.pipeline.routing import StagePeer
from protocol.transport.nat import is_relay_only

MAX_STAGE_RATE = 1e9  # limit for one peer, so that sums of reported rates stay finite


def stage_peers(
    records: Mapping[PeerId, PeerRecord], stages: int, answering: Container[PeerId]
) -> tuple[tuple[StagePeer, ...], ...]:
    """Return the live peers of each stage whose trainer is ready; resting or leaving peers are draining.

    `answering`: the peers that have answered our last call.
    """
    found: list[list[StagePeer]] = [[] for _ in range(stages)]
    for peer, record in ((peer, seen) for peer, each in records.items() for seen in records_by_stage(each)):
        if is_ready(record, stages):
            is_away = record.resting or record.leaving
            is_hidden = is_relay_only(record.addresses)
            rate = min(record.stage_rate, MAX_STAGE_RATE)
            entry = StagePeer(peer, record.stage_life, record.round, rate, is_away, is_hidden, peer in answering)
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


class MissingPeers:
    """The trainers of a run that vanished without a goodbye, as long as absent peers have votes.

    A stage of two peers loses its quorum when one of them crashes, and the other cannot distinguish a crash from a
    broken link. But records spread through the peers of all stages. So a peer that sees most of the run, and no record
    of a certain peer for `expiry`, knows that this peer is down or on the smaller side of a partition. Peers on the
    smaller side wait longer.
    """

    def __init__(self, timing: MembershipSection) -> None:
        self._timing = timing
        self._silent_since: dict[PeerId, float] = {}  # since when no record of it has counted

    def observe(self, events: Iterable[MembershipEvent], now: float) -> None:
        """Update the table from membership events."""
        for event in events:
            if isinstance(event, PeerJoined):
                self._silent_since.pop(event.peer, None)
            elif isinstance(event, PeerLeft) and event.record is not None and event.record.role == "trainer":
                self._lose(event, now)

    def _lose(self, event: PeerLeft, now: float) -> None:
        if event.reason in ("expired", "ended"):
            self._silent_since[event.peer] = now - self._timing.expiry
        elif event.reason == "unreachable":  # for us; a record that others pass on brings it back
            self._silent_since[event.peer] = now

    def missed_by_most(self, live_trainers: int, now: float) -> frozenset[PeerId]:
        """Return the peers that most of the run misses; empty if we do not see most of it."""
        expiry, limit = self._timing.expiry, self._timing.expiry + self._timing.vote_memory
        self._silent_since = {peer: since for peer, since in self._silent_since.items() if now - since <= limit}
        if live_trainers <= len(self._silent_since):
            return frozenset()
        return frozenset(peer for peer, since in self._silent_since.items() if now - since >= expiry)
