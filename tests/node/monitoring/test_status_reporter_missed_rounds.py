"""Each reason why a round has none of our work, and which of two counts."""

import pytest

from node.monitoring.status import NodeStatus
from node.monitoring.status_reporter import find_miss_reason
from protocol.consensus.events import RejectReason

TRAINING = NodeStatus(peer_id="me", run="small", run_id="00" * 32, phase="training")
PAUSED = "others use 60% of the processors"


@pytest.mark.parametrize(
    ("changes", "reject_reason", "is_submitted", "rounds", "word"),
    [
        ({}, None, False, 1, "slow"),
        ({}, None, True, 1, "late"),
        ({}, "late", True, 1, "late"),
        ({}, "left out", True, 1, "left out"),
        ({}, "not fetched", True, 1, "not fetched"),
        ({"paused": PAUSED}, None, False, 1, "paused"),
        ({"paused": PAUSED}, "not fetched", True, 1, "not fetched"),
        ({"trainer_trouble": "the trainer died"}, None, False, 1, "no trainer"),
        ({"trainer_trouble": "the trainer died"}, None, True, 1, "late"),
        ({"phase": "catching up"}, None, True, 1, "catching up"),
        ({}, "late", True, 3, "catching up"),
    ],
)
def test_find_miss_reason(
    changes: dict[str, object], reject_reason: RejectReason | None, is_submitted: bool, rounds: int, word: str
) -> None:
    missed = find_miss_reason(TRAINING.model_copy(update=changes), reject_reason, is_submitted, rounds)
    assert missed.word == word and missed.text


def test_text_of_a_miss_reason_quotes_the_status() -> None:
    assert PAUSED in find_miss_reason(TRAINING.model_copy(update={"paused": PAUSED}), None, False, 1).text
