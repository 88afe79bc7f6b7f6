import asyncio
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

import node.local.local_swarm
from node.local.kill_test import KillTest
from node.local.local_swarm import Interrupted, LocalSwarm
from node.local.peer_process import PeerProcess
from node.local.swarm_table import SwarmDisplay
from protocol.errors import MurmurError, StorageError
from protocol.manifest import Manifest, TargetSection, load_manifest

FAKE = Path(__file__).with_name("fake_peer.py")
MANIFEST = load_manifest(Path(__file__).parents[3] / "configs" / "test.toml")


class FakeSwarmFolder:
    """A swarm of stand-ins in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.peers: list[PeerProcess] = []

    def swarm(self, target: int, *options: tuple[str, ...], drill: bool = False) -> LocalSwarm:
        """One peer for each tuple of options; a round takes a tenth of a second."""
        epoch = str(time.time())
        for index, own in enumerate(options):
            home = self.folder / f"peer-{index}"
            command = [sys.executable, str(FAKE), str(home), epoch, str(target), *own]
            self.peers.append(PeerProcess(home.name, home, command))
        display = SwarmDisplay(Console(file=self.said, width=200), plain=True)
        return LocalSwarm(self.manifest(target), self.peers, display, KillTest(len(options)) if drill else None)

    @staticmethod
    def manifest(target: int) -> Manifest:
        return MANIFEST.model_copy(update={"target": TargetSection(rounds=target)})

    def log(self, index: int) -> str:
        return self.peers[index].log.read_text()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSwarmFolder]:
    monkeypatch.setattr(node.local.local_swarm, "TICK_SECONDS", 0.05)
    made = FakeSwarmFolder(tmp_path)
    yield made
    left = [peer.name for peer in made.peers if peer.is_running]
    for peer in made.peers:
        peer.kill()
    assert left == []


async def interrupted(swarm: LocalSwarm, when: Callable[[], bool], times: int = 1) -> float:
    """Send SIGINT to ourselves when the condition holds; the seconds that the swarm took to leave."""
    running = asyncio.create_task(swarm.run())
    async with asyncio.timeout(20):
        while not when():
            await asyncio.sleep(0.02)
    began = time.monotonic()
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
    with pytest.raises(Interrupted):
        await running
    return time.monotonic() - began


async def test_all_reach_the_target(bench: FakeSwarmFolder) -> None:
    outcome = await bench.swarm(15, (), (), ()).run()
    assert outcome.digests == {f"id-of-peer-{index}": f"{15:064x}" for index in range(3)}
    assert [ledger.bytes_sent for ledger in outcome.peer_totals] == [1000] * 3
    assert outcome.tokens == 15_000
    assert (outcome.peers_lost, outcome.peers_rejoined) == (0, 0)
    assert "introduced by /to/peer-0\n" in bench.log(1)
    assert "introduced by\n" in bench.log(0)


async def test_drill_kills_one_half_way_and_brings_it_back(bench: FakeSwarmFolder) -> None:
    outcome = await bench.swarm(80, (), (), (), drill=True).run()
    said = bench.said.getvalue()
    assert "drill: peer-2 is killed in round 4" in said
    assert "without it; peer-2 is started again" in said
    assert "drill: peer-2 is back" in said
    assert (outcome.peers_lost, outcome.peers_rejoined) == (1, 1)
    assert outcome.peer_totals[2].bytes_sent == 2000  # both lives count
    assert "introduced by /to/peer-0 /to/peer-1" in bench.log(2)


async def test_a_death_is_told_with_its_last_words_and_mended_once(bench: FakeSwarmFolder) -> None:
    outcome = await bench.swarm(30, (), ("--dies-once",)).run()
    assert "peer-1 died (exit -9) and is started again; its last words:" in bench.said.getvalue()
    assert "what a pity" in bench.said.getvalue()
    assert (outcome.peers_lost, outcome.peers_rejoined) == (1, 1)


async def test_a_second_death_ends_the_swarm(bench: FakeSwarmFolder) -> None:
    swarm = bench.swarm(300, (), ("--end", "1", "--ends-at", "1"))
    with pytest.raises(MurmurError, match=r"peer-1 died \(exit 1\) and cannot be kept alive; see .*peer-1/log"):
        await swarm.run()


async def test_a_fault_that_a_person_must_mend_keeps_its_kind(bench: FakeSwarmFolder) -> None:
    with pytest.raises(StorageError, match="^the disk is full; free some space$"):
        await bench.swarm(5, ("--end", "9"), ("--end", "9")).run()


async def test_interrupt_lets_all_leave(bench: FakeSwarmFolder) -> None:
    swarm = bench.swarm(10_000, (), ())
    await interrupted(swarm, lambda: all(peer.status for peer in bench.peers) and len(bench.peers) == 2)
    assert [peer.returncode for peer in bench.peers] == [0, 0]
    assert "leaving" in bench.said.getvalue()


async def test_second_interrupt_does_not_wait_for_the_deaf(bench: FakeSwarmFolder) -> None:
    swarm = bench.swarm(10_000, ("--deaf",), ("--deaf",))
    took = await interrupted(swarm, lambda: all(peer.status for peer in bench.peers), times=2)
    assert took < 5
    assert [peer.returncode for peer in bench.peers] == [-signal.SIGKILL] * 2


async def test_the_deaf_are_killed_when_their_time_is_up(
    bench: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.local.local_swarm, "LEAVE_SECONDS", 0.3)
    swarm = bench.swarm(10_000, ("--deaf",), ())
    await interrupted(swarm, lambda: all(peer.status for peer in bench.peers))
    assert [peer.returncode for peer in bench.peers] == [-signal.SIGKILL, 0]


async def test_one_that_never_ends_is_not_waited_for_for_ever(
    bench: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.local.local_swarm, "LAGGARD_SECONDS", 0.5)
    with pytest.raises(MurmurError, match="peer-1 did not reach the target"):
        await bench.swarm(300, ("--ends-at", "1"), ()).run()


async def test_one_that_never_answers_is_named(bench: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.local.local_swarm, "START_SECONDS", 0.3)
    display = SwarmDisplay(Console(file=bench.said), plain=True)
    mute = PeerProcess("peer-0", bench.folder / "peer-0", ["sleep", "60"])
    bench.peers.append(mute)
    with pytest.raises(MurmurError, match="peer-0 does not answer after"):
        await LocalSwarm(bench.manifest(15), [mute], display, None).run()


def test_peers_die_with_the_one_that_started_them(tmp_path: Path) -> None:
    """The control: a child started without the tie outlives its parent."""
    script = f"""
import subprocess, sys, time
from pathlib import Path
from node.local.peer_process import PeerProcess
peer = PeerProcess("tied", Path({str(tmp_path)!r}) / "tied", ["sleep", "60"])
peer.start(())
loose = subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=subprocess.DEVNULL)
print(peer._process.pid, loose.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    tied, loose = map(int, parent.stdout.readline().split())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while running(tied) and time.monotonic() < deadline:
        time.sleep(0.02)
    outlived = running(loose)
    os.kill(loose, signal.SIGKILL)
    assert not running(tied)
    assert outlived


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
