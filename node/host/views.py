"""What is told of a state: the summary, the peers, the history. PURE; everything here becomes JSON."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from node.host.events import Facts, PeerNow
from node.host.state import UNSEEN, Line, Peer, Row, State, lanes_of
from node.host.words import Tone, short
from node.status import short_bytes
from protocol.signed_manifest import fingerprint

DAY = 86_400.0
RECENT = 8  # rounds that a pace is taken from
MAX_POINTS = 5000
SERIES: dict[str, Callable[[Row], float | None]] = {
    "round": lambda row: row.round,
    "at": lambda row: row.at,
    "tokens": lambda row: row.tokens,
    "loss": lambda row: round(row.loss, 5),
    "validation": lambda row: row.validation,
    "contributors": lambda row: row.contributors,
    "late": lambda row: row.late,
    "message": lambda row: round(row.message),
    "sent": lambda row: None if row.sent is None else round(row.sent),
    "raw": lambda row: round(row.raw),
    "seconds": lambda row: None if row.seconds is None else round(row.seconds, 3),
}
Values = dict[str, Any]
T = TypeVar("T")


def snapshot(state: State, now: float) -> Values:
    """Everything that a page needs to begin with, but the history."""
    number, lanes = lanes_of(state, None)
    return {
        **summary(state, now),
        "peers": [peer_values(state, peer) for peer in state.peers.values()],
        "log": [line_values(line) for line in state.log],
        "timeline": {"round": number, "lanes": [lane.model_dump() for lane in lanes]},
        "timelines": [timed.round for timed in state.timelines],
    }


def summary(state: State, now: float) -> Values:
    """The figures at the top of the page. Null where nothing is known."""
    last, recent = state.rows.last, state.rows.recent(RECENT)
    word, tone, reason = status(state)
    trainers, facts = state.trainers, state.facts
    pace = _seconds_a_round(recent)
    return {
        **(_facts(facts) if facts else {}),
        "index": state.index,
        "at": now,
        "opened": state.opened,
        "status": word,
        "tone": tone,
        "reason": reason,
        "round": last.round + 1 if last else 0,
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "validation": next((row.validation for row in reversed(recent) if row.validation is not None), None),
        "progress": _progress(state),
        "seconds_left": _seconds_left(state, recent, pace),
        "tokens_per_second": sum(peer.now.tokens_per_second for peer in trainers if not peer.now.resting),
        "active": len(trainers),
        "joining": sum(1 for peer in trainers if standing(state, peer)[0] == "joining"),
        "left_today": _left_since(state, now - DAY),
        "sending": sum(peer.now.sending for peer in state.live.values()),
        "saved": state.raw / state.sent if state.sent and state.raw else None,
        "round_seconds": pace,
        "in_time": last.contributors if last else None,
        "expected": last.contributors + last.late if last else None,
        "lost": state.lost,
        "missing": state.missing,
    }


def status(state: State) -> tuple[str, Tone, str]:
    """A word for the chip, its colour, and one line that says why."""
    facts, rows, present = state.facts, state.rows, len(state.trainers)
    if _progress(state) == 1.0:
        return "done", "ok", "the run has reached its target"
    if state.lost is not None:
        return "out of sight", "bad", "the host sees no peer of the run; training may go on without it"
    if not present:
        looking = "the host looks for the peers of the run"
        return ("looking", "busy", looking) if len(rows) else ("waiting", "warn", "no peers yet")
    if facts and not len(rows) and present < facts.min_peers:
        return "waiting", "warn", f"{present} of {facts.min_peers} peers are here"
    if not len(rows):
        return "warming up", "busy", "the first round is under way"
    return "training", "ok", ""


def standing(state: State, peer: Peer) -> tuple[str, Tone]:
    """A word for a peer's row, and its colour."""
    if peer.gone is not None:
        return "left" if peer.reason == "left" else "gone", "bad"
    if peer.now.role == "observer":
        return "watching", "busy"
    head = state.rows.last.round + 1 if state.rows.last else 0
    if not peer.given and head > 1 and peer.now.round < head - 1:
        return "joining", "busy"
    if peer.now.round < head - 1:
        return "behind", "warn"
    if peer.now.resting:
        return "resting", "busy"
    return ("training", "ok") if peer.in_time else ("late", "warn")


def peer_values(state: State, peer: Peer) -> Values:
    word, tone = standing(state, peer)
    rounds = peer.given + peer.missed
    return {
        **peer.now.model_dump(),
        "short": short(peer.now.peer),
        "link": _link(state, peer.now),
        "state": word,
        "tone": tone,
        "since": peer.since,
        "gone": peer.gone,
        "reason": peer.reason,
        "given": peer.given,
        "accepted": peer.given / rounds if rounds else None,
        "speeds": [round(speed, 1) for speed in peer.speeds],
    }


def _link(state: State, peer: PeerNow) -> str:
    """By which path others reach it, and for how many it is the path. Ids that it claims are shown if we know them."""
    known = [short(carrier) for carrier in peer.carriers if carrier in state.peers]
    way = f"relay by {', '.join(known)}" if peer.reach == "relay" and known else peer.reach
    relayed = sum(peer.peer in other.now.carriers for other in state.peers.values() if other.gone is None)
    services = [f"relays to {relayed}"] if relayed else []
    if peer.carried:
        services.append(f"carried {short_bytes(peer.carried)} for others")
    return ", ".join([way, *services])


def line_values(line: Line) -> Values:
    return {"index": line.index, "at": line.at, "peer": line.peer, "text": line.text, "tone": line.tone}


def history(state: State, maximum: int) -> dict[str, list[float | None]]:
    """Columns of equal length, one a series; of more rounds than `maximum`, every so many, and always the last."""
    chosen = thinned(list(state.rows), maximum)
    return {name: [value(row) for row in chosen] for name, value in SERIES.items()}


def one_series(state: State, name: str, maximum: int) -> list[tuple[int, float]]:
    """Points (round, value), those where it is known."""
    known = [(row.round, SERIES[name](row)) for row in state.rows]
    return thinned([(number, value) for number, value in known if value is not None], maximum)


def thinned(points: Sequence[T], maximum: int) -> list[T]:
    if len(points) <= maximum:
        return list(points)
    stride = -(-len(points) // maximum)
    kept = [points[position] for position in range(0, len(points), stride)]
    return kept if (len(points) - 1) % stride == 0 else [*kept[: maximum - 1], points[-1]]


def _facts(facts: Facts) -> Values:
    shown = facts.model_dump(exclude={"expiry", "batch_tokens"})
    return {**shown, "fingerprint": fingerprint(facts.organiser)}


def _seconds_a_round(recent: Sequence[Row]) -> float | None:
    known = [row.seconds for row in recent if row.seconds is not None]
    return sum(known) / len(known) if known else None


def _left_since(state: State, moment: float) -> int:
    departures = [(peer.gone, peer.reason) for peer in state.peers.values()]
    return sum(1 for gone, reason in departures if gone is not None and gone > moment and reason != UNSEEN)


def _progress(state: State) -> float | None:
    """Between 0 and 1; None for a run without a target."""
    facts, last = state.facts, state.rows.last
    if facts is None or not (facts.target_rounds or facts.target_tokens):
        return None
    rounds, tokens = (last.round + 1, last.tokens) if last else (0, 0)
    shares = [
        done / target for done, target in ((rounds, facts.target_rounds), (tokens, facts.target_tokens)) if target
    ]
    return min(1.0, max(shares))


def _seconds_left(state: State, recent: Sequence[Row], pace: float | None) -> float | None:
    facts, last = state.facts, state.rows.last
    if facts is None or last is None or pace is None:
        return None
    left = []
    if facts.target_rounds:
        left.append(float(facts.target_rounds - last.round - 1))
    gained = (last.tokens - recent[0].tokens) / (len(recent) - 1) if len(recent) > 1 else 0.0
    if facts.target_tokens and gained > 0:
        left.append((facts.target_tokens - last.tokens) / gained)
    return max(0.0, min(left)) * pace if left else None
