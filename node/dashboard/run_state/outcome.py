"""Whether a run is over, by its target. Pure."""

from node.dashboard.events import RunFacts
from node.dashboard.run_state.round_history import RoundSummary


def progress_to_target(facts: RunFacts | None, last: RoundSummary | None) -> float | None:
    """Return the progress from 0 to 1; `None` for a run without a target."""
    if facts is None or not (facts.target_rounds or facts.target_tokens):
        return None
    rounds, tokens = (last.round + 1, last.tokens) if last else (0, 0)
    targets = ((rounds, facts.target_rounds), (tokens, facts.target_tokens))
    return min(1.0, max(done / target for done, target in targets if target))
