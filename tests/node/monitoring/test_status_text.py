"""The status as one line, and the remaining time."""

from typing import Any

import pytest
from rich.cells import cell_len

from node.monitoring.display import fit_parts, status_parts
from node.monitoring.status import NodeStatus, RoundPace


def status(**changes: object) -> NodeStatus:
    values: dict[str, object] = {
        "peer_id": "p", "run": "demo", "run_id": "0", "phase": "training", "round": 12, "target_rounds": 60,
        "step": 600, "loss": 2.9512, "validation_loss": 2.973, "tokens_per_second": 6900.0, "bytes_sent": 3_700_000,
        "contributions_included": 12, "last_included_round": 11, "peers": 3, "seconds_left": 42.0,
    }  # fmt: skip
    return NodeStatus.model_validate(values | changes)


def line(width: int = 200, **changes: object) -> str:
    return fit_parts(status_parts(status(**changes), 65.0), width)


def test_line_of_a_training_node() -> None:
    assert line() == (
        "round 12/60 · step 600 · loss 2.951 · validation 2.973 · 6.9k tok/s · included 12/12 · sent 3.7 MB · 3 peers"
        " · 0:42 left"
    )


def test_narrow_line_keeps_the_figures_that_matter_most() -> None:
    assert line(60) == "round 12/60 · loss 2.951 · 6.9k tok/s · 0:42 left"
    assert line(5) == "round 12/60", "the terminal cuts the rest"
    for width in range(20, 120):
        assert cell_len(line(width)) <= width


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"phase": "waiting for peers", "reason": "1 of 2 are here"}, "waiting for peers: 1 of 2 are here · 1:05"),
        ({"phase": "catching up", "reason": "fetching", "bytes_received": 2_000_000},
         "catching up: fetching · received 2.0 MB · 1:05"),
        ({"phase": "watching", "page": "http://h/"},
         "round 12/60 · loss 2.951 · 3 peers · sent 3.7 MB · page http://h/ · 0:42 left"),
        ({"phase": "rolling out", "rollouts": {"groups made": 48, "groups taken": 25}, "tokens_per_second": 616.0},
         "round 12/60 · groups taken 25/48 · 616 tok/s · sent 3.7 MB · 3 peers · 0:42 left"),
    ],
)  # fmt: skip
def test_line_of_a_node_that_does_not_train(changes: dict[str, Any], expected: str) -> None:
    assert line(**changes) == expected


def test_paused_run_has_no_remaining_time() -> None:
    assert "left" not in line(phase="paused", reason="paused by the organiser since round 12", seconds_left=None)


def test_trouble_is_on_the_line() -> None:
    assert "not contributing: paused, others use it" in line(paused="others use it")
    alone = line(100, alone=True)
    assert alone.endswith("not contributing: no other training peer can be reached · 0:42 left") and "step" not in alone
    assert "10 of 40 steps per round" in line(pace="10 of 40 steps per round: this machine is slower")
    assert line(40, key_conflict="another node uses this node's key").startswith("another node uses this node's key")
    assert "not saved: disk full" in line(unsaved="disk full")
    assert "not contributing" not in line(last_included_round=None), "it has only begun"


def test_time_left_follows_from_the_last_rounds_and_the_nearer_target() -> None:
    """A pause is one long round, which the median passes over. Controls: no target, and no round yet."""
    pace = RoundPace([(10, 1000), (11, 1100), (12, 1200)], [2.0, 2.0, 500.0])
    assert pace.seconds_left(60, None) == 48 * 2.0
    assert pace.seconds_left(60, 2200) == 10 * 2.0
    assert pace.seconds_left(None, None) is None and RoundPace([], []).seconds_left(60, None) is None
    assert pace.seconds_left(12, None) == 0.0
