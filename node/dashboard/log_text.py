"""Text of events for the log on the page. Text from peers is not escaped here; the page must escape it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from node.dashboard.events import (
    ChainForked,
    DashboardEvent,
    HostRestarted,
    PeerAppeared,
    PeerDeparted,
    PeerDiverged,
    RoundCommitted,
    RoundsMissing,
    SwarmFound,
    SwarmLost,
)
from protocol.identity import PeerId

Tone = Literal["ok", "busy", "warn", "bad"]
MAX_NAMED_PEERS = 3


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
            return LogText(_describe_joined(event), "ok")
        case PeerDeparted():
            return LogText(f"{_peer_label(event.peer, names)} {_describe_left(event.reason)}", "warn")
        case RoundCommitted() if event.late:
            return LogText(f"round {event.round} without {_join_labels(event.late, names)}: not in time", "warn")
        case PeerDiverged():
            return LogText(f"{_peer_label(event.peer, names)} differs from the others after round {event.round}", "bad")
        case ChainForked():
            return LogText(f"the swarm switched to another chain from round {event.round} on", "bad")
        case RoundsMissing():
            return LogText(f"no peer's log holds rounds {event.first} to {event.last} any more", "warn")
        case SwarmLost():
            return LogText("the host no longer sees any peer of the run", "bad")
        case SwarmFound():
            return LogText("the host sees the run again", "ok")
        case HostRestarted():
            return LogText("the host restarted", "busy")
        case _:
            return None


def _describe_joined(event: PeerAppeared) -> str:
    now = event.now
    verb = "trains" if now.role == "trainer" else "watches"
    return " · ".join(filter(None, (f"{_peer_label(now.peer, {now.peer: now.name})} joined, {verb}", now.device)))


def _describe_left(reason: str) -> str:
    return {
        "left": "left",
        "expired": "is silent and counts as gone",
        "unreachable": "does not answer and counts as gone",
    }.get(reason, f"is gone: {reason}")


def _peer_label(peer: PeerId, names: Mapping[PeerId, str]) -> str:
    name = names.get(peer, "")
    return f"{short_id(peer)} {name}" if name else short_id(peer)


def _join_labels(peers: tuple[PeerId, ...], names: Mapping[PeerId, str]) -> str:
    shown = ", ".join(_peer_label(peer, names) for peer in peers[:MAX_NAMED_PEERS])
    return shown + (f" and {len(peers) - MAX_NAMED_PEERS} more" if len(peers) > MAX_NAMED_PEERS else "")
