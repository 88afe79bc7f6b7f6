"""What an event is in words, for the log on the page. Peers' text is quoted as it is: who shows it must escape it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from node.host.events import (
    Committed,
    Event,
    Forked,
    Found,
    Joined,
    Left,
    Lost,
    Missing,
    Started,
    Strayed,
)
from protocol.identity import PeerId

Tone = Literal["ok", "busy", "warn", "bad"]
NAMED = 3


@dataclass(frozen=True, slots=True)
class Said:
    text: str
    tone: Tone


def short(peer: PeerId) -> str:
    """The end of a peer id: the beginning is the same for all."""
    return f"..{peer[-6:]}"


def sentence(event: Event, names: Mapping[PeerId, str]) -> Said | None:
    """None for what the log does not tell. `names`: public names, of those who gave one."""
    match event:
        case Joined():
            return Said(_joined(event), "ok")
        case Left():
            return Said(f"{_who(event.peer, names)} {_left(event.reason)}", "warn")
        case Committed() if event.late:
            return Said(f"round {event.round} without {_list(event.late, names)}: not in time", "warn")
        case Strayed():
            return Said(f"{_who(event.peer, names)} differs from the others after round {event.round}", "bad")
        case Forked():
            return Said(f"the swarm went over to another chain from round {event.round} on", "bad")
        case Missing():
            return Said(f"rounds {event.first} to {event.last} are in no peer's log any more", "warn")
        case Lost():
            return Said("the host sees no peer of the run any more", "bad")
        case Found():
            return Said("the host sees the run again", "ok")
        case Started():
            return Said("the host was started again", "busy")
        case _:
            return None


def _joined(event: Joined) -> str:
    now = event.now
    verb = "trains" if now.role == "trainer" else "watches"
    return " · ".join(filter(None, (f"{_who(now.peer, {now.peer: now.name})} joined, {verb}", now.device)))


def _left(reason: str) -> str:
    return {
        "left": "left",
        "expired": "fell silent and counts as gone",
        "unreachable": "does not answer and counts as gone",
    }.get(reason, f"is gone: {reason}")


def _who(peer: PeerId, names: Mapping[PeerId, str]) -> str:
    name = names.get(peer, "")
    return f"{short(peer)} {name}" if name else short(peer)


def _list(peers: tuple[PeerId, ...], names: Mapping[PeerId, str]) -> str:
    shown = ", ".join(_who(peer, names) for peer in peers[:NAMED])
    return shown + (f" and {len(peers) - NAMED} more" if len(peers) > NAMED else "")
