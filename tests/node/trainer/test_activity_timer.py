"""Where the time goes."""

import pytest

from node.trainer.exchange_loop import ActivityTimer


def test_seconds_add_up_over_lives_and_errors() -> None:
    now = [0.0]
    watch = ActivityTimer({"compute": 5.0}, lambda: now[0])
    with watch.measure("compute"):
        now[0] += 2.0
    with pytest.raises(KeyError), watch.measure("wait"):
        now[0] += 1.0
        raise KeyError
    assert watch.seconds == {"compute": 7.0, "wait": 1.0}
    assert (watch.share("wait"), watch.share("evaluate")) == (0.125, 0.0)
    assert ActivityTimer({}).share("wait") == 0.0
