"""What whoever is about to join may ask, and that each refusal is heard of."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import pytest

from node.daemon import services
from node.daemon.services import RunsService
from protocol.errors import MalformedError, PeerFault
from protocol.identity import PeerId
from protocol.manifest.reading import parse_manifest
from protocol.murmur_pb2 import DialBackRequest, ManifestRequest
from protocol.murmur_pb2_grpc import RunsStub, add_RunsServicer_to_server
from protocol.transport.nat import DialBackResponder
from tests.node.small_run import MANIFEST, PEERS

CALLER = PEERS[2].peer_id
RUN = bytes.fromhex(MANIFEST.run_id)


class RunsServiceSetup:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = RunsStub(channel)
        self.refused: list[tuple[PeerId, str]] = []

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        self.refused.append((peer, fault.metric_label))


async def nowhere(_: PeerId) -> Sequence[str]:
    return ()


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunsServiceSetup]:
    monkeypatch.setattr(services, "caller", lambda context: CALLER)
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        found, manifests = RunsServiceSetup(channel), {MANIFEST.run_id: MANIFEST}
        add_RunsServicer_to_server(RunsService(manifests, DialBackResponder(nowhere), found.record_refusal), server)
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        yield found
        await server.stop(None)


async def test_the_manifest_goes_to_whoever_knows_its_name(world: RunsServiceSetup) -> None:
    reply = await world.stub.Manifest(ManifestRequest(run=RUN), timeout=10)
    assert parse_manifest(reply.toml, "a peer") == MANIFEST
    assert not world.refused


async def test_refusals_are_heard_of(world: RunsServiceSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="another run"):
        await world.stub.Manifest(ManifestRequest(run=bytes(32)), timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await world.stub.DialBack(DialBackRequest(run=RUN, ports=range(1, 99)), timeout=10)
    assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)

    def nobody(context: object) -> PeerId:
        raise MalformedError("a call without an identity")

    monkeypatch.setattr(services, "caller", nobody)
    with pytest.raises(grpc.aio.AioRpcError, match="without an identity"):
        await world.stub.DialBack(DialBackRequest(run=RUN, ports=[4001]), timeout=10)
    assert [peer for peer, _ in world.refused] == [CALLER, CALLER, "somebody unknown"]
    assert world.refused[0][1] == "stale" and world.refused[2][1] == "malformed"
