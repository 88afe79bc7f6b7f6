"""Where the seconds of a round went, peer by peer, from the totals that peers tell of themselves.

PURE. A peer's part in round r lasts from its record that first says "r rounds applied" to the one that first says
more. The totals in those two records are subtracted; they go out with each new round.
"""

from dataclasses import dataclass

from node.host.events import Lane
from protocol.identity import PeerId
from protocol.murmur_pb2 import PeerRecord

PATIENCE = 5.0  # seconds for the last lanes of a round
KEPT_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Totals:
    round: int
    compute: float
    exchange: float
    wait: float
    sent: int

    @classmethod
    def of(cls, record: PeerRecord) -> "Totals":
        return cls(
            record.round, record.compute_seconds, record.exchange_seconds, record.wait_seconds, record.bytes_sent
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

    def forget(self, peer: PeerId) -> None:
        self._begun.pop(peer, None)
        self._whole.discard(peer)

    def note(self, peer: PeerId, record: PeerRecord, now: float) -> None:
        totals = Totals.of(record)
        begun = self._begun.get(peer)
        if begun is not None and totals.round == begun.round:
            return
        self._begun[peer] = totals
        if begun is None:
            return
        if peer in self._whole and totals.round > begun.round and totals.sent >= begun.sent:
            self._close(totals.round - 1, _lane(peer, begun, totals), now)
        self._whole.add(peer)

    def finished(self, now: float, known: int) -> list[tuple[int, tuple[Lane, ...]]]:
        """The rounds up to `known` whose lanes are all there, in order; each is given once."""
        done = [
            number
            for number, lanes in self._open.items()
            if number <= known and (self._whole <= lanes.keys() or now - self._since[number] > PATIENCE)
        ]
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
    return Lane(
        peer=peer,
        compute=max(0.0, ended.compute - begun.compute),
        exchange=max(0.0, ended.exchange - begun.exchange),
        wait=max(0.0, ended.wait - begun.wait),
        sent=min(ended.sent - begun.sent, 2**53),
    )
