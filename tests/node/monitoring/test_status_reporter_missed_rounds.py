"""Each reason for which a round goes without our work, and which of two counts."""

import pytest

from node.monitoring.status import NodeStatus
from node.monitoring.status_reporter import find_miss_reason
from protocol.consensus.events import RejectReason

AT_WORK = NodeStatus(peer_id="me", run="small", run_id="00" * 32, phase="training")
PAUSED = "others use 60% of the processors"


@pytest.mark.parametrize(
    ("changes", "mishap", "offered", "rounds", "word"),
    [
        ({}, None, False, 1, "slow"),
        ({}, None, True, 1, "late"),
        ({}, "late", True, 1, "late"),
        ({}, "left out", True, 1, "left out"),
        ({}, "lost", True, 1, "lost"),
        ({"paused": PAUSED}, None, False, 1, "paused"),
        ({"paused": PAUSED}, "lost", True, 1, "lost"),
        ({"trainer_trouble": "the trainer died"}, None, False, 1, "no trainer"),
        ({"trainer_trouble": "the trainer died"}, None, True, 1, "late"),
        ({"phase": "catching up"}, None, True, 1, "catching up"),
        ({}, "late", True, 3, "catching up"),
    ],
)
def test_reasons(
    changes: dict[str, object], mishap: RejectReason | None, offered: bool, rounds: int, word: str
) -> None:
    found = find_miss_reason(AT_WORK.model_copy(update=changes), mishap, offered, rounds)
    assert found.word == word and found.text


def test_the_text_says_what_is_known() -> None:
    assert PAUSED in find_miss_reason(AT_WORK.model_copy(update={"paused": PAUSED}), None, False, 1).text
