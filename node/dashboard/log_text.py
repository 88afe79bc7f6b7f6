"""Text of events for the log on the page, in which one line stands for several events of the same kind.

Rounds without the same peers, a few rounds apart at most, are one line: "rounds 170 to 175 without mary". A peer that
leaves and returns again and again is one line too. A line that grows moves to the end, and keeps its `id`. Text from
peers is not escaped here; the page must escape it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from node.dashboard.events import (
    ChainForked,
    DashboardEvent,
    HostRestarted,
    ModelEvaluated,
    PeerAppeared,
    PeerDeparted,
    PeerDiverged,
    RoundCommitted,
    RoundsMissing,
    RunSteered,
    SwarmFound,
    SwarmLost,
)
from node.units import format_duration
from protocol.identity import PeerId

Tone = Literal["ok", "busy", "warn", "bad"]
MAX_NAMED_PEERS = 3
MAX_NAMED_RESULTS = 2
LEFT_POLITELY = "left"  # the reason of a peer that said goodbye
MAX_LOG_LINES = 200
SEARCHED_LINES = 40  # newest lines that may still grow
MAX_ROUND_GAP = 5
MAX_ABSENCE_SECONDS = 900.0  # between two changes of one peer that share a line


@dataclass(frozen=True, slots=True)
class LogText:
    text: str
    tone: Tone


def short_id(peer: PeerId) -> str:
    """Return the end of a peer id; the beginning is the same for all peers."""
    return f"..{peer[-6:]}"


def describe_event(event: DashboardEvent, names: Mapping[PeerId, str]) -> LogText | None:
    """Return the log line of an event; `None` if the log does not show it. `names` are the peers' public names."""
    match event:
        case PeerAppeared():
            return LogText(_describe_joined(event, names), "ok")
        case PeerDeparted():
            left = describe_left(event.reason)
            return LogText(f"{peer_label(event.peer, names)} {left.text}", left.tone)
        case RoundCommitted() if event.late:
            return LogText(f"round {event.round} without {join_labels(event.late, names)}: not in time", "warn")
        case PeerDiverged():
            return LogText(f"{peer_label(event.peer, names)} differs from the others after round {event.round}", "bad")
        case ChainForked():
            return LogText(f"the swarm switched to another chain from round {event.round} on", "bad")
        case RoundsMissing():
            return LogText(f"no peer's log holds rounds {event.first} to {event.last} any more", "warn")
        case RunSteered() if event.news:
            return LogText(f"the organiser: {event.news}", "busy")
        case ModelEvaluated() if event.results:
            return LogText(f"evaluated {_describe_results(event)}", "ok")
        case SwarmLost():
            return LogText("the host no longer sees any peer of the run", "bad")
        case SwarmFound():
            return LogText("the host sees the run again", "ok")
        case HostRestarted():
            return LogText("the host restarted", "busy")
        case _:
            return None


def _describe_results(event: ModelEvaluated) -> str:
    shown = ", ".join(f"{one.task} {one.metric} {one.value:.4g}" for one in event.results[:MAX_NAMED_RESULTS])
    rest = len(event.results) - MAX_NAMED_RESULTS
    number = event.results[-1].round
    return shown + (f" and {rest} more" if rest > 0 else "") + ("" if number is None else f" after round {number}")


def _describe_joined(event: PeerAppeared, names: Mapping[PeerId, str]) -> str:
    now = event.now
    verb = {"trainer": "trains", "rollout": "rolls out"}.get(now.role, "watches")
    return " · ".join(
        filter(None, (f"{peer_label(now.peer, {**names, now.peer: now.name})} joined, {verb}", now.device))
    )


def describe_left(reason: str) -> LogText:
    """Return the end of a sentence about a peer that is gone; saying goodbye is nothing to warn of."""
    if reason == LEFT_POLITELY:
        return LogText("left", "busy")
    text = {
        "expired": "is silent and counts as gone",
        "unreachable": "does not answer and counts as gone",
        "ended": "has ended without a goodbye",
    }.get(reason)
    return LogText(text or f"is gone: {reason}", "warn")


def peer_label(peer: PeerId, names: Mapping[PeerId, str]) -> str:
    """Return the peer's name, with the end of its id if others have the same name; without a name, only the id."""
    name = names.get(peer, "")
    if not name:
        return short_id(peer)
    return name if sum(other == name for other in names.values()) == 1 else f"{name} ({short_id(peer)})"


def join_labels(peers: tuple[PeerId, ...], names: Mapping[PeerId, str]) -> str:
    shown = ", ".join(peer_label(peer, names) for peer in peers[:MAX_NAMED_PEERS])
    return shown + (f" and {len(peers) - MAX_NAMED_PEERS} more" if len(peers) > MAX_NAMED_PEERS else "")


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
    text = f"{label} is back after {format_duration(max(1, int(away)))}{often}"
    return replace(line, text=text, tone="ok", group=replace(group, changed_at=event.at))


def _join_departure(line: LogLine, group: Absences, event: PeerDeparted, names: Mapping[PeerId, str]) -> LogLine:
    group = replace(group, changed_at=event.at, count=group.count + 1)
    left: LogText = describe_left(event.reason)
    text = f"{peer_label(event.peer, names)} {left.text}; {_describe_often(group, event.at)}"
    return replace(line, text=text, tone=left.tone, group=group)


def _describe_often(group: Absences, now: float) -> str:
    return f"{group.count} absences in {format_duration(int(now - group.started_at))}"
