"""Flood one daemon of a small swarm, and measure what its peers lose: `python -m tests.hostile.flood --seconds 60`.

Three real peers train; a fourth identity, an honest observer, calls the victim twice a second. The swarm has one core
to itself, and the flooders have the others: so the pace shows what the daemon spends on them. The trainers sleep after
each step, as one on an accelerator leaves the processors idle. `--undefended` runs the same flood against daemons
without allowances for calls and without limits for unknown keys.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import psutil

from protocol.murmur_pb2 import GossipRequest
from protocol.murmur_pb2_grpc import MembershipStub
from tests.hostile.arena import Arena, ForkedPeer, small_manifest
from tests.hostile.attackers.stranger import Stranger
from tests.hostile.flooder import FLOODERS, NICENESS
from tests.hostile.template import Template
from tests.swarm.process_swarm import isolated_processes
from tests.swarm.processes import process_tree

PING_SECONDS = 0.5
START_SECONDS = 60.0
Homes = Sequence[Path]
RULES = ("call-guard", "newcomer-quota", "flood-limits")


@dataclass(frozen=True)
class FloodResult:
    """What a flood did to a swarm; rates in rounds a second, memory of the victim's daemon and p2pd in bytes.

    `cores`: the share of a core that each program of the victim used, before and during the flood. `refusals`: how
    often the victim counted each reason.
    """

    seconds: float
    pace_before: float
    pace_during: float
    memory_growth: int
    slowest_ping: float
    failed_pings: int
    pings: int
    attacks: dict[str, int]
    refusals: dict[str, int]
    cores: dict[str, tuple[float, float]]

    @property
    def pace_ratio(self) -> float:
        return self.pace_during / self.pace_before


def run_flood(folder: Path, seconds: float, quiet_seconds: float, is_defended: bool = True) -> FloodResult:
    """Run the swarm without and with the flood."""
    cores = sorted(os.sched_getaffinity(0))
    with isolated_processes(), _pinned_to(cores[:1]):
        template = Template()
        arena = Arena(template, folder / "r", small_manifest(), has_member=False)
        try:
            arena.start(() if is_defended else RULES)
            return asyncio.run(_measure(template, arena, folder, seconds, quiet_seconds, cores[1:] or cores))
        finally:
            arena.close()
            template.close()


@contextlib.contextmanager
def _pinned_to(cores: Sequence[int]) -> Iterator[None]:
    """Let this process, and those that it starts, use these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def _measure(
    template: Template, arena: Arena, folder: Path, seconds: float, quiet_seconds: float, attacker_cores: Sequence[int]
) -> FloodResult:
    victim = arena.honest[0]
    address = victim.addresses()[0]
    observer = Stranger(folder / "observer", arena.manifest, (address,), {})
    await observer.open(gossips=False)
    pings: list[float] = []
    pinging = asyncio.create_task(_ping(observer, pings))
    try:
        quiet = _processor_seconds(victim)
        before = await _pace(victim, quiet_seconds)
        memory, calm = _memory_of(victim), _processor_seconds(victim)
        with _flooding(template, arena.run, folder, victim, attacker_cores) as homes:
            async with asyncio.timeout(START_SECONDS):
                while not all(map(_read_counts, homes)):
                    await asyncio.sleep(0.2)
            attacks, refusals = _read_all(homes), await _refusals_of(victim)
            pings.clear()
            start = _processor_seconds(victim)
            during = await _pace(victim, seconds)
            end = _processor_seconds(victim)
            growth = _memory_of(victim) - memory
            attacks, refusals = _read_all(homes) - attacks, await _refusals_of(victim) - refusals
    finally:
        pinging.cancel()
        await observer.transport.stop()
    cores = {
        name: ((calm[name] - quiet[name]) / quiet_seconds, (end[name] - start[name]) / seconds) for name in sorted(end)
    }
    answered = [ping for ping in pings if ping < float("inf")]
    return FloodResult(
        seconds, before, during, growth, max(answered, default=float("inf")), len(pings) - len(answered), len(pings),
        dict(attacks), dict(refusals), cores,
    )  # fmt: skip


async def _refusals_of(victim: ForkedPeer) -> Counter[str]:
    await victim.poll()
    assert victim.status is not None
    return Counter(victim.status.refusals)


def _processor_seconds(victim: ForkedPeer) -> Counter[str]:
    """Return the processor time of the daemon, its p2pd and its trainer so far."""
    found = Counter[str]()
    pid = victim.pid
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            name = "daemon" if process.pid == pid else "p2pd" if process.name() == "p2pd" else "trainer"
            times = process.cpu_times()
            found[name] += times.user + times.system  # type: ignore[assignment]
    return found


def _read_counts(home: Path) -> Counter[str]:
    """Return what a flooder has done so far."""
    path = home / "counts.json"
    return Counter(json.loads(path.read_text())) if path.exists() else Counter()


def _read_all(homes: Sequence[Path]) -> Counter[str]:
    return sum(map(_read_counts, homes), Counter[str]())


async def _pace(victim: ForkedPeer, seconds: float) -> float:
    """Return the rounds a second that a peer applies."""
    first, began = await _round_of(victim), time.monotonic()
    await asyncio.sleep(seconds)
    return (await _round_of(victim) - first) / (time.monotonic() - began)


async def _round_of(victim: ForkedPeer) -> int:
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


def _memory_of(victim: ForkedPeer) -> int:
    """Return the resident memory of the daemon and its p2pd, without the trainer's."""
    found = 0
    pid = victim.pid
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss if process.pid == pid or process.name() == "p2pd" else 0
    return found


@contextlib.contextmanager
def _flooding(template: Template, run: Path, folder: Path, victim: ForkedPeer, cores: Sequence[int]) -> Iterator[Homes]:
    """Run the flooders on these cores, and yield their folders."""
    homes = [folder / f"flooder-{number}" for number in range(FLOODERS)]
    port = victim.status.direct_port if victim.status else 0
    processes = []
    try:
        for number, home in enumerate(homes):
            home.mkdir()
            arguments = [str(run), str(home), victim.addresses()[0], port, number, list(cores)]
            processes.append(template.fork("tests.hostile.flooder:main", arguments, home / "log", NICENESS))
        yield homes
    finally:
        for process in processes:
            process.kill()


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
