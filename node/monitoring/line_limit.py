"""A limit on the log lines that peers cause, so that no peer can fill a disk or hide other lines.

A line counts for each peer that it names and for the place in our code that wrote it; lines of the network code count
even if they name nobody, because a caller without a key causes them too. Each has some lines a minute. The counters of
refusals stay exact; a summary says how many lines were left out.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from node.monitoring.peer_names import PEER_ID

PERIOD_SECONDS = 60.0
LINES_PER_PEER, LINES_PER_PLACE = 12, 60  # a period, at INFO and above
DETAIL_FACTOR = 100  # times as many with --verbose, at DEBUG
MAX_PEERS = 4096
SUMMARY_SECONDS = 1.0  # between two looks for periods that have ended
NETWORK_LOGGERS = ("protocol.",)


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
