"""The limit of bytes in flight: as much as arrived in the last two seconds."""

import pytest

from protocol.blobs.blob import PIECE_BYTES
from protocol.blobs.scheduler import MIN_PIECES, WINDOW_SECONDS, InFlightLimit

TICK = 0.1
MIN_BYTES = MIN_PIECES * PIECE_BYTES


def observe_rate(
    rate: float, seconds: float, limit: InFlightLimit | None = None, is_idle: bool = False
) -> InFlightLimit:
    limit, ticks = limit or InFlightLimit(), int(seconds / TICK) + 1
    for tick in range(ticks):
        limit.observe(1e3 * rate + tick * TICK, int(rate * tick * TICK), is_idle)
    return limit


@pytest.mark.parametrize("rate", [1e5, 2.5e6, 12.5e6, 125e6])
def test_limit_is_two_seconds_of_bytes_and_a_few_pieces_at_least(rate: float) -> None:
    assert observe_rate(rate, 5.0).max_bytes(0) == pytest.approx(max(MIN_BYTES, WINDOW_SECONDS * rate), rel=0.02)


@pytest.mark.parametrize(("rate", "slow"), [(1e5, True), (12.5e6, True), (125e6, False)])
def test_slow_link_is_detected(rate: float, slow: bool) -> None:
    assert observe_rate(rate, 5.0).is_slow == slow
    assert not InFlightLimit().is_slow, "without received bytes the rate is unknown"


def test_limit_allows_one_piece_per_connection() -> None:
    assert observe_rate(1e5, 5.0).max_bytes(32) == 32 * PIECE_BYTES


def test_limit_shrinks_with_the_rate_but_not_while_idle() -> None:
    limit = observe_rate(12.5e6, 5.0)
    wide = limit.max_bytes(0)
    observe_rate(0.0, 100.0, limit, is_idle=True)
    assert limit.max_bytes(0) == wide
    observe_rate(2.5e6, 20.0, limit)
    assert limit.max_bytes(0) < wide / 3
