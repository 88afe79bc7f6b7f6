"""Two machines that train as one peer: one message, a loss of a machine, its comeback, and callers without the token.

Each machine is a process tree of its own; both are on this host, so gloo's connections need no tunnels here
(tests/netlab/test_site.py has a network between the machines).
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch

from node.processes.process import python_environment
from node.trainer.ipc.channel import AnchorApplied, ApplyAnchor, ContributionHeader, Ready, Snapshotted, TakeSnapshot
from node.trainer.site.token import SiteToken, load_site_key
from tests.node.trainer.process_harness import ProcessHarness
from tests.node.trainer.ranks.test_two_processes import STEPS, OneRank, digest
from tests.node.trainer.state_harness import copy_arena

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
START_SECONDS = 200.0  # several starts of torch on a machine that may be full


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def machine(
    port: int, token: str, devices: str = "cpu", host: str = "127.0.0.1", python: Sequence[str] = (sys.executable,)
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `murmur rank` in a process."""
    process = await asyncio.create_subprocess_exec(
        *(*python, "-m", "node.cli", "rank", f"{host}:{port}", "--devices", devices, "--threads", "1"),
        env={**os.environ, **python_environment(), "MURMUR_SITE_TOKEN": token},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def site_harness(
    folder: Path, port: int, shard: str = "machine", devices: str = "cpu", host: str = "127.0.0.1"
) -> ProcessHarness:
    site = {"host": host, "port": port, "key": str(folder / "site-key"), "shard": shard, "gather_seconds": 1.0}
    return ProcessHarness(folder, recipe="averaging", inner_steps=STEPS, ahead=0, devices=devices, site=site)


async def ready_with(harness: ProcessHarness, ranks: int) -> Ready:
    """Wait until so many ranks train together."""
    while True:
        ready = await harness.until(Ready, START_SECONDS)
        if ready.ranks == ranks:
            return ready


async def test_two_machines_send_what_one_would_and_survive_a_loss(tmp_path: Path) -> None:
    port = free_port()
    two = site_harness(tmp_path, port, "all")
    token = str(SiteToken.of(load_site_key(tmp_path / "site-key")))
    OneRank(two, two.arena).contribute()
    alone = OneRank(two, copy_arena(two.arena))
    before = digest(two.arena)
    try:
        async with machine(port, token) as other:
            await two.trainer.start()
            ready = await ready_with(two, 2)
            assert (ready.device, ready.step, ready.outstanding) == ("2 x cpu", STEPS, 0)
            await two.trainer.send(TakeSnapshot())
            await two.until(Snapshotted)
            assert digest(two.arena) == before, "the parts of the other machine have come back"

            for memory in (two.arena, alone.memory):
                memory.anchor(1).copy_(memory.anchor(0) + 0.01)
            await two.trainer.send(ApplyAnchor(round=1, outcome="included"))
            await two.until(AnchorApplied)
            alone.state.apply_anchor(1, "included")
            theirs, ours = await two.until(ContributionHeader), alone.contribute()
            assert (theirs.round, theirs.steps, theirs.tokens) == (1, STEPS, ours.tokens)
            assert theirs.loss == pytest.approx(ours.loss, abs=1e-6)
            for name, vector in alone.memory.vectors.items():
                torch.testing.assert_close(two.arena.vectors[name], vector, atol=1e-6, rtol=0)
            assert digest(two.arena) != before, "control: the vectors have moved"
            sent, crashes = digest(two.arena), two.trainer.crash_count

            for process in psutil.Process(other.pid).children(recursive=True):
                process.kill()
            other.kill()
            back = await two.until(Ready)
            assert (back.ranks, back.step, back.round, back.outstanding) == (1, 2 * STEPS, 1, 1)
            assert two.trainer.crash_count == crashes + 1
            await two.trainer.send(TakeSnapshot())
            await two.until(Snapshotted)
            assert digest(two.arena) == sent, "the first machine goes on alone, from memory"
        async with machine(port, token) as other:
            again = await ready_with(two, 2)
            assert (again.step, again.outstanding) == (2 * STEPS, 1)
            assert two.trainer.crash_count == crashes + 1, "a machine that comes is not a crash"
            await two.trainer.stop()
            assert await asyncio.wait_for(other.wait(), 60) == 0, "it ends with the first machine"
    finally:
        await two.close()
        alone.memory.close()
