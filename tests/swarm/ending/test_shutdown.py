"""Whichever way a node or a swarm ends, nothing of it is left: no process, no socket, no shared memory, no folder."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Self

import psutil
import pytest

from node.paths import find_newest_checkpoint
from tests.slices import nightly
from tests.swarm.process_swarm import (
    ENDLESS,
    POLL_SECONDS,
    ProcessSwarm,
    daemon_pid,
    isolated_processes,
    manifest_with,
    running_swarm,
    write_run,
)
from tests.swarm.processes import (
    find_marked,
    open_ports,
    open_shared_memory,
    process_tree,
    running_processes,
    taken_ports,
)

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

SHARED = Path("/dev/shm")
PORTS = 3  # of a node: for libp2p, for direct connections, for its metrics
AWAY_SECONDS = 20.0
SHUTDOWN_LINE = "Shutting down. Press Ctrl-C again to exit immediately."
SIGNAL_CASES = {
    "SIGTERM": ([signal.SIGTERM], 0),
    "SIGINT": ([signal.SIGINT], 0),
    "SIGHUP": ([signal.SIGHUP], 0),  # the terminal was closed
    "two SIGINT": ([signal.SIGINT, signal.SIGINT], 130),
    "SIGKILL": ([signal.SIGKILL], -signal.SIGKILL),
}


class ProcessResources:
    """What processes hold while they run, for a look afterwards."""

    def __init__(self, processes: list[psutil.Process]) -> None:
        self._processes = processes
        self.ports = {port for process in processes for _, _, port in open_ports(process)}
        self.memory = open_shared_memory(processes)

    def remaining(self) -> list[str]:
        """Of what they held, all that is still there."""
        processes = [
            f"process {process.pid}: {' '.join(process.cmdline())}" for process in running_processes(self._processes)
        ]
        ports = [f"port {port}" for port in taken_ports(self.ports)]
        numbers = {str(process.pid) for process in self._processes}
        shared = [str(path) for path in SHARED.iterdir() if numbers & set(path.name.split("_"))]
        return [*processes, *ports, *shared, *(path for path in self.memory if Path(path).exists())]


def wait_for(condition: Callable[[], object], what: Callable[[], object], seconds: float = AWAY_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(POLL_SECONDS)


def socket_folders() -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob("murmur-*"))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSwarm]:
    """One peer for each way to end."""
    with running_swarm(
        tmp_path_factory.mktemp("leaving"), manifest_with(target={"rounds": ENDLESS}), len(SIGNAL_CASES)
    ) as made:
        made.start()
        made.wait_for_round(2)
        yield made


@pytest.mark.parametrize("way", SIGNAL_CASES)
def test_nothing_is_left_of_a_node(swarm: ProcessSwarm, way: str) -> None:
    peer = swarm.peers[list(SIGNAL_CASES).index(way)]
    signals, code = SIGNAL_CASES[way]
    kin = process_tree(daemon_pid(peer))
    assert len(kin) == 3, "the daemon, its trainer and its p2pd"
    traces = ProcessResources(kin)
    assert traces.remaining(), "the control: what runs is found"
    assert len(traces.ports) == PORTS
    assert not traces.memory
    folder = (peer.folder / "sockets").readlink()
    saved = find_newest_checkpoint(peer.folder)
    shown = swarm.poll(peer)[0].round
    send_signals(swarm, kin, signals)
    swarm.wait_until(lambda: peer.returncode is not None, "it ends", AWAY_SECONDS)
    assert peer.returncode == code, swarm.describe()
    wait_for(lambda: not traces.remaining(), traces.remaining)
    if way in ("SIGTERM", "SIGINT", "SIGHUP"):
        assert not folder.exists()
        assert saved is not None and find_newest_checkpoint(peer.folder) != saved, (
            "a checkpoint is written on the way out"
        )
        assert peer.status is not None and peer.status.round >= shown
    else:  # nobody was there to remove it; the next start is
        assert folder.exists()


def send_signals(swarm: ProcessSwarm, kin: list[psutil.Process], signals: list[signal.Signals]) -> None:
    """One after the other has been heard: two signals of a kind that both wait are one to the kernel."""
    peer = next(peer for peer in swarm.peers if daemon_pid(peer) == kin[0].pid)
    if len(signals) > 1:  # whoever waits for a frozen trainer is still leaving when the second comes
        trainer = next(process for process in kin if "node.trainer" in process.cmdline())
        trainer.suspend()
    for number, sent in enumerate(signals):
        swarm.wait_until(lambda heard=number: swarm.log(peer).count(SHUTDOWN_LINE) >= heard, "the signal is heard")  # type: ignore[misc]
        kin[0].send_signal(sent)


def test_the_next_start_removes_what_a_kill_left(tmp_path: Path) -> None:
    with running_swarm(tmp_path, manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 1}), peers=1) as swarm:
        swarm.start_first()
        swarm.kill()
        [stale] = socket_folders()
        swarm.start_first()
        [fresh] = socket_folders()
        assert fresh != stale
        swarm.leave()
        assert not socket_folders()


class UpProcess:
    """`murmur up` in a process, its words in a file."""

    def __init__(self, run: Path, folder: Path, peers: int) -> None:
        self.folder = folder
        self._output = folder.with_suffix(".out")
        words = ["up", str(run), "--dir", str(folder), "--peers", str(peers), "--device", "cpu"]
        with self._output.open("ab") as file:
            self.process = subprocess.Popen([sys.executable, "-m", "node.cli", *words], stdout=file, stderr=file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return self._output.read_text()

    def wait_for(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        def over() -> bool:
            return bool(condition()) or self.process.poll() is not None

        wait_for(over, lambda: f"not in {seconds:g} s: {what}\n{self.output()}", seconds)
        assert condition(), f"ended with {self.process.poll()} before {what}\n{self.output()}"

    def answers(self, index: int) -> bool:
        """Whether that peer of this start has said where it is found."""
        try:
            said = json.loads((self.folder / f"peer-{index}" / "node.json").read_bytes())
        except (OSError, ValueError):
            return False
        # An earlier start left the same file, and its port may be somebody else's by now.
        ours = {process.pid for process in process_tree(self.process.pid)}
        return said["pid"] in ours and bool(taken_ports([said["metrics_port"]]))

    def checkpoints(self) -> set[Path]:
        """The newest of each peer."""
        newest = (find_newest_checkpoint(folder) for folder in self.folder.glob("peer-*"))
        return {found for found in newest if found}

    def saved_since(self, before: set[Path]) -> bool:
        return bool(self.checkpoints() - before)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(AWAY_SECONDS + 10)


@pytest.fixture
def world() -> Iterator[str]:
    with isolated_processes() as mark:
        yield mark


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_swarm(tmp_path: Path, world: str, number: signal.Signals) -> None:
    run = write_run(tmp_path, manifest_with(target={"rounds": ENDLESS}))
    with UpProcess(run, tmp_path / "swarm", peers=2) as up:
        up.wait_for(up.checkpoints, "a round is saved")
        kin = find_marked(world)
        assert len(kin) == 7, [process.cmdline() for process in kin]
        traces = ProcessResources(kin)
        assert len(traces.ports) == 2 * PORTS
        assert not traces.memory
        os.kill(up.process.pid, number)
        code = up.process.wait(AWAY_SECONDS + 10)
        assert code == (-number if number == signal.SIGKILL else 130), up.output()
        wait_for(
            lambda: not traces.remaining() and not find_marked(world), lambda: [traces.remaining(), find_marked(world)]
        )
    if number != signal.SIGKILL:
        assert not socket_folders()
        assert "resumes the run" in up.output().replace("\n", "")


@pytest.mark.parametrize("cycles", nightly([2, 4]))
@pytest.mark.timeout(300)
def test_up_and_stop_again_and_again(tmp_path: Path, world: str, cycles: int) -> None:
    run = write_run(tmp_path, manifest_with(target={"rounds": ENDLESS}))
    folder = tmp_path / "swarm"
    for cycle in range(cycles):
        with UpProcess(run, folder, peers=2) as up:
            # Most are stopped while they start, which is quick; the last one has gone on with what the others left.
            up.wait_for(partial(up.answers, 0), "the first peer answers")
            if cycle == cycles - 1:
                before = up.checkpoints()
                up.wait_for(partial(up.saved_since, before), "a round is saved")
                traces = ProcessResources(find_marked(world))
            assert up.interrupt() == 130, up.output()
        assert not find_marked(world), [process.cmdline() for process in find_marked(world)]
        assert not socket_folders()
    wait_for(lambda: not traces.remaining(), traces.remaining)
    assert up.output().count("resumes the run") == cycles
