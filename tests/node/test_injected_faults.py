"""Faults are injected by one variable, in runs named `test` only."""

import pytest

from node.injected_faults import VARIABLE, Faults, PlaceCounter, injected_faults, parse_faults
from protocol.errors import UsageError


def test_variable_is_read_in_runs_named_test_only() -> None:
    assert injected_faults({}, "my-run") is None
    assert injected_faults({VARIABLE: "slow=2"}, "test") == Faults(slow=2)
    with pytest.raises(UsageError, match='for runs named "test", not "my-run"; unset it'):
        injected_faults({VARIABLE: "slow=2"}, "my-run")


def test_all_parts_are_parsed() -> None:
    text = "kill=node:told:3, answers=drop:2,answers=late:5,outcomes=drop:4,tasks=copy:1,slow=1.5,wrong=task size:7"
    text += ",adds=always"
    assert parse_faults(text) == Faults(
        victim="node",
        point="told",
        killed_at=3,
        dropped_answers=2,
        late_answers=5,
        dropped_outcomes=4,
        copied_tasks=1,
        adds="always",
        slow=1.5,
        wrong="task size",
        wrong_at=7,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill",
        "kill=node:told",
        "kill=node:told:0",
        "kill=host:told:1",
        "kill=trainer:told:1",
        "slow=0.5",
        "slow=nan",
    ]
    + ["answers=late", "answers=lost:1", "wrong=colour:1", "sleep=1", "tasks=copy:-1", "tasks=copy:1:2", "adds=twice"],
)
def test_other_values_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=VARIABLE) as caught:
        parse_faults(text)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_places_are_counted_by_name() -> None:
    places = PlaceCounter()
    assert [places.is_nth("a", 2) for _ in range(4)] == [False, True, False, False]
    assert [places.is_each("b", 2) for _ in range(4)] == [False, True, False, True]
    assert not places.is_each("c", 0)
