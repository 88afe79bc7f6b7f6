"""One peer of a pipeline as a process: the product's transport, directory, calls and machines, and a tally trainer.

It answers orders of the test, one JSON message after the other: `contacts`, `begin`, `counts`, `drain`.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.pipelining.peer import SleepingPeer
from node.daemon.stages import calls
from node.injected_faults import VARIABLE
from node.loop.stage_events import StageAnchorApplied, StageContributed, TrainerReady
from node.loop.stage_modes import Draw, LocalMode
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.channel import ChannelClosed, DaemonChannel, FromTrainer, ToTrainer
from protocol.manifest.run import Manifest
from protocol.membership import directory
from protocol.pipeline import owner, owner_events, routing
from protocol.pipeline.stage import StageManifest
from tests.pipelines.naive import NAIVE
from tests.pipelines.zygote import fork

RESTART_SECONDS = 0.1
WATCH_SECONDS = 0.01
MAX_ORDER_BYTES = 1 << 20
ASK_SECONDS, MIN_PATIENCE, BAN_SECONDS = 1.5, 0.7, 0.2  # instead of 5 s, so that a test need not wait
GOSSIP_SECONDS = 20.0  # instead of 2 s: a peer that waits for a processor is not dead, and calls to a dead one fail


def set_deadlines() -> None:
    """Shorten the deadlines of calls about microbatches, and miss no peer that is only slow, in this process."""
    directory.MIN_TIMEOUT_SECONDS = GOSSIP_SECONDS
    for module in (owner, calls):
        module.ASK_SECONDS = ASK_SECONDS  # type: ignore[attr-defined]
    owner.MIN_PATIENCE = MIN_PATIENCE
    routing.FIRST_BAN_SECONDS = BAN_SECONDS


class ForkedTrainer:
    """A tally trainer as a process of its own, which is started again when it dies."""

    def __init__(self, zygote: str, folder: Path, memory: ActivationMemory, words: dict[str, Any]) -> None:
        self.pid = 0
        self.deaths = 0
        self._zygote = zygote
        self._folder = folder
        self._memory = memory
        self._words = words | {"slots": memory.sizes.model_dump(), "daemon": os.getpid()}
        self._channel: DaemonChannel | None = None

    async def send(self, message: ToTrainer) -> bool:
        if self._channel is None:
            return False
        try:
            await self._channel.send(message)
        except ChannelClosed:
            return False
        return True

    async def run(self, receive: Callable[[FromTrainer], object]) -> None:
        """Pass its messages on, over restarts."""
        while True:
            ours, theirs = socket.socketpair()
            words = self._words | {"start": self.deaths, "journal": str(self._folder / "journal")}
            fds = [theirs.fileno(), self._memory.fd]
            self.pid = fork(self._zygote, "tests.pipelines.tally_trainer", words, self._folder / "trainer.log", fds)
            theirs.close()
            self._channel = await DaemonChannel.open(ours)
            try:
                while True:
                    receive(await self._channel.receive())
            except ChannelClosed:
                logging.info("the trainer has died")
            await self._channel.close()
            self._channel = None
            self.deaths += 1
            await asyncio.sleep(RESTART_SECONDS)


class Quota(LocalMode):
    """Begins a number of microbatches, and records how each of them ends."""

    def __init__(self) -> None:
        self.wanted = 0
        self.ended: dict[int, str] = {}
        self._begun = 0

    def draws(self, room: int, now: float) -> list[Draw]:
        draws = super().draws(min(room, self.wanted - self._begun), now)
        self._begun += len(draws)
        return draws

    def on_trainer(
        self, event: TrainerReady | StageAnchorApplied | StageContributed, drawing: Collection[int], now: float
    ) -> None:
        if isinstance(event, TrainerReady):
            self._begun -= len(drawing)

    def on_finished(self, ended: owner_events.Finished, now: float) -> None:
        self.ended[ended.serial] = ended.reason or "done"


class PipelinePeer(SleepingPeer):
    """A peer whose trainer keeps a tally."""

    def __init__(self, words: dict[str, Any]) -> None:
        manifest = StageManifest.of(Manifest.model_validate(words["manifest"]), words["stage"])
        super().__init__(manifest, Path(words["folder"]), rate=1.0)
        self.quota = self.stage.loop.mode = Quota()
        self.peak = 0  # bytes of activations that the server held
        trainer = words["trainer"] | {"stage": words["stage"], "stages": manifest.pipeline.stages}
        trainer |= {"owner": self.transport.peer_id, "faults": words["faults"]}
        self.forked = ForkedTrainer(words["zygote"], Path(words["folder"]), self.stage.memory, trainer)

    def start(self) -> None:
        self.background.spawn(self.forked.run(self.stage.on_trainer_message))
        self.background.spawn(self.watch_memory())
        self.stage.start(self.forked.send)

    def counts(self) -> dict[str, Any]:
        """Return what the product counts, and the ends of this peer's microbatches."""
        own, server = self.stage.loop.owner.counts, self.stage.loop.server
        fields: Any = self.stage.status_fields()["microbatches"]
        return {
            "microbatches": fields,
            "ended": {f"{self.transport.peer_id}/{serial}": how for serial, how in self.quota.ended.items()},
            "answers": dict(own.answers),
            "served answers": dict(server.counts.answers) if server is not None else {},
            "ledger": [f"{key.owner}/{key.serial}" for key in server.steps.ledger | server.steps.open_step.added]
            if server
            else [],
            "open": server.steps.open_step.open_count if server is not None else 0,
            "peak": self.peak,
            "trainer": self.forked.pid,
            "trainer deaths": self.forked.deaths,
            "live": len(self.directory.live()),
            "refusals": dict(self.directory.refusals),
        }

    async def watch_memory(self) -> None:
        while True:
            if self.stage.loop.server is not None:
                self.peak = max(self.peak, self.stage.loop.server.table.memory.used)
            await asyncio.sleep(WATCH_SECONDS)

    async def drain(self) -> None:
        """Leave as a node does at SIGTERM."""
        await self.stage.drain()
        await self.directory.leave()
        self.stage.stop()


async def take_orders(peer: PipelinePeer, orders: socket.socket) -> None:
    loop = asyncio.get_running_loop()

    async def reply(**values: object) -> None:
        await loop.sock_sendall(orders, json.dumps(values).encode())

    await reply(**await peer.open(owns=True))
    while body := await loop.sock_recv(orders, MAX_ORDER_BYTES):
        match json.loads(body):
            case {"contacts": contacts}:
                for other in contacts:
                    peer.directory.add_contact(other["peer"], other["addresses"])
                peer.background.spawn(peer.directory.run())
                peer.start()
                await reply()
            case {"begin": count}:
                peer.quota.wanted += count
                peer.stage.set_resting(False)
                await reply()
            case {"counts": True}:
                await reply(**peer.counts())
            case {"drain": True}:
                await peer.drain()
                await reply()


def main(words: dict[str, Any], fds: list[int]) -> None:
    """Run until the test closes the socket or kills the process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_deadlines()
    if words["faults"]:
        os.environ[VARIABLE] = words["faults"]
    for name in words["naive"]:
        NAIVE[name]()
    orders = socket.socket(fileno=fds[0])
    orders.setblocking(False)

    async def run() -> None:
        await take_orders(PipelinePeer(words), orders)

    asyncio.run(run())
