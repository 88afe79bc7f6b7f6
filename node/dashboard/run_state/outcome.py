"""Whether a run is over, by its target or because its organiser stopped it. Pure."""

from node.dashboard.events import RunFacts, RunSteered
from node.dashboard.run_state.round_history import RoundSummary


def progress_to_target(facts: RunFacts | None, last: RoundSummary | None) -> float | None:
    """Return the progress from 0 to 1; `None` for a run without a target."""
    if facts is None or not (facts.target_rounds or facts.target_tokens):
        return None
    rounds, tokens = (last.round + 1, last.tokens) if last else (0, 0)
    targets = ((rounds, facts.target_rounds), (tokens, facts.target_tokens))
    return min(1.0, max(done / target for done, target in targets if target))


def was_stopped(steered: RunSteered | None) -> bool:
    """Return whether the newest target is one of `murmur steer RUN stop`: the round from which it holds."""
    reports = steered.revisions if steered else ()
    for report in reversed(reports):
        if report.holds_from is not None and "target.rounds" in report.changes:
            return report.changes["target.rounds"] == max(1, report.from_round)
    return False
