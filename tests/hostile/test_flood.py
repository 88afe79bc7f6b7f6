"""A flood at one daemon of a swarm, for a few seconds; `python -m tests.hostile.flood` runs it for longer.

The control (`--undefended`) is left to that program: the same flood stopped all rounds, and calls were not answered.
That program also measures the pace, which takes a machine that does nothing else.
"""

from pathlib import Path

import pytest

from tests.hostile.flood import run_flood

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(240)]

MAX_MEMORY_GROWTH = 256 * 1024 * 1024
MAX_CORES = 0.5  # that daemon and p2pd use in all, with the rounds


def test_flood_costs_little_is_counted_and_honest_calls_are_answered(tmp_path: Path) -> None:
    result = run_flood(tmp_path, seconds=6, quiet_seconds=3)
    print(result)
    assert result.attacks and result.refusals, "the flood arrives, and is refused by name"
    assert result.memory_growth <= MAX_MEMORY_GROWTH
    assert result.failed_pings <= result.pings // 3, "other programs may take the cores for a moment"
    assert result.pings
    assert sum(result.cores[name][1] for name in ("daemon", "p2pd")) <= MAX_CORES
