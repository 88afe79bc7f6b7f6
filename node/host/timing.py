"""Where the seconds of a round went, peer by peer, from the totals that peers tell of themselves.

PURE. A peer's part in round r lasts from its record that first says "r rounds applied" to the one that first says
more. The totals in those two records are subtracted; they go out with each new round.
"""

from dataclasses import dataclass

from node.host.events import Lane
from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord

PATIENCE = 5.0  # seconds for the last lanes of a round
LATE_SECONDS = 60.0  # that a record may have been under way
KEPT_ROUNDS = 8
AHEAD = 4  # rounds that a peer may claim to be ahead of the known chain; what is beyond is nobody's lane


@dataclass(frozen=True, slots=True)
class Totals:
    at: float  # when the record came
    round: int
    compute: float
    exchange: float
    wait: float
    sent: int

    @classmethod
    def of(cls, record: PeerRecord, now: float) -> "Totals":
        return cls(
            now, record.round, record.compute_seconds, record.exchange_seconds, record.wait_seconds, record.bytes_sent
        )


class Lanes:
    """Collects lanes until every trainer that is there has given its own, or patience ends.

    A peer's first round is left out: the host saw only the end of it.
    """

    def __init__(self) -> None:
        self._whole: set[PeerId] = set()
        self._begun: dict[PeerId, Totals] = {}
        self._open: dict[int, dict[PeerId, Lane]] = {}
        self._since: dict[int, float] = {}
        self._given = -1  # the newest round that was given

    def forget(self, peer: PeerId) -> None:
        self._begun.pop(peer, None)
        self._whole.discard(peer)

    def note(self, peer: PeerId, record: PeerRecord, now: float, known: int) -> None:
        """`known`: the newest round of the chain."""
        totals = Totals.of(record, now)
        begun = self._begun.get(peer)
        if begun is not None and totals.round == begun.round:
            return
        self._begun[peer] = totals
        if begun is None:
            return
        if peer in self._whole and totals.round > begun.round and totals.sent >= begun.sent:
            lane, number = _lane(peer, begun, totals), totals.round - 1
            if self._given < number <= known + AHEAD:  # who comes when its round was given comes too late
                self._close(number, lane, now)
        self._whole.add(peer)

    def finished(self, now: float, known: int) -> list[tuple[int, tuple[Lane, ...]]]:
        """The rounds up to `known` whose lanes are all there, in order; each is given once."""
        self._given = min(self._given, known)  # on another chain there are rounds of these numbers anew
        done = [
            number
            for number, lanes in self._open.items()
            if number <= known and (self._whole <= lanes.keys() or now - self._since[number] > PATIENCE)
        ]
        self._given = max([self._given, *done])
        return [self._pop(number) for number in sorted(done)]

    def _close(self, number: int, lane: Lane, now: float) -> None:
        self._since.setdefault(number, now)
        self._open.setdefault(number, {})[lane.peer] = lane
        while len(self._open) > KEPT_ROUNDS:
            self._pop(min(self._open))

    def _pop(self, number: int) -> tuple[int, tuple[Lane, ...]]:
        lanes = self._open.pop(number)
        del self._since[number]
        return number, tuple(lanes[peer] for peer in sorted(lanes))


def _lane(peer: PeerId, begun: Totals, ended: Totals) -> Lane:
    """No activity took longer than it was between the two records: what one claims must not dwarf the others."""
    most = max(0.0, ended.at - begun.at) + LATE_SECONDS

    def spent(before: float, after: float) -> float:
        return min(max(0.0, after - before), most)

    return Lane(
        peer=peer,
        compute=spent(begun.compute, ended.compute),
        exchange=spent(begun.exchange, ended.exchange),
        wait=spent(begun.wait, ended.wait),
        sent=min(ended.sent - begun.sent, 2**53),
    )
