"""Build the parts that all replicas of a node share: identity, transport, directory, services, metrics."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Protocol

from node.daemon.node_parts import NodeParts
from node.daemon.replica import Replica
from node.daemon.services import CarriersService, RoundsService, RunsService, ServedChain
from node.daemon.stages.calls import stage_calls
from node.daemon.stages.service import StagesService
from node.daemon.stages.stage_effects import NodeStages
from node.daemon.steering.keeper import RevisionKeeper
from node.injected_faults import injected_faults
from node.monitoring.metrics import Metrics
from node.monitoring.status import NodeStatus
from node.options import NodeOptions
from node.own_ticket import load_own_ticket
from node.processes.workers import Workers
from node.run_dir import RunDir, reuse_last_port
from protocol.blobs.server import BlobService, CallerLimits, StoreGroup, register_blob_service
from protocol.blobs.store import BlobStore
from protocol.consensus.history.trust import TrustPoint
from protocol.identity import Identity
from protocol.manifest.run import Manifest, RunId
from protocol.membership.clock import SwarmClock
from protocol.membership.directory import PeerDirectory
from protocol.membership.gossip_interface import DirectoryOptions
from protocol.membership.rendezvous import Rendezvous
from protocol.murmur_pb2_grpc import (
    add_CarriersServicer_to_server,
    add_RoundsServicer_to_server,
    add_RunsServicer_to_server,
    add_StagesServicer_to_server,
)
from protocol.tasks import cancel_and_wait
from protocol.transport.nat import DialBackResponder, choose_relays, find_own_ip
from protocol.transport.transport import AddServicer, Transport, caller
from protocol.transport.tunnel import ConnectionLimits


class KeptStates(Protocol):
    """The states of other stages that a node of a pipeline keeps."""

    def describe(self) -> str:
        """Return one line about them."""


class Node:
    """One process in a run. It has one replica today; without any, it watches, and may keep the newest state.

    All replicas share the directory of the node's own run (`options.manifest`): a pipeline peer's stages are runs
    within that run. Services find the replica by the run id of a request.
    """

    rendezvous: Rendezvous  # set by `open`

    def __init__(self, options: NodeOptions, run_dir: RunDir, rng: random.Random) -> None:
        manifest = options.manifest
        self.options = options
        self.run_dir = run_dir
        self._rng = rng
        self.identity = Identity.load_or_create(run_dir.key)
        self.peer_id = self.identity.peer_id
        limits = ConnectionLimits(upload=options.upload, download=options.download)
        self.transport = Transport.create(run_dir.key, run_dir.path, limits)
        self._clock = SwarmClock()
        self.directory = PeerDirectory(
            DirectoryOptions(
                run_id=manifest.run_id,
                heartbeat=manifest.membership.heartbeat,
                expiry=manifest.membership.expiry,
                bootstrap=options.contacts,
                addresses_file=run_dir.peers,
            ),
            self.identity,
            self.transport,
            self._clock,
            rng,
        )
        faults = injected_faults(os.environ, manifest.run.name)
        self.stages = NodeStages(self.directory, stage_calls(self.transport, faults))
        self.revisions = RevisionKeeper(manifest, run_dir.revisions, self.directory, self.transport.channel)
        self._stores = StoreGroup()
        self.blob_service = BlobService(self._stores, caller, CallerLimits.at_rate(options.upload))
        self.metrics = Metrics()
        self.manifests: dict[RunId, Manifest] = {manifest.run_id: manifest}
        self.replicas: dict[RunId, Replica] = {}
        self.kept_states: KeptStates | None = None  # of other stages of a pipeline
        self._chains: dict[RunId, ServedChain] = {}  # of the replicas, and of states that are kept

    async def add_replica(self, manifest: Manifest, run_dir: RunDir, workers: Workers) -> Replica:
        """Build a replica of a run from its folder. Call it before `open`. Raises MurmurError."""
        parts = NodeParts(
            options=self.options,
            identity=self.identity,
            transport=self.transport,
            directory=self.directory,
            stages=self.stages,
            revisions=self._keeper_of(manifest, run_dir),
            blob_service=self.blob_service,
            metrics=self.metrics,
            workers=workers,
            rng=self._rng,
        )
        replica = await Replica.build(parts, manifest, run_dir)
        replica.status_reporter.add_source(self)
        self.add_chain(replica.run_id, replica.served_chain, replica.store)
        if replica.stage is not None:
            self._stores.add(replica.stage.store)
        self.metrics.add_store(replica.store)
        self.metrics.add_refusal_counter(replica.peers.downloader)
        self.manifests[replica.run_id] = manifest
        self.replicas[replica.run_id] = replica
        return replica

    def add_chain(self, run_id: RunId, chain: ServedChain, store: BlobStore) -> None:
        """Serve a chain with its state, and the blobs of a store. Call it for the first chain before `open`."""
        self._chains[run_id] = chain
        self._stores.add(store)

    def remove_chain(self, run_id: RunId, store: BlobStore) -> None:
        """Serve a chain and the blobs of its store no longer."""
        del self._chains[run_id]
        self._stores.remove(store)

    @property
    def trust_point(self) -> TrustPoint | None:
        """Return the trust point at the head of the node's run; None if it holds no state of it."""
        chain = self._chains.get(self.options.run_id)
        return chain.trust_point if chain is not None else None

    def _keeper_of(self, manifest: Manifest, run_dir: RunDir) -> RevisionKeeper:
        """Return the keeper of a run's revisions: the node's, or one of its own for a run within the node's run."""
        if manifest.whole_run_id == self.directory.run_id:
            return self.revisions
        return RevisionKeeper(manifest, run_dir.revisions, self.directory, self.transport.channel)

    async def open(self) -> None:
        """Join the network and announce the replicas. Raises TransportError."""
        options, trains = self.options, bool(self.replicas)
        self.transport.limit_dials(options.contacts)
        await self.transport.open(
            self._services(),
            listen=await reuse_last_port(self.run_dir, options.listen),
            direct=options.direct if self._chains else None,
            relays=choose_relays(options.listen, options.contacts, find_own_ip()),
        )
        self.rendezvous = Rendezvous(self.identity, self.transport, self._clock, self.directory, self._rng)
        self.directory.subscribe(self.rendezvous)
        for counter in (self.directory, self.transport, self.rendezvous):
            self.metrics.add_refusal_counter(counter)
        ticket = load_own_ticket(options.manifest, self.run_dir, self.peer_id)
        self.directory.publish(
            role="trainer" if trains else "observer",
            ticket=ticket.signed.SerializeToString(deterministic=True) if ticket else b"",
            name=options.name,
            version=version("murmuration"),
            direct_port=self.transport.direct_port,
        )
        self.revisions.announce()
        for replica in self.replicas.values():
            replica.announce()

    def _services(self) -> list[AddServicer]:
        runs = RunsService(self.manifests, DialBackResponder(self.transport.remote_addresses), self.directory)
        always: list[AddServicer] = [
            self.directory.register, self.revisions.register, partial(add_RunsServicer_to_server, runs),
        ]  # fmt: skip
        if not self._chains:
            return always
        stages = [partial(add_StagesServicer_to_server, StagesService(self.stages, self.directory))]
        rounds = RoundsService(self.replicas, self._chains, self.directory)
        for counter in (self.blob_service, rounds):
            self.metrics.add_refusal_counter(counter)
        return [
            *always,
            partial(register_blob_service, self.blob_service),
            partial(add_CarriersServicer_to_server, CarriersService(self.replicas, self.directory)),
            partial(add_RoundsServicer_to_server, rounds),
            *(stages if self.stages else ()),
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
        await asyncio.gather(*(replica.stage.drain() for replica in self.replicas.values() if replica.stage))

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
            "kept": self.kept_states.describe() if self.kept_states else "",
        }


def _sum(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter())
