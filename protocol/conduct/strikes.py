"""Strikes: misdeeds without a proof, such as a contribution that nobody could fetch. They are local, and pass.

Each strike doubles the number of rounds for which a peer is set aside, up to a limit; good rounds halve it again. So an
honest peer whose link was broken is back soon after it is repaired.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from protocol.identity import PeerId

MAX_LEVEL = 6  # 64 rounds
GOOD_ROUNDS = 4  # that take one strike back
MAX_PEERS = 1024


@dataclass
class _Record:
    level: int = 0
    until: int = 0  # the round from which the peer counts again
    good_rounds: int = 0
    reason: str = ""


class Strikes:
    """The strikes of all peers for one kind of duty; times are numbers of rounds."""

    def __init__(self) -> None:
        self._records: dict[PeerId, _Record] = {}

    def strike(self, peer: PeerId, number: int, reason: str) -> None:
        """Record a misdeed in a round; while a peer is set aside, further ones do not count."""
        if peer not in self._records and len(self._records) >= MAX_PEERS:
            del self._records[min(self._records, key=lambda known: self._records[known].level)]
        record = self._records.setdefault(peer, _Record())
        if number < record.until:
            return
        record.level, record.good_rounds, record.reason = min(record.level + 1, MAX_LEVEL), 0, reason
        record.until = number + 1 + 2**record.level

    def forgive(self, peers: Iterable[PeerId]) -> None:
        """Record a good round of these peers, which also ends the time for which they are set aside."""
        for peer in self._records.keys() & set(peers):
            record = self._records[peer]
            record.until, record.good_rounds = 0, record.good_rounds + 1
            if record.good_rounds >= GOOD_ROUNDS:
                record.level, record.good_rounds = record.level - 1, 0
            if record.level <= 0:
                del self._records[peer]

    def struck(self, number: int, live: Collection[PeerId]) -> dict[PeerId, str]:
        """Return the peers that are set aside in a round, with the reason: at most a third of those that are alive.

        If more seem to fail, the fault may be with this peer.
        """
        aside = [peer for peer in live if peer in self._records and number < self._records[peer].until]
        aside.sort(key=lambda peer: (-self._records[peer].level, peer))
        return {peer: self._records[peer].reason for peer in aside[: (len(live) - 1) // 3]}

    def until(self, peer: PeerId) -> int:
        """Return the round from which a peer counts again."""
        record = self._records.get(peer)
        return record.until if record else 0
