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

import node.commands.up.local_swarm
from node.commands.up.local_swarm import Interrupted, KillTest, LocalSwarm
from node.commands.up.peer_process import PeerProcess
from node.commands.up.swarm_summary import SwarmDisplay
from protocol.errors import MurmurError, StorageError
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.manifest.sections import TargetSection

pytestmark = pytest.mark.slow

FAKE = Path(__file__).with_name("fake_peer.py")
MANIFEST = load_manifest(Path(__file__).parents[4] / "configs" / "test.toml")


class FakeSwarmFolder:
    """A swarm of fake peers in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = io.StringIO()
        self.peers: list[PeerProcess] = []

    def swarm(self, target: int, *options: tuple[str, ...], drill: bool = False) -> LocalSwarm:
        """Return a swarm with one peer per tuple of options; a round takes 0.1 s."""
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
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSwarmFolder]:
    monkeypatch.setattr(node.commands.up.local_swarm, "TICK_SECONDS", 0.05)
    made = FakeSwarmFolder(tmp_path)
    yield made
    left = [peer.name for peer in made.peers if peer.is_running]
    for peer in made.peers:
        peer.kill()
    assert left == []


async def interrupted(swarm: LocalSwarm, when: Callable[[], bool], times: int = 1) -> float:
    """Interrupt the swarm when the condition holds; returns the seconds that it took to leave."""
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


async def test_all_peers_reach_the_target(fakes: FakeSwarmFolder) -> None:
    outcome = await fakes.swarm(15, (), (), ()).run()
    assert outcome.digests == {f"id-of-peer-{index}": f"{15:064x}" for index in range(3)}
    assert [ledger.bytes_sent for ledger in outcome.peer_totals] == [1000] * 3
    assert outcome.tokens == 15_000
    assert (outcome.peers_lost, outcome.peers_rejoined) == (0, 0)
    assert "introduced by /to/peer-0\n" in fakes.log(1)
    assert "introduced by\n" in fakes.log(0)


async def test_kill_test_kills_and_restarts_the_last_peer(fakes: FakeSwarmFolder) -> None:
    outcome = await fakes.swarm(80, (), (), (), drill=True).run()
    said = fakes.said.getvalue()
    assert "drill: killed peer-2 in round 4" in said
    assert "without it; restarting peer-2" in said
    assert "drill: peer-2 is back" in said
    assert (outcome.peers_lost, outcome.peers_rejoined) == (1, 1)
    assert outcome.peer_totals[2].bytes_sent == 2000  # both starts count
    assert "introduced by /to/peer-0 /to/peer-1" in fakes.log(2)


async def test_dead_peer_is_reported_with_its_log_and_restarted_once(fakes: FakeSwarmFolder) -> None:
    outcome = await fakes.swarm(30, (), ("--dies-once",)).run()
    assert "peer-1 died (exit -9); restarting it; the end of its log:" in fakes.said.getvalue()
    assert "what a pity" in fakes.said.getvalue()
    assert (outcome.peers_lost, outcome.peers_rejoined) == (1, 1)


async def test_second_death_of_a_peer_ends_the_swarm(fakes: FakeSwarmFolder) -> None:
    swarm = fakes.swarm(300, (), ("--end", "1", "--ends-at", "1"))
    with pytest.raises(MurmurError, match=r"peer-1 died \(exit 1\) and cannot be kept alive; see .*peer-1/log"):
        await swarm.run()


async def test_error_for_the_user_keeps_its_kind(fakes: FakeSwarmFolder) -> None:
    with pytest.raises(StorageError, match="^the disk is full; free some space$"):
        await fakes.swarm(5, ("--end", "9"), ("--end", "9")).run()


async def test_interrupt_lets_all_peers_leave(fakes: FakeSwarmFolder) -> None:
    swarm = fakes.swarm(10_000, (), ())
    await interrupted(swarm, lambda: all(peer.status for peer in fakes.peers) and len(fakes.peers) == 2)
    assert [peer.returncode for peer in fakes.peers] == [0, 0]
    assert "Shutting down" in fakes.said.getvalue()


async def test_second_interrupt_kills_peers_that_ignore_the_first(fakes: FakeSwarmFolder) -> None:
    swarm = fakes.swarm(10_000, ("--deaf",), ("--deaf",))
    took = await interrupted(swarm, lambda: all(peer.status for peer in fakes.peers), times=2)
    assert took < 5
    assert [peer.returncode for peer in fakes.peers] == [-signal.SIGKILL] * 2


async def test_peers_that_ignore_the_interrupt_are_killed_after_a_while(
    fakes: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.commands.up.local_swarm, "LEAVE_SECONDS", 0.3)
    swarm = fakes.swarm(10_000, ("--deaf",), ())
    await interrupted(swarm, lambda: all(peer.status for peer in fakes.peers))
    assert [peer.returncode for peer in fakes.peers] == [-signal.SIGKILL, 0]


async def test_peer_that_never_ends_is_an_error_after_a_while(
    fakes: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.commands.up.local_swarm, "LAGGARD_SECONDS", 0.5)
    with pytest.raises(MurmurError, match="peer-1 did not reach the target"):
        await fakes.swarm(300, ("--ends-at", "1"), ()).run()


async def test_peer_that_never_answers_is_named(fakes: FakeSwarmFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.commands.up.local_swarm, "START_SECONDS", 0.3)
    display = SwarmDisplay(Console(file=fakes.said), plain=True)
    mute = PeerProcess("peer-0", fakes.folder / "peer-0", ["sleep", "60"])
    fakes.peers.append(mute)
    with pytest.raises(MurmurError, match="peer-0 does not answer after"):
        await LocalSwarm(fakes.manifest(15), [mute], display, None).run()


def test_peers_die_with_their_parent(tmp_path: Path) -> None:
    """Control: a child without the parent-death signal outlives its parent."""
    script = f"""
import subprocess, sys, time
from pathlib import Path
from node.commands.up.peer_process import PeerProcess
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
