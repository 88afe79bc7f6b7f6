"""Each peer's seconds of compute, exchange and wait in a round, from the totals in the peers' records. Pure.

A peer's lane of round r lasts from its first record that says "r rounds applied" to its first record that says more;
the lane is the difference of the totals in the two records. Peers send such a record with each new round.
"""

from dataclasses import dataclass

from node.dashboard.events import PeerTiming
from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord

WAIT_SECONDS = 5.0  # for the last lanes of a round
MAX_RECORD_DELAY_SECONDS = 60.0  # time that a record may take to arrive
MAX_OPEN_ROUNDS = 8
MAX_ROUNDS_AHEAD = 4  # lanes of rounds further ahead of the known chain are dropped


@dataclass(frozen=True, slots=True)
class ActivityTotals:
    at: float  # when the record arrived
    round: int
    compute: float
    exchange: float
    wait: float
    sent: int

    @classmethod
    def of(cls, record: PeerRecord, now: float) -> "ActivityTotals":
        return cls(
            now, record.round, record.compute_seconds, record.exchange_seconds, record.wait_seconds, record.bytes_sent
        )


class RoundTimeline:
    """Collects the lanes of a round until every present trainer's has arrived, or WAIT_SECONDS have passed.

    A peer's first round is left out, because the host saw only the end of it.
    """

    def __init__(self) -> None:
        self._fully_observed: set[PeerId] = set()
        self._totals_at_start: dict[PeerId, ActivityTotals] = {}
        self._open_rounds: dict[int, dict[PeerId, PeerTiming]] = {}
        self._opened_at: dict[int, float] = {}
        self._newest_finished = -1  # the newest round that was returned

    def forget(self, peer: PeerId) -> None:
        self._totals_at_start.pop(peer, None)
        self._fully_observed.discard(peer)

    def record(self, peer: PeerId, peer_record: PeerRecord, now: float, chain_round: int) -> None:
        """Take in a new record of a peer; `chain_round` is the newest round of the known chain."""
        totals = ActivityTotals.of(peer_record, now)
        start = self._totals_at_start.get(peer)
        if start is not None and totals.round == start.round:
            return
        self._totals_at_start[peer] = totals
        if start is None:
            return
        if peer in self._fully_observed and totals.round > start.round and totals.sent >= start.sent:
            lane, round_number = _timing_between(peer, start, totals), totals.round - 1
            # A lane of a round that was already returned is too late.
            if self._newest_finished < round_number <= chain_round + MAX_ROUNDS_AHEAD:
                self._add_timing(round_number, lane, now)
        self._fully_observed.add(peer)

    def pop_finished(self, now: float, chain_round: int) -> list[tuple[int, tuple[PeerTiming, ...]]]:
        """Return the complete rounds up to `chain_round`, in order; each round only once."""
        # After a switch to another chain, the same round numbers come again.
        self._newest_finished = min(self._newest_finished, chain_round)
        done = [
            round_number
            for round_number, lanes in self._open_rounds.items()
            if round_number <= chain_round
            and (self._fully_observed <= lanes.keys() or now - self._opened_at[round_number] > WAIT_SECONDS)
        ]
        self._newest_finished = max([self._newest_finished, *done])
        return [self._pop(round_number) for round_number in sorted(done)]

    def _add_timing(self, round_number: int, lane: PeerTiming, now: float) -> None:
        self._opened_at.setdefault(round_number, now)
        self._open_rounds.setdefault(round_number, {})[lane.peer] = lane
        while len(self._open_rounds) > MAX_OPEN_ROUNDS:
            self._pop(min(self._open_rounds))

    def _pop(self, round_number: int) -> tuple[int, tuple[PeerTiming, ...]]:
        lanes = self._open_rounds.pop(round_number)
        del self._opened_at[round_number]
        return round_number, tuple(lanes[peer] for peer in sorted(lanes))


def _timing_between(peer: PeerId, start: ActivityTotals, end: ActivityTotals) -> PeerTiming:
    """Return the lane between two records; an activity is at most as long as the time between them.

    The limit keeps one peer's false claim from dwarfing the lanes of the others.
    """
    max_seconds = max(0.0, end.at - start.at) + MAX_RECORD_DELAY_SECONDS

    def spent(before: float, after: float) -> float:
        return min(max(0.0, after - before), max_seconds)

    return PeerTiming(
        peer=peer,
        compute=spent(start.compute, end.compute),
        exchange=spent(start.exchange, end.exchange),
        wait=spent(start.wait, end.wait),
        sent=min(end.sent - start.sent, 2**53),
    )
