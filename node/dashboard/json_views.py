"""JSON views of the run's state: the summary, the peers, the history. Pure functions."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from node.commands.eval.results import Result
from node.dashboard.events import PeerReport, RunFacts
from node.dashboard.log_text import LogLine, Tone, short_id
from node.dashboard.rounds import RoundSummary, find_warnings
from node.dashboard.state import UNSEEN_SINCE_RESTART, PeerHistory, RunState, lowest_sum, timings_of_round
from node.dashboard.steering import revision_values
from node.monitoring.stage_table import bar_share, describe_empty_stages
from node.monitoring.status import PACE_ROUNDS, RoundPace
from node.units import format_bytes
from protocol.signing import fingerprint

COURSE_WIDTH: Final = 100.0  # of the course, whose height is COURSE_HEIGHT
COURSE_HEIGHT: Final = 20.0
MAX_RESULT_POINTS: Final = 100
MAX_SHOWN_METRICS: Final = 60  # metrics
DAY_SECONDS = 86_400.0
RECENT_ROUNDS = 8  # rounds over which the pace is averaged
MAX_POINTS = 5000
Values = dict[str, Any]
T = TypeVar("T")


def evaluation_values(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each metric of each task, those that were measured first at the top."""
    courses: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        courses.setdefault((result.task, result.metric), []).append(result)
    return [
        {**course[-1].model_dump(), "first": course[0].value, "points": course_points(course)}
        for course in list(courses.values())[:MAX_SHOWN_METRICS]
    ]


def course_points(course: Sequence[Result]) -> str:
    """Return the points of an SVG line over the tokens of the run; empty for less than two."""
    known = [(one.tokens, one.value) for one in course if one.tokens is not None][-MAX_RESULT_POINTS:]
    if len({tokens for tokens, _ in known}) < 2:
        return ""
    lows, highs = (tuple(choose(column) for column in zip(*known, strict=True)) for choose in (min, max))
    spread = highs[1] - lows[1] or 1.0
    places = (
        (COURSE_WIDTH * (tokens - lows[0]) / (highs[0] - lows[0]), COURSE_HEIGHT * (highs[1] - value) / spread)
        for tokens, value in sorted(known)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


SERIES: dict[str, Callable[[RoundSummary], float | None]] = {
    "round": lambda row: row.round,
    "at": lambda row: row.at,
    "tokens": lambda row: row.tokens,
    "loss": lambda row: round(row.loss, 5),
    "validation": lambda row: row.validation_loss,
    "reward": lambda row: None if row.reward is None else round(row.reward, 4),
    "contributors": lambda row: row.contributors,
    "late": lambda row: row.late_count,
    "message": lambda row: round(row.contribution_bytes),
    "sent": lambda row: None if row.sent_bytes is None else round(row.sent_bytes),
    "raw": lambda row: round(row.all_reduce_bytes),
    "seconds": lambda row: None if row.seconds is None else round(row.seconds, 3),
}


def snapshot(state: RunState, now: float) -> Values:
    """Return everything that a page needs at first, except the history."""
    round_number, lanes = timings_of_round(state, None)
    return {
        **summary(state, now),
        "peers": [peer_values(state, peer) for peer in state.peers.values()],
        "log": [log_line_values(line) for line in state.log],
        "timeline": {"round": round_number, "lanes": [lane.model_dump() for lane in lanes]},
        "timelines": [timed.round for timed in state.timelines],
        "sample": state.sample.model_dump(exclude={"kind"}) if state.sample else None,
        "evaluations": evaluation_values(state.evaluations),
        "revisions": [revision_values(report) for report in state.steered.revisions] if state.steered else [],
    }


def summary(state: RunState, now: float) -> Values:
    """Return the figures at the top of the page; unknown ones are `None`."""
    last, recent = state.rows.last, state.rows.recent(RECENT_ROUNDS)
    word, tone, reason = run_status(state)
    trainers, facts = state.trainers, state.facts
    pace = _mean_round_seconds(recent)
    validated = next((row for row in reversed(recent) if row.validation_loss is not None), None)
    return {
        **(_fact_values(facts) if facts else {}),
        "index": state.index,
        "at": now,
        "opened": state.opened_at,
        "status": word,
        "tone": tone,
        "reason": reason,
        "warnings": () if state.is_over else find_warnings(state.trend),
        "round": state.round,
        "stages": stage_values(state),
        "tokens": last.tokens if last else 0,
        "loss": last.loss if last else None,
        "reward": next((row.reward for row in reversed(recent[-2:]) if row.reward is not None), None),
        "validation": validated.validation_loss if validated else None,
        "validation_by_source": dict(validated.validation_by_source) if validated else {},
        "progress": state.progress,
        "end_version": str(state.index) if state.is_over else "",
        "seconds_left": seconds_left(state),
        "tokens_per_second": _speed(state),
        "active": len(trainers),
        "joining": sum(1 for peer in trainers if peer_status(state, peer)[0] == "joining"),
        "left_today": _count_left_since(state, now - DAY_SECONDS),
        "sending": sum(peer.report.sending for peer in state.live.values()),
        "saved": state.all_reduce_bytes / state.sent_bytes if state.sent_bytes and state.all_reduce_bytes else None,
        "round_seconds": pace,
        "in_time": last.contributors if last else None,
        "expected": last.contributors + last.late_count if last else None,
        "lost": state.lost_since,
        "missing": state.missing_rounds,
        "microbatches": _count_microbatches(state),
    }


def stage_values(state: RunState) -> list[Values]:
    """Return the stages of a pipeline, each with its rate as a share of the fastest stage's."""
    table = state.stages
    return [{**entry.model_dump(exclude={"waiting"}), "share": bar_share(entry, table)} for entry in table]


def _speed(state: RunState) -> float:
    """Return the tokens a second of all trainers; of a pipeline, of its slowest stage."""
    if state.is_paused:
        return 0.0
    reports = [peer.report for peer in state.trainers]
    speeds = [(report.stage, 0.0 if report.resting else report.tokens_per_second) for report in reports]
    return lowest_sum(len(state.stages), speeds) if state.stages else sum(speed for _, speed in speeds)


def _count_microbatches(state: RunState) -> dict[str, int]:
    """Return the microbatches of all owners of a pipeline by result; none for a model that is not cut."""
    reports = [peer.report.microbatches for peer in state.peers.values()] if state.stages else []
    return dict(sum(map(Counter, reports), Counter[str]()))


def run_status(state: RunState) -> tuple[str, Tone, str]:
    """Return the status word of the run, its colour, and one line that says why."""
    facts, present = state.facts, len(state.trainers)
    if state.is_over:
        stopped, reached = "the organiser has stopped the run", "the run has reached its target"
        return "done", "ok", stopped if state.was_stopped else reached
    if state.have_all_left:
        return "empty", "busy", "all peers have left; murmur join continues the run"
    if state.lost_since is not None:
        return "out of sight", "bad", "the host sees no peer of the run; training may continue without it"
    if not present:
        looking = "the host is looking for peers of the run"
        return ("looking", "busy", looking) if state.has_begun else ("waiting", "warn", "no peers yet")
    if facts and not state.has_begun and present < facts.min_peers:
        return "waiting", "warn", f"{present} of {facts.min_peers} peers are here"
    if state.is_paused:
        return "paused", "busy", f"paused by the organiser since round {state.round}"
    empty = describe_empty_stages(state.stages) if state.has_begun else ()
    if empty:
        return "waiting", "warn", "; ".join(empty)
    ready = sum(1 for peer in state.trainers if not peer.report.resting)
    if facts and not state.has_begun and ready < facts.min_peers:
        return "waiting", "warn", f"{present} peers are here, {ready} of them ready to train"
    if not state.has_begun:
        return "warming up", "busy", "the first round is under way"
    return "training", "ok", ""


def peer_status(state: RunState, peer: PeerHistory) -> tuple[str, Tone]:
    """Return the status word of a peer and its colour."""
    if peer.gone_at is not None:
        return ("left", "busy") if peer.has_left_politely or state.is_over else ("gone", "bad")
    if peer.report.role == "observer":
        return "watching", "busy"
    if peer.report.role == "rollout":
        return "rolls out", "ok"
    head = state.round
    if not peer.included_count and head > 1 and peer.report.round < head - 1:
        return "joining", "busy"
    if peer.report.round < head - 1:
        return "behind", "warn"
    if state.is_over:
        return "done", "ok"
    if state.is_paused:
        return "paused", "busy"
    if peer.report.resting:
        is_ready = peer.report.device or peer.included_count
        return "resting" if is_ready else "starting", "busy"
    return ("training", "ok") if peer.in_time else ("late", "warn")


def peer_values(state: RunState, peer: PeerHistory) -> Values:
    word, tone = peer_status(state, peer)
    rounds, given = peer.included_count + peer.missed_count, state.contributors.of(peer.report.peer)
    is_known = given.rounds > 0 or peer in state.chain_trainers or not state.stages  # else its stage counts its work
    total = state.rows.last.tokens if state.rows.last else 0
    return {
        **peer.report.model_dump(exclude={"stage_rate", "microbatches"}),
        "stage": peer.report.stage if state.stages else None,
        "rollouts": peer.report.rollouts or None,
        "short": short_id(peer.report.peer),
        "link": _describe_link(state, peer.report),
        "state": word,
        "tone": tone,
        "since": peer.since,
        "gone": peer.gone_at,
        "reason": peer.reason,
        "given_rounds": given.rounds if is_known else None,
        "given_tokens": given.tokens if is_known else None,
        "given_seconds": round(given.seconds, 1) if is_known else None,
        "share": given.tokens / total if total and is_known else None,
        "accepted": peer.included_count / rounds if rounds else None,
        "speeds": [round(speed, 1) for speed in peer.speeds],
    }


def _describe_link(state: RunState, peer: PeerReport) -> str:
    """Return how other peers reach this one, and its relayed bytes; only relays known to the host are named."""
    known = [short_id(carrier) for carrier in peer.carriers if carrier in state.peers]
    path = f"relay by {', '.join(known)}" if peer.reach == "relay" and known else peer.reach
    relayed = sum(peer.peer in other.report.carriers for other in state.peers.values() if other.gone_at is None)
    services = [f"relays to {relayed}"] if relayed else []
    if peer.carried:
        services.append(f"relayed {format_bytes(peer.carried)} for others")
    return ", ".join([path, *services])


def log_line_values(line: LogLine) -> Values:
    return {"id": line.id, "at": line.at, "peer": line.peer, "text": line.text, "tone": line.tone}


def history(state: RunState, maximum: int) -> dict[str, list[float | None]]:
    """Return one column per series, all of equal length, thinned out to `maximum` rounds including the last."""
    chosen = thin_out(list(state.rows), maximum)
    return {name: [value(row) for row in chosen] for name, value in SERIES.items()}


def series_points(state: RunState, name: str, maximum: int) -> list[tuple[int, float]]:
    """Return the points (round, value) whose value is known, thinned out to `maximum`."""
    points = [(row.round, SERIES[name](row)) for row in state.rows]
    return thin_out([(round_number, value) for round_number, value in points if value is not None], maximum)


def thin_out(points: Sequence[T], maximum: int) -> list[T]:
    """Return every n-th point, at most `maximum`, and always the last one."""
    if len(points) <= maximum:
        return list(points)
    stride = -(-len(points) // maximum)
    kept = [points[position] for position in range(0, len(points), stride)]
    return kept if (len(points) - 1) % stride == 0 else [*kept[: maximum - 1], points[-1]]


def _fact_values(facts: RunFacts) -> Values:
    shown = facts.model_dump(exclude={"expiry", "batch_tokens"})
    return {**shown, "fingerprint": fingerprint(facts.organiser)}


def _mean_round_seconds(recent: Sequence[RoundSummary]) -> float | None:
    known = [row.seconds for row in recent if row.seconds is not None]
    return sum(known) / len(known) if known else None


def _count_left_since(state: RunState, moment: float) -> int:
    departures = [(peer.gone_at, peer.reason) for peer in state.peers.values()]
    return sum(
        1 for gone, reason in departures if gone is not None and gone > moment and reason != UNSEEN_SINCE_RESTART
    )


def seconds_left(state: RunState) -> float | None:
    """Return the time to the target; None without one, before two rounds, and while the run does not go on."""
    facts, recent = state.facts, state.rows.recent(PACE_ROUNDS)
    if facts is None or state.is_over or state.is_paused:
        return None
    heads = [(row.round + 1, row.tokens) for row in recent]
    pace = RoundPace(heads, [row.seconds for row in recent if row.seconds is not None])
    return pace.seconds_left(facts.target_rounds, facts.target_tokens)
