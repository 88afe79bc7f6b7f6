"""Swarm time: the local clock plus the median offset against the clocks of peers.

The clocks of volunteers are wrong by seconds or hours, but records that expire need one time that all agree on. Each
peer has one vote: its clock minus the midpoint of our sending and receiving times (as in NTP). Our own clock votes 0.
The median does not follow a minority of liars, however far off they are. A peer sends its raw clock, never its swarm
time, because offsets derived from offsets would drift together.

Keys are free, so only those with a vote in the run count. A node that does not know any of them yet (it is new, or the
run is) counts the peers that its user or the manifest named. And while anybody agrees with its own clock, no majority
moves it by more than `MAX_OFFSET_SECONDS`. Nor is it moved that far by the first voter whose clock is read: it waits
for a few of them, `HOLD_SECONDS` at most, or all records would expire.

Two peers that count each other meet in the middle of their clocks. For that the called peer must also count the
caller's clock, though it has no round trip to correct it by; such a vote counts only while there are few others. A node
that nobody counts follows the others all the way: half of it would leave it alone with a time of its own.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from protocol.identity import PeerId

MAX_VOTES = 64
MAX_ROUND_TRIP_SECONDS = 10.0  # the error of a vote is at most half of it
PLAUSIBLE_RANGE = (1.7e9, 4.1e9)  # seconds since the epoch: 2023 to 2099; a device without a battery starts in 1970
FEW_VOTES = 3
MAX_OFFSET_SECONDS = 60.0  # while another peer agrees with our clock
HOLD_SECONDS = 10.0  # for which the clock of a node that learns who votes is not moved far by few of them
VOTE_LIFETIME_SECONDS = 120.0  # after this time a step of our own clock no longer affects the votes


class _Vote(NamedTuple):
    offset: float
    measured_at: float
    counts_us: bool


class SwarmClock:
    """The swarm time of a node; all times in seconds since the epoch."""

    def __init__(self, local: Callable[[], float] = time.time) -> None:
        self.local = local
        self._votes: dict[PeerId, _Vote] = {}  # oldest first
        self._counted: frozenset[PeerId] | None = None  # `None` means all
        self._voters_known_at: float | None = None
        self.offset = 0.0

    def count_only(self, voters: frozenset[PeerId], contacts: frozenset[PeerId]) -> None:
        """Count the clocks of voters only, or of contacts while nobody has a vote."""
        counted = voters or contacts
        if voters and self._voters_known_at is None:
            self._voters_known_at = self.local()
        if counted == self._counted:
            return
        self._counted = counted
        self._votes = {peer: vote for peer, vote in self._votes.items() if peer in counted}
        self._update_offset(self.local())

    def counts(self, peer: PeerId) -> bool:
        """Return whether the clock of a peer has a vote here."""
        return self._counted is None or peer in self._counted

    def now(self) -> float:
        return self.local() + self.offset

    def observe(self, peer: PeerId, theirs: float, sent: float, received: float, counts_us: bool = True) -> None:
        """Count a peer's clock that was read between `sent` and `received` of ours.

        `counts_us` tells whether our clock has a vote there. Implausible values are ignored.
        """
        offset = theirs - (sent + received) / 2
        if not self.counts(peer):
            return
        if not (_is_plausible(theirs) and 0 <= received - sent <= MAX_ROUND_TRIP_SECONDS):
            return
        self._votes.pop(peer, None)
        self._votes[peer] = _Vote(offset, received, counts_us)
        self._update_offset(received)

    def _update_offset(self, now: float) -> None:
        self._drop_old(now)
        offset = self._common_offset(now)
        if abs(offset - self.offset) <= MAX_OFFSET_SECONDS or not self._awaits_votes(now):
            self.offset = offset

    def _common_offset(self, now: float) -> float:
        offsets = [vote.offset for vote in self._votes.values()]
        is_counted = _is_plausible(now) and any(vote.counts_us for vote in self._votes.values())
        common = statistics.median([0.0, *offsets] if is_counted or not offsets else offsets)
        if _is_plausible(now) and any(abs(offset) <= MAX_OFFSET_SECONDS for offset in offsets):
            common = max(-MAX_OFFSET_SECONDS, min(common, MAX_OFFSET_SECONDS))
        return common

    def _awaits_votes(self, now: float) -> bool:
        """Return whether too few voters' clocks are known yet to move ours far."""
        others = len(self._counted or ()) - 1  # we have a vote, or ask for one more
        is_new = self._voters_known_at is not None and 0 <= now - self._voters_known_at < HOLD_SECONDS
        return is_new and _is_plausible(now) and len(self._votes) < min(FEW_VOTES, others)

    def observe_caller(self, peer: PeerId, theirs: float) -> None:
        """Count the clock of a peer that calls us; it is late by the one-way delay."""
        if len(self._votes) < FEW_VOTES:
            known = self._votes.get(peer)
            self.observe(peer, theirs, self.local(), self.local(), counts_us=known is None or known.counts_us)

    def _drop_old(self, now: float) -> None:
        # A vote from the future was counted before our own clock was set back, so it is meaningless now.
        for peer, vote in list(self._votes.items()):
            is_recent = -MAX_ROUND_TRIP_SECONDS <= now - vote.measured_at <= VOTE_LIFETIME_SECONDS
            if len(self._votes) > MAX_VOTES or not is_recent:
                del self._votes[peer]


def _is_plausible(time_read: float) -> bool:
    return PLAUSIBLE_RANGE[0] <= time_read <= PLAUSIBLE_RANGE[1]
