"""When a message is due, and when a trainer waits."""

import pytest

from node.trainer.inner_state import Counters, Outstanding, Work
from node.trainer.pace import is_message_due, must_wait
from optim.schedules import EverySteps


def counters(since: int, outstanding: bool) -> Counters:
    on_its_way = Outstanding(round=0, sizes=(1,), work=Work()) if outstanding else None
    return Counters(since_message=Work(steps=since), outstanding=on_its_way)


@pytest.mark.parametrize(("since", "outstanding", "due"), [(4, False, False), (5, False, True), (9, True, False)])
def test_a_message_is_due_after_its_steps_once_no_other_is_on_its_way(since: int, outstanding: bool, due: bool) -> None:
    assert is_message_due(counters(since, outstanding), 5) is due


@pytest.mark.parametrize(
    ("overlap", "since", "outstanding", "waits"),
    [
        (False, 0, True, True),
        (False, 0, False, False),
        (True, 0, True, False),
        (True, 4, True, False),
        (True, 5, True, True),
        (True, 99, False, False),
    ],
)
def test_with_overlap_it_waits_only_after_a_whole_period(
    overlap: bool, since: int, outstanding: bool, waits: bool
) -> None:
    schedule = EverySteps(inner_steps=5, overlap=overlap)
    assert must_wait(counters(since, outstanding), schedule) is waits
