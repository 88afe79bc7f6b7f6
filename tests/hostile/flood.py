"""Flood one daemon of a small swarm, and measure what its peers lose: `python -m tests.hostile.flood --seconds 60`.

The swarm has two real peers that train; a third identity, an honest observer, calls the victim twice a second.
`--undefended` runs the same flood against daemons without allowances for calls and without limits for unknown keys.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psutil

from node.local.peer_process import PeerProcess
from protocol.murmur_pb2 import GossipRequest
from protocol.murmur_pb2_grpc import MembershipStub
from tests.hostile.attackers.stranger import Stranger
from tests.hostile.flooder import FLOODERS
from tests.swarm.process_swarm import ENDLESS, ProcessSwarm, daemon_pid, isolated_processes, manifest_with
from tests.swarm.processes import process_tree

PING_SECONDS = 0.5
UNDEFENDED = """
from protocol.membership import directory, known_peers, newcomers
from protocol.transport import call_guard, connection_supervisor
call_guard.CallGuard.charge = lambda *_: None
connection_supervisor.STRANGERS_BYTES_PER_SECOND = 1e12
connection_supervisor.STREAM_BURST = connection_supervisor.STREAMS_PER_SECOND = 10**9
connection_supervisor.ConnectionSupervisor.ban = lambda *_: None
newcomers.UNLIMITED_KEYS = 10**9
newcomers.CHECK_LIMITS = {origin: newcomers.CheckLimits(1e9, 1e9, 1e9, 1e9) for origin in newcomers.CHECK_LIMITS}
directory.CALL_BURST = directory.RECORDS_PER_CALL = 10**9
directory.REPORT_PAUSE = 0.0
from node.cli import main
main()
"""


@dataclass(frozen=True)
class FloodResult:
    """What a flood did to a swarm; rates in rounds a second, memory of the victim's daemon and p2pd in bytes."""

    seconds: float
    pace_before: float
    pace_during: float
    memory_growth: int
    slowest_ping: float
    failed_pings: int
    pings: int
    attacks: dict[str, int]

    @property
    def pace_ratio(self) -> float:
        return self.pace_during / self.pace_before


def run_flood(folder: Path, seconds: float, quiet_seconds: float, is_defended: bool = True) -> FloodResult:
    """Run the swarm without and with the flood."""
    manifest = manifest_with(target={"rounds": ENDLESS}, run={"min_peers": 2})
    with isolated_processes():
        swarm = ProcessSwarm(folder, manifest, peers=2)
        for peer in swarm.peers:
            if not is_defended:
                _replace_program(peer, UNDEFENDED)
        try:
            swarm.start()
            swarm.wait_for_round(5)
            return asyncio.run(_measure(swarm, folder, seconds, quiet_seconds))
        finally:
            swarm.kill()


async def _measure(swarm: ProcessSwarm, folder: Path, seconds: float, quiet_seconds: float) -> FloodResult:
    victim = swarm.peers[0]
    address = victim.addresses()[0]
    observer = Stranger(folder / "observer", swarm.manifest, (address,), {})
    await observer.open(gossips=False)
    pings: list[float] = []
    pinging = asyncio.create_task(_ping(observer, pings))
    try:
        before = await _pace(victim, quiet_seconds)
        memory = _memory_of(victim)
        with _flooding(swarm.run, folder, address, victim) as homes:
            while not all(_read_counts(home)["gossip"] for home in homes):
                await asyncio.sleep(0.2)
            attacks = _read_all(homes)
            pings.clear()
            during = await _pace(victim, seconds)
            growth = _memory_of(victim) - memory
            attacks = _read_all(homes) - attacks
    finally:
        pinging.cancel()
        await observer.transport.stop()
    answered = [ping for ping in pings if ping < float("inf")]
    return FloodResult(
        seconds, before, during, growth, max(answered, default=float("inf")), len(pings) - len(answered), len(pings),
        dict(attacks),
    )  # fmt: skip


def _read_counts(home: Path) -> Counter[str]:
    """Return what a flooder has done so far."""
    path = home / "counts.json"
    return Counter(json.loads(path.read_text())) if path.exists() else Counter()


def _read_all(homes: Sequence[Path]) -> Counter[str]:
    return sum(map(_read_counts, homes), Counter[str]())


async def _pace(victim: PeerProcess, seconds: float) -> float:
    """Return the rounds a second that a peer applies."""
    first, began = await _round_of(victim), time.monotonic()
    await asyncio.sleep(seconds)
    return (await _round_of(victim) - first) / (time.monotonic() - began)


async def _round_of(victim: PeerProcess) -> int:
    await victim.poll()
    assert victim.status is not None
    return victim.status.round


async def _ping(observer: Stranger, pings: list[float]) -> None:
    """Call the victim twice a second, and note how long each answer takes."""
    request = GossipRequest(run=bytes.fromhex(observer.run_id), time=time.time())
    while True:
        began = time.monotonic()
        try:
            await MembershipStub(observer.transport.channel(observer.victims[0])).Gossip(request, timeout=5)
            pings.append(time.monotonic() - began)
        except grpc.aio.AioRpcError:
            pings.append(float("inf"))
        await asyncio.sleep(PING_SECONDS)


def _memory_of(victim: PeerProcess) -> int:
    """Return the resident memory of the daemon and its p2pd, without the trainer's."""
    found = 0
    for process in process_tree(daemon_pid(victim)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += 0 if "node.trainer" in " ".join(process.cmdline()) else process.memory_info().rss
    return found


@contextlib.contextmanager
def _flooding(run: Path, folder: Path, address: str, victim: PeerProcess) -> Iterator[list[Path]]:
    """Run the flooders, and yield their folders."""
    homes = [folder / f"flooder-{number}" for number in range(FLOODERS)]
    port = victim.status.direct_port if victim.status else 0
    processes = []
    for number, home in enumerate(homes):
        home.mkdir()
        words = [str(run), str(home), address, str(port), str(number)]
        processes.append(subprocess.Popen([sys.executable, "-m", "tests.hostile.flooder", *words]))
    try:
        yield homes
    finally:
        for process in processes:
            for child in process_tree(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.wait()


def _replace_program(peer: PeerProcess, code: str) -> None:
    """Let a peer run this instead of the module that `-m` names, with the same arguments."""
    python, _, _, *words = peer._command
    peer._command = (python, "-c", code, *words)


def main(words: Sequence[str]) -> None:
    """Print what a flood did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--undefended", action="store_true")
    chosen = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        result = run_flood(Path(folder), chosen.seconds, min(20.0, chosen.seconds), not chosen.undefended)
    print(json.dumps({**asdict(result), "pace_ratio": result.pace_ratio}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
