"""A machine whose clock is an hour off takes part like any other."""

import subprocess
import sys
from pathlib import Path

import pytest

from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from tests.netlab.lab_swarm import LabPeer, LabSwarm, running_lab_swarm
from tests.netlab.laboratory import Laboratory
from tests.swarm.process_swarm import ENDLESS, join_command, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

ROUNDS = 5
FOUNDING_SECONDS = 60.0
HOUR = 3600.0
LIBRARY = Path("/usr/lib") / f"{sys.implementation._multiarch}" / "faketime" / "libfaketimeMT.so.1"
# Left to guess, the library takes the waits of Python's interpreter lock for ones by the wall clock, and they spin.
SHIFT = (
    f"LD_PRELOAD={LIBRARY}", "FAKETIME=+3600s",
    "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1", "FAKETIME_FORCE_MONOTONIC_FIX=0",
)  # fmt: skip


@pytest.fixture
def shifted() -> list[str]:
    """Words before a command that put its wall clock an hour ahead, and no other clock."""
    if not LIBRARY.exists():
        pytest.skip("a clock that is wrong needs libfaketime: apt-get install faketime")
    words = ["env", *SHIFT]
    tell = [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
    times = [
        list(map(float, subprocess.run(command, capture_output=True, check=True).stdout.split()))
        for command in (tell, [*words, *tell])
    ]
    assert times[1][0] - times[0][0] > HOUR - 1 and 0 <= times[1][1] - times[0][1] < 60, times
    return words


def test_a_clock_that_is_an_hour_ahead(laboratory: Laboratory, tmp_path: Path, shifted: list[str]) -> None:
    assert HOUR > CLOCK_TOLERANCE_SECONDS, "the control: records dated by its own clock would be refused"
    manifest = manifest_with(
        target={"rounds": ENDLESS},
        method={"schedule": {"inner_steps": 60}},
        round={"grace": FOUNDING_SECONDS},  # so that all have a vote, however slow this machine is
    )
    nodes = [laboratory.node() for _ in range(3)]
    with running_lab_swarm(tmp_path, manifest, laboratory, nodes) as swarm:
        wrong = set_clock(swarm, shifted)
        swarm.start()
        swarm.wait_for_round(1)
        assert all(status.has_vote for status in swarm.poll()), "two clocks that have to agree would meet in the middle"

        def all_give() -> bool:
            told = swarm.poll()
            return all(status.contributions_included >= ROUNDS and status.peers == 3 for status in told)

        swarm.wait_until(all_give, f"the work of all is taken {ROUNDS} times")
        swarm.wait_for_agreement(after=ROUNDS)
        told = swarm.poll()
        since = {status.name: status.since for status in told}
        assert since[wrong.name] - since["peer-0"] > HOUR - 60, "its clock is wrong indeed"
        assert "dating our record again" in swarm.log(wrong)


def set_clock(swarm: LabSwarm, shifted: list[str]) -> LabPeer:
    """The last peer, as one whose clock is wrong."""
    old = swarm.lab_peers[-1]
    command = join_command(swarm.run, old.folder, "--name", old.name, listen="/ip4/0.0.0.0/tcp/4001")
    swarm.peers[-1] = LabPeer(old.name, old.folder, [*shifted, *command], old.laboratory, old.node)
    return swarm.lab_peers[-1]
