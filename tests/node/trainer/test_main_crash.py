"""An unexpected error in the trainer reaches the daemon as one line with its place and its exit code."""

import asyncio
import socket

import pytest
import torch

from node.options import TrainerOptions
from node.trainer import loop
from node.trainer.__main__ import train_until_stopped
from node.trainer.ipc.channel import Crashed, DaemonChannel, Failed, FromTrainer, TrainerConfig
from node.trainer.ipc.shared_memory import SharedMemory
from protocol.errors import DataError
from tests.node.small_run import MANIFEST


async def run_trainer_that_raises(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[int, FromTrainer]:
    """Return the exit code of the trainer, and its message."""

    def raise_error(*_: object) -> None:
        raise error

    monkeypatch.setattr(SharedMemory, "attach", lambda *_: None)
    monkeypatch.setattr(loop, "Trainer", raise_error)
    ours, theirs = socket.socketpair()
    channel = await DaemonChannel.open(ours)
    options = TrainerOptions(device="cpu", threads=torch.get_num_threads())
    await channel.send(TrainerConfig(manifest=MANIFEST.to_toml(), base="/", peer_id="12D3", round=0, options=options))
    code = await asyncio.to_thread(train_until_stopped, theirs, [0])
    message = await channel.receive()
    await channel.close()
    return code, message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (IndexError("index out of\nrange \udce9"), 1),
        (RuntimeError("CUDA error: an illegal memory access"), 11),
        (MemoryError(), 11),
    ],
)
async def test_unexpected_error_is_sent_in_one_line(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, message = await run_trainer_that_raises(error, monkeypatch)
    assert exit_code == 1 and isinstance(message, Crashed) and message.exit_code == code
    assert message.reason.startswith(type(error).__name__) and "\n" not in message.reason
    assert "(test_main_crash.py, line " in message.reason
    assert "Traceback" not in capsys.readouterr().err


async def test_error_of_a_person_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_code, message = await run_trainer_that_raises(DataError("no text; give some"), monkeypatch)
    assert exit_code == 12 and message == Failed(reason="no text; give some", exit_code=12)
