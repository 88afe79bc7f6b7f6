"""A node's store of revisions: what it accepts, from which peers, what it counts, and how revisions spread."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from node.daemon.steering import revision_store
from node.daemon.steering.revision_store import CALL_BURST, RevisionStore, exchange_revisions
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import LimitError, PeerFault
from protocol.identity import Identity, PeerId
from protocol.manifest.run import Manifest
from protocol.membership.peer_table import PeerJoined, PeerUpdated
from protocol.murmur_pb2 import PeerRecord
from protocol.signing import sign
from protocol.steering import MAX_STORED, REVISION_KIND, Revision, SignedRevision, encode_changes
from tests.node.small_run import MANIFEST, PEERS
from tests.protocol.local_server import serve_locally

ORGANISER, STRANGER = Identity.create(), Identity.create()
RUN = MANIFEST.run.model_copy(update={"organiser_key": ORGANISER.peer_id})
STEERED: Manifest = MANIFEST.model_copy(update={"run": RUN})
CALLER = PEERS[2].peer_id


class FakeDirectory:
    """Keeps what the node publishes of itself, and counts refusals as the real one does."""

    def __init__(self) -> None:
        self.record: dict[str, Any] = {}
        self.refusals: Counter[str] = Counter()

    def publish(self, *, urgent: bool = False, **fields: Any) -> None:
        self.record |= fields

    def subscribe(self, listener: object) -> None:
        """Nobody tells."""

    def record_refusal(self, peer: PeerId, fault: PeerFault) -> None:
        self.refusals[fault.metric_label] += 1


class StoreSetup:
    """A store in a folder; `heard` counts the changes that it reported."""

    def __init__(self, folder: Path, manifest: Manifest = STEERED) -> None:
        self.directory = FakeDirectory()
        self.channels: dict[PeerId, grpc.aio.Channel] = {}
        self.path = folder / "revisions.json"
        self.store = RevisionStore(manifest, self.path, self.directory, self.channels.__getitem__)  # type: ignore[arg-type]
        self.heard = 0
        self.store.subscribe(self.on_revisions_changed)

    def on_revisions_changed(self) -> None:
        self.heard += 1

    @contextlib.asynccontextmanager
    async def served(self, folder: Path) -> AsyncIterator[grpc.aio.Channel]:
        async with serve_locally(folder / "socket", self.store.register) as channel:
            yield channel


def revision(
    before: list[SignedRevision], identity: Identity = ORGANISER, manifest: Manifest = STEERED
) -> SignedRevision:
    previous = before[-1].digest if before else b""
    body = Revision(len(before) + 1, previous, 3, encode_changes({"target.rounds": len(before) + 5}), 1.0)
    return SignedMessage.of(sign(identity, REVISION_KIND, manifest.run_id, body.to_wire()), body)


def revisions(count: int) -> list[SignedRevision]:
    found: list[SignedRevision] = []
    for _ in range(count):
        found.append(revision(found))
    return found


@pytest.fixture(autouse=True)
def _caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revision_store, "caller", lambda context: CALLER)


async def hand_over(channel: grpc.aio.Channel, *messages: SignedRevision) -> list[bytes]:
    envelopes = [message.signed for message in messages]
    reply = await exchange_revisions(STEERED.run_id, lambda _: channel, "them", envelopes)
    return [signed.body for signed in reply.revisions]


async def test_a_revision_is_saved_announced_reported_and_served(tmp_path: Path) -> None:
    world, (first, second) = StoreSetup(tmp_path), revisions(2)
    async with world.served(tmp_path) as channel:
        assert await hand_over(channel) == []
        assert await hand_over(channel, first) == [first.signed.body]
        assert world.heard == 1 and world.directory.record["revision"] == first.digest
        assert await hand_over(channel, first, second) == [first.signed.body, second.signed.body]
        assert world.heard == 2 and world.directory.refusals == {}
    again = StoreSetup(tmp_path)
    assert [entry.digest for entry in again.store.log.revisions] == [first.digest, second.digest]
    again.store.announce()
    assert again.directory.record["revision"] == second.digest


@pytest.mark.parametrize("forger", ["stranger", "relabelled", "other run", "no key"])
async def test_a_forged_revision_is_refused_counted_and_goes_nowhere(tmp_path: Path, forger: str) -> None:
    world = StoreSetup(tmp_path, MANIFEST if forger == "no key" else STEERED)
    forged = revision([], STRANGER if forger in ("stranger", "relabelled") else ORGANISER)
    if forger == "relabelled":
        forged.signed.peer = ORGANISER.peer_id
    if forger == "other run":
        forged = revision([], manifest=MANIFEST)
    run_id = MANIFEST.run_id if forger == "no key" else STEERED.run_id
    async with world.served(tmp_path) as channel:
        with pytest.raises(LimitError, match="refused"):
            await exchange_revisions(run_id, lambda _: channel, "them", [forged.signed])
        assert world.directory.refusals == {"forged": 1}
        reply = await exchange_revisions(run_id, lambda _: channel, "them", [])
        assert not reply.revisions and world.heard == 0 and not world.path.exists()
    assert "revision" not in world.directory.record


async def test_calls_are_bounded_and_about_this_run(tmp_path: Path) -> None:
    world, (first, second) = StoreSetup(tmp_path), revisions(2)
    async with world.served(tmp_path) as channel:
        for messages, run_id in (
            ([second], STEERED.run_id),
            ([first] * (MAX_STORED + 1), STEERED.run_id),
            ([], "ab" * 32),
        ):
            with pytest.raises(LimitError, match="refused"):
                await exchange_revisions(run_id, lambda _: channel, "them", [entry.signed for entry in messages])
        assert world.directory.refusals == {"stale": 2, "limit": 1}
        with pytest.raises(LimitError, match="too often"):
            for _ in range(CALL_BURST + 3):
                await hand_over(channel)


async def test_a_keeper_fetches_the_list_of_a_peer_that_announces_more_and_asks_it_once(tmp_path: Path) -> None:
    first, second = revisions(2)
    (tmp_path / "informed").mkdir()
    informed, ignorant = StoreSetup(tmp_path / "informed"), StoreSetup(tmp_path)
    informed.store.add([first.signed, second.signed])
    async with informed.served(tmp_path) as channel:
        ignorant.channels["them"] = channel
        record = PeerRecord(revision=second.digest, round=7)
        ignorant.store.on_membership_changed([PeerJoined("them", record)])
        assert len(ignorant.store._fetches) == 1
        ignorant.store.on_membership_changed([PeerUpdated("them", record)])
        assert len(ignorant.store._fetches) == 1, "it is asked again after a while only"
        async with asyncio.timeout(10):
            await asyncio.gather(*ignorant.store._fetches)
    assert ignorant.store.log.newest() == second.digest and ignorant.heard == 1 and ignorant.store.clock.round == 7
    ignorant.store.on_membership_changed([PeerUpdated("them", record)])
    assert not ignorant.store._fetches, "there is nothing more to fetch"


async def test_revisions_of_a_commit_are_saved_with_its_state(tmp_path: Path) -> None:
    world, (first,) = StoreSetup(tmp_path), revisions(1)
    world.store.log.add(first)
    assert not world.path.exists()
    world.store.adopt(first.digest)
    assert world.path.exists() and world.store.adopted == first.digest and world.heard == 0


def test_damaged_revisions_on_disk_are_skipped(tmp_path: Path) -> None:
    for text in ("", "{", '{"revisions": ["!!", 5, ""]}', '{"revisions": 3}', "[]"):
        (tmp_path / "revisions.json").write_text(text)
        assert StoreSetup(tmp_path).store.log.revisions == ()
