"""An anchor that arrives before the one before it was applied replaces it, and keeps its outcome."""

import pytest

from node.trainer.ipc.channel import ApplyAnchor, ContributionOutcome
from node.trainer.schedule import merge_pending


@pytest.mark.parametrize("outcome", ["included", "excluded", "lost", "none"])
def test_outcome_of_a_replaced_anchor_is_applied_with_the_next_one(outcome: ContributionOutcome) -> None:
    waiting = ApplyAnchor(round=4, outcome=outcome, steps=7)
    assert merge_pending(waiting, ApplyAnchor(round=5, outcome="none")) == ApplyAnchor(round=5, outcome=outcome)
    for newer in ("included", "excluded"):
        command = ApplyAnchor(round=5, outcome=newer)
        assert merge_pending(waiting, command) == command


def test_first_anchor_is_applied_as_it_is() -> None:
    command = ApplyAnchor(round=5, outcome="included")
    assert merge_pending(None, command) is command
