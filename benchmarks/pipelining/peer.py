"""One peer of a pipeline: everything of a daemon that a microbatch meets, without replica, rounds and torch.

The transport, the directory, the services, the calls and the pipeline are the product's. The trainer sleeps.
"""

import asyncio
import json
import os
import random
import resource
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.merge.worker import OrderChannel, peer_parser
from benchmarks.pipelining.sleeping_trainer import SleepingTrainer
from benchmarks.pipelining.watch import Watch
from node.daemon.inbox import Inbox
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stages.activations import ServedActivations
from node.daemon.stages.build import build_stage
from node.daemon.stages.calls import StageCalls, stage_calls
from node.daemon.stages.service import StagesService
from node.daemon.stages.stage_effects import NodeStages
from node.injected_faults import injected_faults
from node.processes.workers import BackgroundTasks
from node.run_dir import RunDir
from node.trainer.ipc.channel import Ready
from protocol.admission import AdmissionPolicy
from protocol.blobs.server import BlobService, register_blob_service
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip import DirectoryOptions
from protocol.murmur_pb2_grpc import add_StagesServicer_to_server
from protocol.pipeline.messages import Outcome
from protocol.pipeline.stage import StageManifest
from protocol.transport.transport import AddServicer, Transport, caller

HOP_SAMPLES = 100_000
LOOPBACK = "127.0.0.1"


class Faults:
    """Ends the process, because a task in the background failed."""

    def fail(self, error: BaseException) -> None:
        raise SystemExit(str(error))


@dataclass(frozen=True)
class Told:
    """An outcome of a microbatch of ours, and when it came."""

    serial: int
    run: RunId
    is_backward: bool
    peer: PeerId
    time: float


class TimedStages(NodeStages):
    """The stages of a node, which record when outcomes come in."""

    def __init__(self, admitted: AdmittedPeers, calls: StageCalls) -> None:
        super().__init__(admitted, calls)
        self.told: list[Told] = []

    def take_outcome(self, peer: PeerId, outcome: Outcome) -> None:
        if len(self.told) < HOP_SAMPLES and peer != self.directory.peer_id:
            is_backward = outcome.direction == "backward"
            self.told.append(Told(outcome.serial, outcome.run, is_backward, peer, time.monotonic()))
        super().take_outcome(peer, outcome)


class SleepingPeer:
    """The parts of a node that a pipeline needs."""

    def __init__(self, manifest: StageManifest, folder: Path, rate: float) -> None:
        run_dir = RunDir(folder)
        identity = Identity.load_or_create(run_dir.key)
        self.transport = Transport.create(run_dir.key, folder)
        membership = manifest.membership
        options = DirectoryOptions(
            run_id=manifest.whole_run_id, heartbeat=membership.heartbeat, expiry=membership.expiry
        )
        self.directory = PeerDirectory(options, identity, self.transport, SwarmClock(), random.Random(identity.peer_id))
        self.background = BackgroundTasks(Faults())
        calls = stage_calls(self.transport, injected_faults(os.environ, manifest.run.name))
        admitted = AdmittedPeers(self.directory, AdmissionPolicy(manifest), manifest.pipeline.stages)
        self.stages = TimedStages(admitted, calls)
        stage = build_stage(manifest, run_dir, self.stages, self.transport, self.background, Inbox())
        assert stage is not None
        self.stage = stage
        self.blobs = BlobService(ServedActivations(stage.activations), caller)
        self.trainer = SleepingTrainer(stage.memory, rate)
        self.watch = Watch(self.directory, StageCalls(self.transport), manifest.run_id)

    async def open(self, owns: bool, address: str | None = None) -> dict[str, Any]:
        """Go on the network, at an address of a laboratory or on this machine; return this peer's id and addresses."""
        service = StagesService(self.stages, self.directory)
        services: list[AddServicer] = [
            self.directory.register,
            partial(register_blob_service, self.blobs),
            partial(add_StagesServicer_to_server, service),
        ]
        listen = [f"/ip4/{address or LOOPBACK}/tcp/0"]
        await self.transport.open(services, listen=listen, direct=0)
        self.directory.publish(role="trainer", direct_port=self.transport.direct_port)
        self.stage.set_resting(not owns)
        return {"peer": self.transport.peer_id, "addresses": await self.transport.addresses()}

    def start(self) -> None:
        """Let the trainer be ready, so that this peer serves its stage and begins its own microbatches."""
        self.trainer.start(self.stage.on_trainer_message)
        self.stage.start(self.trainer.send)
        self.stage.on_trainer_message(Ready(round=0, device="none", step=0, outstanding=None))

    def start_watch(self) -> None:
        """Begin a window of the watch, which runs from the first one on."""
        if self.watch.is_idle:
            self.background.spawn(self.watch.sample_loop())
            self.background.spawn(self.watch.sample_calls())
        self.watch.clear()

    def counts(self) -> dict[str, Any]:
        """Return all counters, from the start on."""
        server, owner = self.stage.loop.server, self.stage.loop.owner
        assert server is not None
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "time": time.monotonic(),
            "done": owner.counts.done,
            "dropped": dict(owner.counts.dropped),
            "computed": server.counts.computed,
            "steps": server.counts.steps,
            "rate": server.rate,
            "answers": dict(server.counts.answers),
            "sent": self.transport.bytes_sent,
            "fetched": sum(self.transport.bulk.bytes_received.values()),
            "fetched_by_path": {str(path): size for path, size in Counter(self.transport.bulk.bytes_received).items()},
            "cpu": usage.ru_utime + usage.ru_stime,
        }

    def hops(self) -> list[float]:
        """Return the seconds of tasks whose input of one activation lay at another peer, while one is in flight.

        Each of them begins when the outcome of the task before it comes in. The first stage and the last one are left
        out, because their tasks have other inputs or no result.
        """
        inner = {self.stage.loop.owner.run_of(stage) for stage in range(1, self.stage.loop.settings.stages - 1)}
        return [
            told.time - before.time
            for before, told in zip(self.stages.told, self.stages.told[1:], strict=False)
            if told.serial == before.serial and told.run in inner
        ]


async def take_orders(peer: SleepingPeer, orders: OrderChannel, owns: bool, address: str | None) -> None:
    orders.send(address=await peer.open(owns, address))
    while True:
        order = await asyncio.to_thread(orders.receive)
        match order:
            case {"addresses": addresses}:
                for other in addresses:
                    peer.directory.add_contact(other["peer"], other["addresses"])
                peer.background.spawn(peer.directory.run())
                orders.send()
            case {"live": True}:
                orders.send(live=len(peer.directory.live()))
            case {"start": True}:
                peer.start()
                orders.send()
            case {"rate": rate}:
                peer.trainer.rate = rate
                orders.send()
            case {"watch": True}:
                peer.start_watch()
                orders.send()
            case {"watched": True}:
                orders.send(**peer.watch.figures())
            case {"hops": True}:
                orders.send(hops=peer.hops())
            case {"counts": True}:
                orders.send(**peer.counts())


def main() -> None:
    parser = peer_parser()
    parser.add_argument("--manifest", type=json.loads)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--rate", type=float, help="microbatches a second")
    parser.add_argument("--owns", type=int, help="whether it begins microbatches of its own")
    words = parser.parse_args()
    manifest = StageManifest.of(Manifest.model_validate(words.manifest), words.stage)
    orders = OrderChannel()

    async def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            peer = SleepingPeer(manifest, Path(folder), words.rate)
            try:
                await take_orders(peer, orders, bool(words.owns), words.address)
            except EOFError:
                await peer.transport.stop()

    asyncio.run(run())


if __name__ == "__main__":
    main()
