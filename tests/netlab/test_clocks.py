"""A machine whose clock is an hour off takes part like any other."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from protocol.membership.peer_table import CLOCK_TOLERANCE_SECONDS
from tests.netlab.lab.lab_swarm import LabPeer, LabSwarm, running_lab_swarm
from tests.netlab.lab.laboratory import Laboratory
from tests.swarm.process_swarm import ENDLESS, join_command, manifest_with

pytestmark = [pytest.mark.netlab, pytest.mark.timeout(180)]

ROUNDS = 5
FOUNDING_SECONDS = 60.0
SHARED = Path("/dev/shm")
HOUR = 3600.0
LIBRARY = Path("/usr/lib") / f"{sys.implementation._multiarch}" / "faketime" / "libfaketimeMT.so.1"
# Left to guess, the library takes the waits of Python's interpreter lock for ones by the wall clock, and they spin.
SHIFT = (
    f"LD_PRELOAD={LIBRARY}", "FAKETIME=+3600s",
    "FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1", "FAKETIME_FORCE_MONOTONIC_FIX=0",
)  # fmt: skip


@pytest.fixture
def shifted() -> Iterator[list[str]]:
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
    yield words
    remove_orphans(SHARED)


def remove_orphans(folder: Path) -> None:
    """Remove the shared memory of killed processes: another one of that number could not make its own."""
    for path in folder.glob("*faketime_*_*"):
        if not psutil.pid_exists(int(path.name.rpartition("_")[2])):
            path.unlink(missing_ok=True)


def test_shared_memory_of_dead_processes_is_removed_and_that_of_living_ones_stays(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    names = [f"{kind}_{pid}" for kind in ("faketime_shm", "sem.faketime_sem") for pid in (dead.pid, os.getpid())]
    for name in (*names, "other_1"):
        (tmp_path / name).touch()
    remove_orphans(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"other_1", f"faketime_shm_{os.getpid()}", f"sem.faketime_sem_{os.getpid()}"}


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
