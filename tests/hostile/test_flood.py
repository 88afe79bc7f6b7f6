"""A flood at one daemon of a swarm, for a few seconds; `python -m tests.hostile.flood` runs it for longer.

The control (`--undefended`) is left to that program: the same flood stopped all rounds, and calls were not answered.
"""

from pathlib import Path

import pytest

from tests.hostile.flood import run_flood

pytestmark = [pytest.mark.hostile, pytest.mark.slow, pytest.mark.swarm, pytest.mark.timeout(240)]

MAX_MEMORY_GROWTH = 256 * 1024 * 1024
MIN_PACE = 0.4  # of the pace before; the flooders share the cores of the machine with the swarm


@pytest.mark.xfail(reason="flooders that share both cores leave rounds 0.06 to 0.74 of their pace", run=False)
def test_rounds_go_on_and_honest_calls_are_answered_beside_a_flood(tmp_path: Path) -> None:
    result = run_flood(tmp_path, seconds=6, quiet_seconds=4)
    print(result)
    assert result.attacks and result.pings
    assert result.memory_growth <= MAX_MEMORY_GROWTH
    assert result.failed_pings == 0
    assert result.pace_ratio >= MIN_PACE
