"""The node through which a host observes the run; it may train, or only observe.

A node that only observes takes part in the peer directory and helps peers to find each other; it neither trains nor
votes.
"""

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from node.daemon.node import Node
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.stored_states.announcing import WholeRunAnnouncer
from node.daemon.stored_states.stage_stores import StageStores, keep_stages
from node.daemon.stored_states.state_store import StateStore, StorePlan, build_state_store
from node.dashboard.chain_follower import shown_manifest
from node.monitoring.display import Display
from node.options import NodeOptions
from node.processes.process import handle_stop_signals
from node.run_dir import RunDir
from protocol.consensus.chain import Chain
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest
from protocol.membership.directory import PeerDirectory
from protocol.signing import TrustPoint
from protocol.steering import RevisionLog
from protocol.tasks import cancel_and_wait
from protocol.transport.transport import Transport

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 3.0
Keeper = StateStore | StageStores


@dataclass(frozen=True)
class NodeHandle:
    """The parts of a node that the dashboard uses; `is_trainer` means that the page shows the node as a peer.

    `base` is the folder of the manifest, and `own_chain` the chain of a node that trains the
    stage that the page follows, or the whole model. `has_model` means that the
    node's folder has checkpoints, or will have them.
    """

    manifest: Manifest
    base: Path
    identity: Identity
    admitted: AdmittedPeers
    transport: Transport
    is_trainer: bool
    has_model: bool = True
    revisions: RevisionLog = field(default_factory=RevisionLog)
    own_chain: Chain | None = None
    node: Node | None = None

    @property
    def directory(self) -> PeerDirectory:
        return self.admitted.directory

    @property
    def trust_point(self) -> TrustPoint | None:
        """Return the newest round that this node holds, for newcomers to start from."""
        return self.node.trust_point if self.node is not None else None

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    def channel(self, peer: PeerId) -> grpc.aio.Channel:
        return self.transport.channel(peer)


def node_handle(node: Node, *, has_model: bool = True) -> NodeHandle:
    shown = node.replicas.get(shown_manifest(node.options.manifest).run_id)
    return NodeHandle(
        node.options.manifest,
        node.options.base,
        node.identity,
        node.admitted,
        node.transport,
        is_trainer=bool(node.replicas),
        has_model=has_model,
        revisions=node.revisions.log,
        own_chain=shown.state.replicated.chain if shown is not None else None,
        node=node,
    )


@contextlib.asynccontextmanager
async def open_observer_node(
    options: NodeOptions, run_dir: RunDir, *, keeps: bool
) -> AsyncIterator[tuple[Node, Keeper | None]]:
    """Run a node without a replica inside the context, with a keeper if it `keeps` the newest state, of all stages.

    The caller holds the lock of `run_dir`. Raises TransportError, or an error of the kept state.
    """
    async with open_node(options, run_dir) as node:
        keeper = _build_keeper(node, run_dir) if keeps else None
        await node.open()
        yield node, keeper


@contextlib.asynccontextmanager
async def open_node(options: NodeOptions, run_dir: RunDir) -> AsyncIterator[Node]:
    """Build a node without a replica, whose transport is closed at the end of the context; the caller opens it."""
    node = Node(options, run_dir, random.Random(os.urandom(16)))
    try:
        yield node
    finally:
        await node.transport.stop()


def _build_keeper(node: Node, run_dir: RunDir) -> Keeper:
    manifest = node.options.manifest
    if manifest.pipeline.is_cut:
        return keep_stages(node, run_dir, range(manifest.pipeline.stages))
    keeper = build_state_store(node, manifest, run_dir, StorePlan(announcer=WholeRunAnnouncer(node.directory)))
    node.metrics.add_refusal_counter(keeper)
    return keeper


def stop_on_signal(display: Display) -> asyncio.Event:
    """Return an event that the first stop signal sets, after the status line is gone; a second one ends the process."""
    stop = asyncio.Event()

    def on_signal() -> None:
        display.close()
        logger.info("Shutting down. Press Ctrl-C again to exit immediately.")
        stop.set()

    handle_stop_signals(asyncio.get_running_loop(), on_signal)
    return stop


@contextlib.asynccontextmanager
async def gossiping(observer: Node) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Take part in the gossip inside the context, and tell the other peers at the end that this node leaves.

    Yields the endless tasks; one that ends has failed.
    """
    loops = [asyncio.create_task(loop) for loop in (observer.directory.run(), observer.rendezvous.run())]
    try:
        yield loops
    finally:
        await cancel_and_wait(loops)
        with contextlib.suppress(TimeoutError):  # peers that are not reached notice the silence
            async with asyncio.timeout(LEAVE_SECONDS):
                await observer.directory.leave()
