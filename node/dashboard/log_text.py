"""Text of events for the log on the page. Text from peers is not escaped here; the page must escape it."""

from collections.abc import Mapping
from dataclasses import dataclass
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
from protocol.identity import PeerId

Tone = Literal["ok", "busy", "warn", "bad"]
MAX_NAMED_PEERS = 3
MAX_NAMED_RESULTS = 2
LEFT_POLITELY = "left"  # the reason of a peer that said goodbye


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
    verb = "trains" if now.role == "trainer" else "watches"
    return " · ".join(
        filter(None, (f"{peer_label(now.peer, {**names, now.peer: now.name})} joined, {verb}", now.device))
    )


def describe_left(reason: str) -> LogText:
    """Return the end of a sentence about a peer that is gone; saying goodbye is nothing to warn of."""
    if reason == LEFT_POLITELY:
        return LogText("left", "busy")
    text = {"expired": "is silent and counts as gone", "unreachable": "does not answer and counts as gone"}.get(reason)
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
