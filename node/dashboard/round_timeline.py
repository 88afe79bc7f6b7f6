"""Where the seconds of a round went, peer by peer, from the totals that peers tell of themselves.

PURE. A peer's part in round r lasts from its record that first says "r rounds applied" to the one that first says
more. The totals in those two records are subtracted; they go out with each new round.
"""

from dataclasses import dataclass

from node.dashboard.events import PeerTiming
from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord

WAIT_SECONDS = 5.0  # seconds for the last lanes of a round
MAX_RECORD_DELAY_SECONDS = 60.0  # that a record may have been under way
MAX_OPEN_ROUNDS = 8
MAX_ROUNDS_AHEAD = 4  # rounds that a peer may claim to be ahead of the known chain; what is beyond is nobody's lane


@dataclass(frozen=True, slots=True)
class ActivityTotals:
    at: float  # when the record came
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
    """Collects lanes until every trainer that is there has given its own, or patience ends.

    A peer's first round is left out: the host saw only the end of it.
    """

    def __init__(self) -> None:
        self._fully_observed: set[PeerId] = set()
        self._totals_at_start: dict[PeerId, ActivityTotals] = {}
        self._open_rounds: dict[int, dict[PeerId, PeerTiming]] = {}
        self._opened_at: dict[int, float] = {}
        self._newest_finished = -1  # the newest round that was given

    def forget(self, peer: PeerId) -> None:
        self._totals_at_start.pop(peer, None)
        self._fully_observed.discard(peer)

    def record(self, peer: PeerId, peer_record: PeerRecord, now: float, chain_round: int) -> None:
        """`known`: the newest round of the chain."""
        totals = ActivityTotals.of(peer_record, now)
        begun = self._totals_at_start.get(peer)
        if begun is not None and totals.round == begun.round:
            return
        self._totals_at_start[peer] = totals
        if begun is None:
            return
        if peer in self._fully_observed and totals.round > begun.round and totals.sent >= begun.sent:
            lane, number = _timing_between(peer, begun, totals), totals.round - 1
            if (
                self._newest_finished < number <= chain_round + MAX_ROUNDS_AHEAD
            ):  # who comes when its round was given comes too late
                self._add_timing(number, lane, now)
        self._fully_observed.add(peer)

    def pop_finished(self, now: float, chain_round: int) -> list[tuple[int, tuple[PeerTiming, ...]]]:
        """The rounds up to `known` whose lanes are all there, in order; each is given once."""
        self._newest_finished = min(
            self._newest_finished, chain_round
        )  # on another chain there are rounds of these numbers anew
        done = [
            number
            for number, lanes in self._open_rounds.items()
            if number <= chain_round
            and (self._fully_observed <= lanes.keys() or now - self._opened_at[number] > WAIT_SECONDS)
        ]
        self._newest_finished = max([self._newest_finished, *done])
        return [self._pop(number) for number in sorted(done)]

    def _add_timing(self, number: int, lane: PeerTiming, now: float) -> None:
        self._opened_at.setdefault(number, now)
        self._open_rounds.setdefault(number, {})[lane.peer] = lane
        while len(self._open_rounds) > MAX_OPEN_ROUNDS:
            self._pop(min(self._open_rounds))

    def _pop(self, number: int) -> tuple[int, tuple[PeerTiming, ...]]:
        lanes = self._open_rounds.pop(number)
        del self._opened_at[number]
        return number, tuple(lanes[peer] for peer in sorted(lanes))


def _timing_between(peer: PeerId, start: ActivityTotals, end: ActivityTotals) -> PeerTiming:
    """No activity took longer than it was between the two records: what one claims must not dwarf the others."""
    most = max(0.0, end.at - start.at) + MAX_RECORD_DELAY_SECONDS

    def spent(before: float, after: float) -> float:
        return min(max(0.0, after - before), most)

    return PeerTiming(
        peer=peer,
        compute=spent(start.compute, end.compute),
        exchange=spent(start.exchange, end.exchange),
        wait=spent(start.wait, end.wait),
        sent=min(end.sent - start.sent, 2**53),
    )
