"""The processes of a node import torch's compiler and scipy's BLAS only where they use them: 1 s and 0.3 s for each."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

COSTLY = ["torch._dynamo", "scipy.linalg"]


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", f"import {', '.join(COSTLY)}"], ids=["as it is", "control"])
def test_daemon_and_trainer_import_nothing_costly(tmp_path: Path, extra: str) -> None:
    program = f"from tests.node.processes.test_process_imports import take_part; take_part({str(tmp_path)!r}); {extra}"
    program += f"\nimport sys; print([name for name in {COSTLY} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout == f"{COSTLY if extra else []}\n", ended.stderr


def take_part(folder: str) -> None:
    """Import a daemon, and let a trainer make steps, a contribution and a validation in this process."""
    import node.daemon.lifecycle  # noqa: F401

    asyncio.run(_train(Path(folder)))


async def _train(folder: Path) -> None:
    from node.trainer.ipc.channel import ContributionHeader, DaemonChannel, Stop, TrainerChannel
    from node.trainer.loop import Trainer
    from tests.node.trainer.process_harness import ProcessHarness

    bench = ProcessHarness(folder, inner_steps=2)
    ours, theirs = socket.socketpair()
    trainer = Trainer(bench.config(), bench.manifest, bench.program, bench.arena, TrainerChannel(theirs))
    channel = await DaemonChannel.open(ours)
    running = asyncio.create_task(asyncio.to_thread(trainer.run))
    while not isinstance(await channel.receive(), ContributionHeader):
        pass
    await channel.send(Stop())
    await running
    trainer.validate(0)
    await channel.close()
