"""The lines of the log, in which one line stands for several events of the same kind. Pure.

Rounds without the same peers, a few rounds apart at most, are one line: "rounds 170 to 175 without mary". A peer that
leaves and returns again and again is one line too. A line that grows moves to the end, and keeps its `id`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from node.dashboard.events import DashboardEvent, PeerAppeared, PeerDeparted, RoundCommitted
from node.dashboard.log_text import LogText, Tone, describe_left, join_labels, peer_label
from node.dashboard.page.formats import format_duration
from protocol.identity import PeerId

MAX_LOG_LINES = 200
SEARCHED_LINES = 40  # newest lines that may still grow
MAX_ROUND_GAP = 5
MAX_ABSENCE_SECONDS = 900.0  # between two changes of one peer that share a line


@dataclass(frozen=True, slots=True)
class LateRounds:
    """Rounds without the same peers."""

    peers: tuple[PeerId, ...]
    first: int
    last: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Absences:
    """How often one peer left since `started_at`; `changed_at` is when it last left or returned."""

    peer: PeerId
    started_at: float
    changed_at: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line; `id` is the index of its first event, `index` that of its newest one."""

    id: int
    index: int
    at: float
    peer: PeerId | None
    text: str
    tone: Tone
    group: LateRounds | Absences | None = None


def append_line(
    log: tuple[LogLine, ...], line: LogLine, event: DashboardEvent, names: Mapping[PeerId, str]
) -> tuple[LogLine, ...]:
    """Return the log with the line of an event, joined with an earlier line of its group if there is one."""
    if isinstance(event, RoundCommitted):
        fresh = replace(line, group=LateRounds(event.late, event.round, event.round))
    elif isinstance(event, PeerDeparted):
        fresh = replace(line, group=Absences(event.peer, event.at, event.at))
    else:
        fresh = line
    for earlier in reversed(log[-SEARCHED_LINES:]):
        joined = _join(earlier, event, names)
        if joined is not None:
            fresh = replace(joined, index=line.index, at=line.at)
            log = tuple(one for one in log if one is not earlier)
            break
    return (*log, fresh)[-MAX_LOG_LINES:]


def _join(earlier: LogLine, event: DashboardEvent, names: Mapping[PeerId, str]) -> LogLine | None:
    """Return the earlier line with the event added; None if it is of another group."""
    match earlier.group, event:
        case LateRounds() as group, RoundCommitted():
            is_next = group.last < event.round <= group.last + MAX_ROUND_GAP
            return _join_late(earlier, group, event, names) if is_next and group.peers == event.late else None
        case Absences() as group, PeerAppeared(now=now):
            is_recent = event.at - group.changed_at <= MAX_ABSENCE_SECONDS
            return _join_return(earlier, group, event, names) if is_recent and now.peer == group.peer else None
        case Absences() as group, PeerDeparted():
            is_recent = event.at - group.changed_at <= MAX_ABSENCE_SECONDS
            return _join_departure(earlier, group, event, names) if is_recent and event.peer == group.peer else None
        case _:
            return None


def _join_late(line: LogLine, group: LateRounds, event: RoundCommitted, names: Mapping[PeerId, str]) -> LogLine:
    group = replace(group, last=event.round, count=group.count + 1)
    is_complete = group.count == group.last - group.first + 1
    rounds = f"rounds {group.first} to {group.last}"
    which = rounds if is_complete else f"{group.count} of {rounds}"
    return replace(line, text=f"{which} without {join_labels(group.peers, names)}: not in time", group=group)


def _join_return(line: LogLine, group: Absences, event: PeerAppeared, names: Mapping[PeerId, str]) -> LogLine:
    label, away = peer_label(event.now.peer, {**names, event.now.peer: event.now.name}), event.at - group.changed_at
    often = f"; {_describe_often(group, event.at)}" if group.count > 1 else ""
    text = f"{label} is back after {format_duration(max(1.0, away))}{often}"
    return replace(line, text=text, tone="ok", group=replace(group, changed_at=event.at))


def _join_departure(line: LogLine, group: Absences, event: PeerDeparted, names: Mapping[PeerId, str]) -> LogLine:
    group = replace(group, changed_at=event.at, count=group.count + 1)
    left: LogText = describe_left(event.reason)
    text = f"{peer_label(event.peer, names)} {left.text}; {_describe_often(group, event.at)}"
    return replace(line, text=text, tone=left.tone, group=group)


def _describe_often(group: Absences, now: float) -> str:
    return f"{group.count} absences in {format_duration(now - group.started_at)}"
