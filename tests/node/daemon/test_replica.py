"""A node has one transport, directory and blob service for all its replicas, and each run has its own replica."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from node.daemon import services
from node.daemon.node import Node
from node.daemon.peers.peer_rpc import request_chain
from node.daemon.replica import Replica
from node.daemon.services import RoundsService, RunsService
from node.options import NodeOptions
from node.processes.workers import start_workers
from node.run_dir import RunDir
from protocol.blobs.blob import Blob
from protocol.errors import LimitError, MissingFileError
from protocol.identity import Identity
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import ManifestRequest
from protocol.murmur_pb2_grpc import RunsStub, add_RoundsServicer_to_server, add_RunsServicer_to_server
from protocol.transport.nat import DialBackResponder
from tests.node.small_run import manifest_of

pytestmark = pytest.mark.slow

CALLER = Identity.create().peer_id


def stage(number: int) -> Manifest:
    """A run within the run, of another seed."""
    manifest = manifest_of("rounds = 2")
    run, model = manifest.run.model_copy(update={"seed": number}), manifest.model.model_copy(update={"vocabulary": 256})
    return manifest.model_copy(update={"run": run, "model": model})


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    """A node with two replicas, which is not on the network yet."""
    (tmp_path / "a.txt").write_text("abcdefgh" * 200)
    options = NodeOptions(
        manifest=stage(0), base=tmp_path, folder=tmp_path, listen=("/ip4/127.0.0.1/tcp/0",), device="cpu", threads=1
    )
    made = Node(options, RunDir(tmp_path), random.Random(0))
    with start_workers() as workers:
        for number in range(2):
            folder = RunDir(tmp_path / f"stage-{number}")
            folder.path.mkdir()
            await made.add_replica(stage(number), folder, workers)
        yield made
        await made.finish()
        await made.transport.stop()


def both(node: Node) -> tuple[Replica, Replica]:
    first, second = node.replicas.values()
    return first, second


async def test_replicas_share_the_node_and_keep_their_own_state(node: Node) -> None:
    first, second = both(node)
    assert first.run_id != second.run_id and first.state.replicated.blob != second.state.replicated.blob
    assert first.state.store.path(bytes(32)) != second.state.store.path(bytes(32))
    assert first.state.shared_memory.fds != second.state.shared_memory.fds
    first.status_reporter.record_recovered("not saved", "no space")
    second.status_reporter.set_phase("training")
    assert (node.status().run_id, node.status().phase) == (first.run_id, "starting")
    assert second.status_reporter.status().setbacks == {"not saved": 1}, "the counters are the node's"


async def test_blobs_of_all_replicas_are_served_and_each_prunes_its_own(node: Node) -> None:
    first, second = both(node)
    ours, theirs = first.state.store.put(b"ours"), second.state.store.put(b"theirs")
    reader = node.blob_service._store
    assert [reader.blob(blob.digest) for blob in (ours, theirs)] == [ours, theirs]
    first.state.store.retain(())
    assert bytes(reader.read_piece(theirs.digest, 0)) == b"theirs"
    with pytest.raises(MissingFileError):
        reader.blob(ours.digest)
    with pytest.raises(MissingFileError):
        reader.hashes(Blob.of(b"never seen").digest)


async def test_calls_find_the_replica_by_their_run(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "caller", lambda context: CALLER)
    server = grpc.aio.server()
    add_RoundsServicer_to_server(RoundsService(node.replicas, node._chains, node.directory.record_refusal), server)
    responder = DialBackResponder(node.transport.remote_addresses)
    add_RunsServicer_to_server(RunsService(node.manifests, responder, node.directory.record_refusal), server)
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        for replica in both(node):
            reply = await request_chain(replica.run_id, lambda _: channel, "them", 0)
            assert (reply.digest, reply.state) == (
                replica.state.replicated.chain.digest,
                replica.state.replicated.blob.to_wire(),
            )
            sent = await RunsStub(channel).Manifest(ManifestRequest(run=bytes.fromhex(replica.run_id)), timeout=10)
            assert sent.toml.decode() == replica.manifest.to_toml()
        with pytest.raises(LimitError, match="another run"):
            await request_chain("ab" * 32, lambda _: channel, "them", 0)
    await server.stop(None)
    assert node.directory.refusals == {"stale": 1}


async def test_two_replicas_train_side_by_side(node: Node) -> None:
    """Each with a trainer of its own, to its own target."""
    await node.open()
    async with asyncio.timeout(120):
        await node.run_replicas()
    first, second = both(node)
    assert first.state.replicated.chain.round == second.state.replicated.chain.round == 2
    assert first.state.replicated.chain.digest != second.state.replicated.chain.digest
    assert {replica.status_reporter.status().phase for replica in both(node)} == {"done"}
