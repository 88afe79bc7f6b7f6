"""The channel carries typed messages both ways, rejects malformed ones, and notices a closed end."""

import asyncio
import socket
import threading

import pytest

from node.trainer.ipc.channel import (
    MAX_MESSAGE_BYTES,
    AnchorApplied,
    ApplyAnchor,
    ChannelClosed,
    ContributionHeader,
    DaemonChannel,
    Evaluate,
    Evaluated,
    Failed,
    FromTrainer,
    Ready,
    Snapshotted,
    Stop,
    Stopped,
    TakeSnapshot,
    ToTrainer,
    TrainerChannel,
    TrainerConfig,
    TrainerProgress,
)
from protocol.errors import MalformedError

pytestmark = pytest.mark.slow

TO_TRAINER: list[ToTrainer] = [
    TrainerConfig(manifest="[run]", base="/", peer_id="12D3", round=0),
    ApplyAnchor(round=3, outcome="excluded"),
    Evaluate(round=3),
    TakeSnapshot(),
    Stop(),
]
FROM_TRAINER: list[FromTrainer] = [
    Ready(device="cpu", step=1, round=2, outstanding=None),
    TrainerProgress(step=1, tokens=2, loss=3.5, tokens_per_second=4.0, seconds={"compute": 1.5, "wait": 0.0}),
    ContributionHeader(round=2, sizes=(10, 20), tokens=5, steps=6, loss=1.25),
    AnchorApplied(round=3),
    Evaluated(round=3, loss=0.5, tokens=64),
    Snapshotted(step=9),
    Stopped(),
    Failed(reason="no text", exit_code=12),
]


async def open_pair() -> tuple[DaemonChannel, TrainerChannel]:
    ours, theirs = socket.socketpair()
    return await DaemonChannel.open(ours), TrainerChannel(theirs)


async def test_every_message_to_the_trainer_arrives() -> None:
    daemon, trainer = await open_pair()
    for sent in TO_TRAINER:
        await daemon.send(sent)
    assert [trainer.receive(1.0) for _ in TO_TRAINER] == TO_TRAINER
    assert trainer.receive() is None
    trainer.close()
    await daemon.close()


async def test_every_message_to_the_daemon_arrives() -> None:
    daemon, trainer = await open_pair()
    for sent in FROM_TRAINER:
        trainer.send(sent)
    assert [await daemon.receive() for _ in FROM_TRAINER] == FROM_TRAINER
    trainer.close()
    await daemon.close()


def test_message_that_arrives_byte_by_byte_is_assembled() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        trainer = TrainerChannel(theirs)
        body = ApplyAnchor(round=1, outcome="none").model_dump_json().encode()
        frame = len(body).to_bytes(4, "big") + body
        for byte in frame[:-1]:
            ours.send(bytes([byte]))
            assert trainer.receive() is None
        ours.send(frame[-1:])
        assert trainer.receive() == ApplyAnchor(round=1, outcome="none")


async def test_both_ends_notice_a_closed_channel() -> None:
    daemon, trainer = await open_pair()
    trainer.close()
    with pytest.raises(ChannelClosed):
        await daemon.receive()
    await daemon.close()
    daemon, trainer = await open_pair()
    await daemon.close()
    with pytest.raises(ChannelClosed):
        trainer.receive(1.0)
    with pytest.raises(ChannelClosed):
        trainer.send(Stopped())
    trainer.close()


@pytest.mark.parametrize(
    "body", [b"{}", b'{"kind":"stopp"}', b'{"kind":"stop","more":1}', b"\xff", b'{"kind":"adopt","round":-1}']
)
def test_malformed_message_is_rejected(body: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(len(body).to_bytes(4, "big") + body)
        with pytest.raises(MalformedError):
            TrainerChannel(theirs).receive(1.0)


async def test_too_long_frame_is_rejected_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        daemon = await DaemonChannel.open(ours)
        theirs.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(MalformedError, match="at most"):
            await daemon.receive()
        with pytest.raises(MalformedError, match="at most"):
            await daemon.send(TO_TRAINER[0].model_copy(update={"manifest": "x" * MAX_MESSAGE_BYTES}))
        await daemon.close()


async def test_write_to_an_end_that_does_not_read_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.trainer.ipc.channel.WRITE_SECONDS", 0.2)
    daemon, trainer = await open_pair()
    reason = Failed(reason="x" * 100_000, exit_code=1)
    with pytest.raises(ChannelClosed):
        for _ in range(100):
            await asyncio.to_thread(trainer.send, reason)
    long = TO_TRAINER[0].model_copy(update={"manifest": "x" * 100_000})
    with pytest.raises(ChannelClosed, match="does not read"):
        for _ in range(100):
            await daemon.send(long)
    trainer.close()
    await daemon.close()


async def test_receive_returns_when_a_message_arrives() -> None:
    daemon, trainer = await open_pair()
    received: list[ToTrainer | None] = []
    waiter = threading.Thread(target=lambda: received.append(trainer.receive(30.0)))
    waiter.start()
    await daemon.send(Stop())
    await asyncio.to_thread(waiter.join, 10.0)
    assert received == [Stop()]
    trainer.close()
    await daemon.close()
