"""How much may be on its way: two seconds of what lately came."""

import pytest

from protocol.blobs.blob import PIECE_BYTES
from protocol.blobs.scheduler import MIN_PIECES, WINDOW_SECONDS, InFlightLimit

TICK = 0.1
LEAST = MIN_PIECES * PIECE_BYTES


def after(rate: float, seconds: float, window: InFlightLimit | None = None, is_idle: bool = False) -> InFlightLimit:
    window, ticks = window or InFlightLimit(), int(seconds / TICK) + 1
    for tick in range(ticks):
        window.observe(1e3 * rate + tick * TICK, int(rate * tick * TICK), is_idle)
    return window


@pytest.mark.parametrize("rate", [1e5, 2.5e6, 12.5e6, 125e6])
def test_it_is_what_comes_in_two_seconds_and_a_few_pieces_at_least(rate: float) -> None:
    assert after(rate, 5.0).max_bytes(0) == pytest.approx(max(LEAST, WINDOW_SECONDS * rate), rel=0.02)


@pytest.mark.parametrize(("rate", "slow"), [(1e5, True), (12.5e6, True), (125e6, False)])
def test_a_slow_line_is_known(rate: float, slow: bool) -> None:
    assert after(rate, 5.0).is_slow == slow
    assert not InFlightLimit().is_slow, "nothing is known of a line on which nothing came"


def test_many_connections_need_a_call_each() -> None:
    assert after(1e5, 5.0).max_bytes(32) == 32 * PIECE_BYTES


def test_it_shrinks_with_the_rate_but_not_by_idleness() -> None:
    window = after(12.5e6, 5.0)
    wide = window.max_bytes(0)
    after(0.0, 100.0, window, is_idle=True)
    assert window.max_bytes(0) == wide
    after(2.5e6, 20.0, window)
    assert window.max_bytes(0) < wide / 3
