"""A blob is carried if its owner named it for the round at hand, a member asks, and it is not too much."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from node.daemon import services
from node.daemon.peers import blob_relay
from node.daemon.peers.blob_relay import BlobRelay
from node.daemon.peers.peer_rpc import request_relay
from node.daemon.services import CarriersService
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import Roster
from protocol.consensus.messages.kinds import ReducedPart
from protocol.errors import LimitError, UnreachableError
from protocol.identity import Identity, PeerId
from protocol.murmur_pb2 import Signed
from protocol.murmur_pb2_grpc import add_CarriersServicer_to_server
from tests.node.daemon.recorded_errors import RecordedErrors
from tests.node.small_run import (
    PEERS,
    RUN_ID,
    TERMS,
    CopyingFetcher,
    contribution_of,
    payload,
    stated,
    store_in,
)

CARRIER, ASKER, OWNER, STRANGER = (identity.peer_id for identity in PEERS[:4])
ROUND = 5
HEAD = ChainHead(ROUND, bytes(32), 0)


class RelaySetup:
    """What the owner has, and a carrier behind a real channel."""

    def __init__(self, folder: Path, channel: grpc.aio.Channel) -> None:
        self.owner = store_in(folder / "owner")
        self.store = store_in(folder / "carrier")
        self.fetcher = CopyingFetcher(self.store, {OWNER: self.owner})
        self.errors = RecordedErrors()
        self.round = ROUND
        self.channel = channel
        state = SimpleNamespace(
            run_id=RUN_ID,
            limits=TERMS,
            store=self.store,
            manifest=SimpleNamespace(round=SimpleNamespace(exchange_timeout=0.3)),
            planner=SimpleNamespace(max_contribution_bytes=len(payload(0))),
            replicated=SimpleNamespace(chain=self),  # of which the relay reads the round
        )
        self.carrying = BlobRelay(cast(Any, state), cast(Any, self.fetcher), cast(Any, self))
        replica: Any = SimpleNamespace(peers=SimpleNamespace(relay=self.carrying), status_reporter=self.errors)
        self.service = CarriersService({RUN_ID: replica}, self.errors.record_refusal)

    def is_trainer(self, peer: PeerId) -> bool:
        return peer != STRANGER

    def message(self, seed: int, by: Identity = PEERS[2], number: int = ROUND) -> tuple[Signed, Blob]:
        blob = self.owner.put(payload(seed))
        return stated(by, contribution_of(ChainHead(number, bytes(32), 0), [blob])).signed, blob

    async def ask(self, signed: Signed, blob: Blob, run_id: str = RUN_ID) -> None:
        await request_relay(run_id, lambda _: self.channel, CARRIER, signed, blob.digest, 5.0)


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RelaySetup]:
    monkeypatch.setattr(services, "caller", lambda context: ASKER)
    server = grpc.aio.server()
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s") as channel:
        made = RelaySetup(tmp_path, channel)
        add_CarriersServicer_to_server(made.service, server)
        server.add_insecure_port(f"unix:{tmp_path}/s")
        await server.start()
        yield made
        await server.stop(None)


async def test_what_the_owner_named_is_fetched_held_and_dropped_with_its_round(scene: RelaySetup) -> None:
    signed, blob = scene.message(1)
    await scene.ask(signed, blob)
    assert scene.store.read(blob.digest) == scene.owner.read(blob.digest)
    assert scene.carrying.held_digests() == {blob.digest} and scene.carrying.bytes_relayed == blob.size
    scene.round += 1
    assert scene.carrying.held_digests() == set()


async def test_a_reduced_part_is_carried_too_and_one_that_is_there_costs_no_fetch(scene: RelaySetup) -> None:
    blob = scene.owner.put(payload(2))
    part = stated(PEERS[2], ReducedPart(ROUND + 1, 0, bytes(32), 0, 0, blob, bytes(32))).signed
    for _ in range(2):
        await scene.ask(part, blob)
    assert scene.fetcher.asked == [blob] and scene.carrying.bytes_relayed == 2 * blob.size


async def test_what_is_not_of_this_round_or_of_these_peers_is_refused(scene: RelaySetup) -> None:
    signed, blob = scene.message(1)
    other = scene.owner.put(b"a film")
    roster = stated(PEERS[2], Roster(ROUND, 0, bytes(32), (stated(PEERS[2], contribution_of(HEAD, [blob])),))).signed
    forged = Signed(kind=signed.kind, peer=OWNER, body=signed.body, signature=bytes(64))
    strange, far = scene.message(1, PEERS[3])[0], scene.message(1, number=ROUND + 2)[0]
    old = scene.message(1, number=ROUND - 1)[0]
    for asked in ((signed, other), (roster, blob), (forged, blob), (strange, blob), (old, blob), (far, blob)):
        with pytest.raises(LimitError, match="failed_precondition"):
            await scene.ask(*asked)
    with pytest.raises(LimitError):
        await scene.ask(signed, blob, run_id="cd" * 32)
    assert len(scene.errors.refused) == 7 and scene.fetcher.asked == []
    assert {name for _, name in scene.errors.refused} == {"MalformedError", "ForgedError", "StaleError"}
    await scene.ask(signed, blob)  # the control: exactly that one is taken


async def test_more_than_a_few_messages_for_one_peer_are_refused(scene: RelaySetup) -> None:
    taken = []
    with pytest.raises(LimitError, match="carried already"):
        for seed in range(10):
            await scene.ask(*scene.message(seed))
            taken.append(seed)
    assert len(taken) == blob_relay.MAX_CONTRIBUTIONS_PER_PEER


def missing(number: int) -> tuple[Signed, Blob]:
    """A blob of one byte that nobody has, and its owner's word for it."""
    blob = Blob(hashlib.sha256(bytes([number])).digest(), 1)
    return stated(PEERS[2], ReducedPart(ROUND, 0, bytes(32), 0, 0, blob, bytes(32))).signed, blob


async def test_what_does_not_come_holds_few_fetches_and_the_rest_waits_behind_it(scene: RelaySetup) -> None:
    """However little it takes up: a member names as much as it likes that nobody has."""
    names = [missing(number) for number in range(blob_relay.MIN_BLOBS_PER_PEER + 1)]
    most, half = 0, blob_relay.MAX_CALLS_PER_PEER
    for some in (names[:half], names[half:-1]):
        asking = [asyncio.create_task(scene.ask(*named)) for named in some]
        while not all(task.done() for task in asking):
            most = max(most, scene.fetcher.under_way)
            await asyncio.sleep(0.005)
        assert {type(task.exception()) for task in asking} == {UnreachableError}
    assert most == blob_relay.MAX_FETCHES_PER_PEER and len(scene.fetcher.asked) == blob_relay.MIN_BLOBS_PER_PEER
    with pytest.raises(LimitError, match=r"has 32 blobs of 32 bytes carried already"):
        await scene.ask(*names[-1])
    assert scene.errors.refused == [(ASKER, "LimitError")]
    scene.round += 1
    scene.carrying.held_digests()
    await scene.ask(*scene.message(1, number=ROUND + 1))  # the control: the places are free again


async def test_nobody_waits_with_more_calls_than_a_connection_takes(scene: RelaySetup) -> None:
    asking = [asyncio.create_task(scene.ask(*missing(0))) for _ in range(blob_relay.MAX_CALLS_PER_PEER + 1)]
    await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert [str(task.exception()) for task in asking if task.done()][0].endswith("relays at once)")
    assert scene.errors.refused == [(ASKER, "LimitError")]
    for task in asking:
        task.cancel()
    await asyncio.wait(asking)


async def test_a_strangers_statement_is_not_even_read(scene: RelaySetup, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(blob_relay, "parse", lambda *asked: read.append(asked))
    monkeypatch.setattr(services, "caller", lambda context: STRANGER)
    with pytest.raises(LimitError, match="not a trainer"):
        await scene.ask(*scene.message(1))
    assert scene.errors.refused == [(STRANGER, "StaleError")] and read == []


async def test_an_owner_that_does_not_answer_is_said_without_names_of_folders(scene: RelaySetup) -> None:
    signed, blob = scene.message(1)
    scene.owner.discard(blob.digest)
    with pytest.raises(UnreachableError, match="the relay could not fetch the blob either"):
        await scene.ask(signed, blob)
    assert scene.errors.recovered == ["not relayed"] and scene.carrying.bytes_relayed == 0
