"""Keep log lines about peers readable: names in place of ids, and a limit on the lines that peers cause.

The limit keeps a peer from filling a disk or hiding other lines. A line counts for each peer that it names and for the
place in our code that wrote it; lines of the network code count even if they name nobody, because a caller without a
key causes them too. The counters of refusals stay exact; a summary says how many lines were left out.
"""

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from protocol.identity import PeerId
from protocol.membership.peer_table import MembershipEvent, PeerLeft

MAX_NAMES = 4096
MAX_SHOWN_CHARACTERS = 24
DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{56}\b")
PEER_ID = re.compile(r"(?P<route>/p2p/)?\b(?P<peer>12D3KooW[1-9A-HJ-NP-Za-km-z]{44})\b")
PERIOD_SECONDS = 60.0
LINES_PER_PEER, LINES_PER_PLACE = 12, 60  # a period, at INFO and above
DETAIL_FACTOR = 100  # times as many with --verbose, at DEBUG
MAX_PEERS = 4096
SUMMARY_SECONDS = 1.0  # interval of the check for periods that have ended
NETWORK_LOGGERS = ("protocol.",)


def shorten_peer_id(peer: PeerId) -> str:
    """Return the beginning, which shows that it is a peer id, and the end, which differs between peers."""
    return f"{peer[:4]}..{peer[-6:]}"


class PeerNames:
    """Learns names from the peer directory. A name is what its peer says; only the id is certain."""

    def __init__(self) -> None:
        self._names: dict[PeerId, str] = {}

    def learn(self, peer: PeerId, name: str) -> None:
        """Remember a name; the oldest ones are forgotten."""
        self._names.pop(peer, None)
        if name:
            self._names[peer] = name[:MAX_SHOWN_CHARACTERS]
        if len(self._names) > MAX_NAMES:
            del self._names[next(iter(self._names))]

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        for event in events:
            if not isinstance(event, PeerLeft) and self._names.get(event.peer, "") != event.record.name:
                self.learn(event.peer, event.record.name)

    def label(self, peer: PeerId) -> str:
        """Return `mary (12D3..AbCdEf)`, or `12D3..AbCdEf` for a peer without a name."""
        name, short = self._names.get(peer), shorten_peer_id(peer)
        return f"{name} ({short})" if name else short

    def replace_ids(self, text: str) -> str:
        """Replace each peer id in a text by its label, and drop those at the end of addresses; shorten digests."""
        return DIGEST.sub(r"\1..", PEER_ID.sub(self._label_of_match, text))

    def _label_of_match(self, found: re.Match[str]) -> str:
        return "" if found["route"] else self.label(found["peer"])


@dataclass
class _Count:
    since: float
    lines: int = 0
    left_out: int = 0


class LineLimit:
    """Decides which log lines are written; times are in seconds and come from the records."""

    def __init__(self) -> None:
        self._peers: dict[str, _Count] = {}  # by peer and level, the oldest first
        self._places: dict[str, _Count] = {}  # by module and line; our own code bounds them
        self._summarised_at = float("-inf")

    def admits(self, record: logging.LogRecord) -> bool:
        """Count a line, and return whether it should be written."""
        peers = {found["peer"] for found in PEER_ID.finditer(record.getMessage())}
        if record.exc_info or not (peers or record.name.startswith(NETWORK_LOGGERS)):
            return True
        detail = DETAIL_FACTOR if record.levelno < logging.INFO else 1
        place = _count_of(self._places, f"{record.name}:{record.lineno}", record.created)
        counts = [_count_of(self._peers, f"{peer} {detail}", record.created) for peer in peers]
        while len(self._peers) > MAX_PEERS:
            del self._peers[next(iter(self._peers))]
        is_full = place.lines >= LINES_PER_PLACE * detail
        if is_full or any(count.lines >= LINES_PER_PEER * detail for count in counts):
            place.left_out += 1
            return False
        for count in (place, *counts):
            count.lines += 1
        return True

    def summaries(self, now: float) -> Iterator[str]:
        """Yield a line for each place whose period has ended with lines left out."""
        if 0 <= now - self._summarised_at < SUMMARY_SECONDS:
            return
        self._summarised_at = now
        for place, count in self._places.items():
            if count.left_out and not 0 <= now - count.since < PERIOD_SECONDS:
                yield f"left out {count.left_out} more lines of {place} that peers caused in the last minute"
                count.left_out = 0


def _count_of(counts: dict[str, _Count], key: str, now: float) -> _Count:
    """Return the count of a key in the present period, which begins with its first line."""
    count = counts.get(key)
    if count is None or not 0 <= now - count.since < PERIOD_SECONDS:
        left_out = 0 if count is None else count.left_out
        counts.pop(key, None)
        counts[key] = count = _Count(now, 0, left_out)
    return count
