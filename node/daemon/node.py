"""Run a node: its replicas, and the services with which it answers other peers."""

import asyncio
import random
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Literal

from node.daemon.node_network import NodeNetwork
from node.daemon.peers.chain_sync import ServedChain
from node.daemon.replica import Replica
from node.daemon.services import CarriersService, RoundsService, RunsService
from node.daemon.stages.activations import ServedActivations
from node.daemon.stages.service import StagesService
from node.monitoring.status import NodeStatus
from node.options import NodeOptions
from node.own_ticket import load_own_ticket
from node.processes.workers import Workers
from node.run_dir import RunDir, reuse_last_port
from protocol.blobs.server import register_blob_service
from protocol.blobs.store import BlobStore
from protocol.manifest.run import Manifest, RunId
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import (
    add_CarriersServicer_to_server,
    add_RoundsServicer_to_server,
    add_RunsServicer_to_server,
    add_StagesServicer_to_server,
)
from protocol.pipeline.stage import stage_of
from protocol.signing import TrustPoint
from protocol.tasks import cancel_and_wait
from protocol.transport.nat import DialBackResponder, choose_relays, find_own_ip
from protocol.transport.transport import AddServicer


class Node(NodeNetwork):
    """One process in a run. It has one replica today; without any, it watches, and may keep the newest state.

    All replicas share the directory of the node's own run (`options.manifest`): a pipeline peer's stages are runs
    within that run. Services find the replica by the run id of a request.
    """

    rendezvous: Rendezvous  # from `open` on, because it needs the running p2pd

    def __init__(self, options: NodeOptions, run_dir: RunDir, rng: random.Random) -> None:
        super().__init__(options, run_dir, rng)
        self.manifests: dict[RunId, Manifest] = {options.run_id: options.manifest}
        self.replicas: dict[RunId, Replica] = {}
        self.describe_kept_states: Callable[[], str] | None = None  # of other stages of a pipeline
        self.more_services: list[AddServicer] = []  # of a node without a replica
        self._chains: dict[RunId, ServedChain] = {}  # of the replicas, and of states that are kept

    async def add_replica(self, manifest: Manifest, run_dir: RunDir, workers: Workers) -> Replica:
        """Build a replica of a run from its folder. Call it before `open`. Raises MurmurError."""
        replica = await Replica.build(self, manifest, run_dir, workers)
        replica.status_reporter.add_source(self)
        self.add_chain(replica.run_id, replica.state.served_chain, replica.state.store)
        if replica.work.stage is not None:
            self.stores.add(ServedActivations(replica.work.stage.activations))
        self.metrics.add_store(replica.state.store)
        self.metrics.add_refusal_counter(replica.peers.downloader)
        self.manifests[replica.run_id] = manifest
        self.replicas[replica.run_id] = replica
        return replica

    def add_chain(self, run_id: RunId, chain: ServedChain, store: BlobStore) -> None:
        """Serve a chain with its state, and the blobs of a store. Call it for the first chain before `open`."""
        self._chains[run_id] = chain
        self.stores.add(store)

    def remove_chain(self, run_id: RunId, store: BlobStore) -> None:
        """Serve a chain and the blobs of its store no longer."""
        del self._chains[run_id]
        self.stores.remove(store)

    @property
    def own_stages(self) -> frozenset[int]:
        """Return the stages of a pipeline that this node serves."""
        stages = (stage_of(replica.manifest) for replica in self.replicas.values())
        return frozenset(stage for stage in stages if stage is not None)

    @property
    def trust_point(self) -> TrustPoint | None:
        """Return the trust point at the head of the node's run; None if it holds no state of it."""
        chain = self._chains.get(self.options.run_id)
        return chain.trust_point if chain is not None else None

    async def open(self, role: Literal["observer", "rollout"] = "observer") -> None:
        """Join the network and announce the replicas, or the role of a node without any. Raises TransportError."""
        options, trains = self.options, bool(self.replicas)
        self.transport.limit_dials(options.contacts)
        await self.transport.open(
            self._services(),
            listen=await reuse_last_port(self.run_dir, options.listen),
            direct=options.direct if self._chains else None,
            relays=choose_relays(options.listen, options.contacts, find_own_ip()),
        )
        self.rendezvous = Rendezvous(self.identity, self.transport, self.clock, self.directory, self.rng)
        self.directory.subscribe(self.rendezvous)
        for counter in (self.directory, self.transport, self.rendezvous):
            self.metrics.add_refusal_counter(counter)
        ticket = load_own_ticket(options.manifest, self.run_dir, self.peer_id)
        self.directory.publish(
            role="trainer" if trains else role,
            resting=trains,  # until the trainer is ready
            ticket=ticket.signed.SerializeToString(deterministic=True) if ticket else b"",
            name=options.name,
            version=version("murmuration"),
            direct_port=self.transport.direct_port,
        )
        self.revisions.announce()
        for replica in self.replicas.values():
            replica.announce()

    def _services(self) -> list[AddServicer]:
        runs = RunsService(
            self.manifests, DialBackResponder(self.transport.remote_addresses), self.directory.record_refusal
        )
        always: list[AddServicer] = [
            self.directory.register, self.revisions.register, partial(add_RunsServicer_to_server, runs),
        ]  # fmt: skip
        if not self._chains:
            return always
        stages = [partial(add_StagesServicer_to_server, StagesService(self.stages, self.directory))]
        followed = self.stage_chains.served if self.stage_chains is not None else {}
        rounds = RoundsService(self.replicas, ChainMap(self._chains, followed), self.directory.record_refusal)
        for counter in (self.blob_service, rounds):
            self.metrics.add_refusal_counter(counter)
        return [
            *always,
            partial(register_blob_service, self.blob_service),
            partial(add_CarriersServicer_to_server, CarriersService(self.replicas, self.directory.record_refusal)),
            partial(add_RoundsServicer_to_server, rounds),
            *(stages if self.stages else ()),
            *self.more_services,
        ]

    async def run_replicas(self) -> None:
        """Run all replicas until their targets; the first that fails ends all with its error."""
        running = [asyncio.create_task(replica.run(), name="replica") for replica in self.replicas.values()]
        try:
            await asyncio.gather(*running)
        finally:
            await cancel_and_wait(running)

    async def drain(self) -> None:
        """Finish work that others would have to make again, before the peers learn that this node leaves."""
        await asyncio.gather(*(replica.work.drain() for replica in self.replicas.values()))

    async def finish(self) -> None:
        """Stop the trainers and save; the network stays open. May be repeated."""
        await asyncio.gather(*(replica.finish() for replica in self.replicas.values()))

    def set_leaving(self, reason: str) -> None:
        for replica in self.replicas.values():
            if replica.status_reporter.status().phase != "done":
                replica.status_reporter.set_phase("leaving", reason)

    def publish_progress(self) -> None:
        for replica in self.replicas.values():
            replica.peers.swarm_view.publish_progress()

    def status(self) -> NodeStatus:
        """Return the status of the replica that was added first."""
        return next(iter(self.replicas.values())).status_reporter.status()

    def status_fields(self) -> Mapping[str, object]:
        transport, own = self.transport, self.directory.live().get(self.peer_id)
        other = self.directory.other_node_with_our_key()
        replicas = self.replicas.values()
        control = [self.directory.traffic, *(replica.peers.traffic for replica in replicas)]
        blobs_received = sum(replica.peers.downloader.bytes_received for replica in replicas)
        return {
            "peers": len(self.directory.live()),
            "key_conflict": other.describe() if other else "",
            "bytes_sent": transport.bytes_sent,
            "bytes_received": transport.bytes_received,
            "bytes_sent_by_kind": {"blobs": self.blob_service.total_bytes_served, **_sum(t.sent for t in control)},
            "bytes_received_by_kind": {"blobs": blobs_received, **_sum(t.received for t in control)},
            "direct_port": transport.direct_port,
            "paths": transport.bulk.describe_paths(),
            "bytes_fetched_by_path": dict(transport.bulk.bytes_received),
            "direct_refusals": dict(transport.direct_refusals),
            "addresses": tuple(own.addresses) if own else (),
            "kept": self.describe_kept_states() if self.describe_kept_states else "",
        }


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())
