"""A host keeps the newest state: it fetches, checks, saves, announces and restores it."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from node.daemon.checkpoints.trained_weights import load_trained_weights
from node.daemon.peers.chain_sync import ShownChain
from node.daemon.state.outer_state import OuterState, state_bytes
from node.daemon.stored_states import state_store
from node.daemon.stored_states.announcing import WholeRunAnnouncer
from node.daemon.stored_states.state_folder import StateFolder, StoredState
from node.daemon.stored_states.state_store import StateSources, StateStore, StorePlan
from node.from_manifest import build_program
from node.model.weight_files import block_digests
from node.run_dir import RunDir
from protocol.blobs.blob import PIECE_BYTES, Blob
from protocol.consensus.chain import Chain, ChainHead, genesis_head
from protocol.errors import CheckpointError, MalformedError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.reading import parse_manifest
from protocol.manifest.run import Manifest
from protocol.murmur_pb2 import PeerRecord
from protocol.steering import RevisionLog
from tests.node.model.weights_folder import start_from_weights
from tests.node.small_run import TOML, admitted_of, certified, commit_of, until
from tests.protocol.blobs.fake_sources import ScriptedSource, SourcePool, flip_last_bit

pytestmark = pytest.mark.slow

TEXT = TOML.format(min_peers=1, target="rounds = 3")
MANIFEST = parse_manifest(TEXT.encode(), "test")
LARGE = parse_manifest(TEXT.replace("vocabulary = 16", "vocabulary = 65536").encode(), "test")  # a state of 4 pieces


class FakeDirectory:
    peer_id = "me"
    voters: frozenset[str] = frozenset()

    def set_voters(self, voters: frozenset[str]) -> None:
        self.voters = voters

    def __init__(self) -> None:
        self.records: dict[PeerId, PeerRecord] = {}
        self.published: dict[str, Any] = {}

    def live(self) -> dict[PeerId, PeerRecord]:
        return self.records

    def publish(self, *, urgent: bool = False, **fields: Any) -> None:
        self.published |= fields


class FakeReader:
    """Serves the commits of a chain as every peer's."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain

    async def read(self, peer: PeerId, after: int) -> ShownChain:
        log = self.chain.log_since(min(after, self.chain.round)) or self.chain.log
        return ShownChain(self.chain.head, log, None, ())


class KeptRun:
    """A run with a chain, and a store in a folder; peers are sources of its pool."""

    def __init__(self, folder: Path, manifest: Manifest = MANIFEST) -> None:
        self.manifest = manifest
        self.folder = folder / "host"
        self.folder.mkdir()
        (self.folder / "run.toml").write_text(manifest.to_toml())
        self.pool = SourcePool(folder)
        self.chain = Chain.from_genesis(manifest.run_id)
        self.directory = FakeDirectory()
        self.planner = build_program(manifest)
        self.store = self.new_store()

    def new_store(self) -> StateStore:
        """Return the store of a new process."""
        state_folder = StateFolder(RunDir(self.folder), self.manifest, self.planner)
        self.pool.store = state_folder.store
        sources = StateSources(
            admitted=admitted_of(self.directory, self.manifest),
            downloader=self.pool.new_fetcher(),
            reader=cast(Any, FakeReader(self.chain)),
            contacts=("a",),
            recently_requested=set,
        )
        plan = StorePlan(announcer=WholeRunAnnouncer(cast(Any, self.directory)))
        store = StateStore(self.manifest, state_folder, sources, plan, RevisionLog(), has_one_state=True)
        store.restore(self.folder)
        return store

    def make_round(self) -> bytes:
        """Append a round to the chain; return the bytes of its state."""
        commit = commit_of(self.chain.head, {1: Blob.of(bytes([self.chain.round]))})
        self.chain.append(certified(self.chain, commit))
        random = torch.Generator().manual_seed(self.chain.round)
        size = state_bytes(self.planner.numel, self.planner.method) // 4
        return bytes(torch.rand(size, generator=random).numpy().data.cast("B"))

    def announce(self, state: Blob, *peers: str) -> None:
        """Let these trainers announce the head of the chain with a state."""
        head = self.chain.head
        for peer in peers:
            self.directory.records[peer] = PeerRecord(
                role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens,
                state_digest=state.digest, validation_round=head.round, validation_loss=1.5,
            )  # fmt: skip

    def weights(self, state: bytes) -> torch.Tensor:
        return OuterState.from_bytes(bytearray(state), self.planner.numel, self.planner.method).anchor


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[KeptRun]:
    kept = KeptRun(tmp_path)
    yield kept
    await kept.pool.stop()


async def keep(store: StateStore, head: ChainHead) -> None:
    """Run the store until it holds the state of a head."""
    task = asyncio.create_task(store.run())
    try:
        await until(lambda: task.done() or (store.chain.head == head and store.blob is not None), 20)
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_state_is_checked_saved_announced_and_restored(run: KeptRun) -> None:
    run.make_round()
    state = run.make_round()
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    await keep(run.store, run.chain.head)
    assert torch.equal(load_trained_weights(run.folder).anchor, run.weights(state))
    said = run.directory.published
    assert (said["round"], said["state_digest"]) == (2, Blob.of(state).digest) and said["digest"] == run.chain.digest
    assert (said["validation_round"], said["validation_loss"]) == (2, 1.5)
    assert len(run.store.chain.commits_since(0) or ()) == 2, "returning peers see what became of their work"
    assert run.store.describe() == "holding the state of round 2"

    again = run.new_store()
    assert again.chain.head == run.chain.head and again.blob == Blob.of(state)
    assert bytes(again.blobs.read(Blob.of(state).digest)) == state
    again.blobs.discard(Blob.of(state).digest)
    assert run.new_store().blob == Blob.of(state), "the blob is made again from the checkpoint"


async def test_before_the_first_state_the_record_says_that_this_host_keeps(run: KeptRun) -> None:
    task = asyncio.create_task(run.store.run())
    await until(lambda: bool(run.directory.published))
    task.cancel()
    assert run.directory.published["digest"] == genesis_head(run.manifest.run_id).digest
    assert run.directory.published["state_digest"] == b""


async def test_host_that_does_not_train_serves_the_weights_with_which_the_run_starts(tmp_path: Path) -> None:
    run = KeptRun(tmp_path, start_from_weights(MANIFEST, tmp_path / "weights"))
    assert run.store.blob is not None and run.store.describe() == "holding the state of round 0"
    state = bytes(run.store.blobs.read(run.store.blob.digest))
    assert block_digests(run.manifest.model, run.weights(state)) == run.manifest.model.weights
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        run.new_store()


async def test_corrupted_state_of_a_lying_peer_is_refused(run: KeptRun) -> None:
    state = run.make_round()
    liar = ScriptedSource(state)
    liar.tamper = flip_last_bit
    await run.pool.add_source("liar", liar)
    run.announce(Blob.of(state), "liar")
    task = asyncio.create_task(run.store.run())
    await until(lambda: len(run.pool.faults) > 0)
    task.cancel()
    await asyncio.wait([task])
    assert run.pool.faults and run.pool.faults[0][0] == "liar" and run.store.blob is None
    assert not list(run.folder.glob("checkpoints/*"))
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    await keep(run.store, run.chain.head)
    assert torch.equal(load_trained_weights(run.folder).anchor, run.weights(state))


async def test_state_that_is_not_finite_is_not_kept(run: KeptRun, caplog: pytest.LogCaptureFixture) -> None:
    state = b"\xff" * len(run.make_round())
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    with caplog.at_level("INFO"):
        task = asyncio.create_task(run.store.run())
        await until(lambda: "not finite" in caplog.text)
        task.cancel()
    assert run.store.blob is None


async def test_newer_states_wait_for_the_pause_but_the_final_one_does_not(run: KeptRun) -> None:
    first = run.make_round()
    await run.pool.add_honest("a", first)
    run.announce(Blob.of(first), "a")
    await keep(run.store, run.chain.head)
    held = run.chain.head
    second = run.make_round()
    run.announce(Blob.of(second), "a")
    assert run.store._due_offer(time.monotonic()) is None and run.store.chain.head == held
    later = time.monotonic() + state_store.MIN_PAUSE_SECONDS + 1
    assert run.store._due_offer(later) is not None
    final = run.make_round()
    run.announce(Blob.of(final), "b")
    run.directory.records.pop("a")
    await run.pool.add_honest("b", final)
    await keep(run.store, run.chain.head)
    assert run.store.is_complete and run.store.describe() == "holding the final state of round 3"
    assert not run.store.blobs.has(Blob.of(first).digest), "the disk has room for few"


async def test_download_that_a_kill_interrupts_goes_on_at_the_next_start(tmp_path: Path) -> None:
    run = KeptRun(tmp_path, LARGE)
    state = run.make_round()
    source = ScriptedSource(state)
    source.frozen_after = 2 * PIECE_BYTES + 1
    await run.pool.add_source("a", source)
    run.announce(Blob.of(state), "a")
    task = asyncio.create_task(run.store.run())
    await until(lambda: source.bytes_sent >= 2 * PIECE_BYTES, 20)
    await asyncio.sleep(0.3)  # the last piece is being written
    task.cancel()  # what a kill leaves is on disk already
    await asyncio.wait([task])
    source.frozen_after = float("inf")
    before = source.bytes_sent
    await keep(run.new_store(), run.chain.head)
    assert source.bytes_sent - before < len(state), "whole pieces are not fetched again"
    assert torch.equal(load_trained_weights(run.folder).anchor, run.weights(state))
    await run.pool.stop()


async def test_full_disk_is_said_and_withdraws_the_record(run: KeptRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kept: object) -> None:
        raise StorageError("no space left for it; free some on that disk")

    monkeypatch.setattr(run.store.folder, "save", refuse)
    state = run.make_round()
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    task = asyncio.create_task(run.store.run())
    await until(lambda: bool(run.store.error))
    task.cancel()
    assert run.directory.published["digest"] == b"", "peers do not wait for this host"
    assert "no space left" in run.store.describe()


async def test_fetching_once_gives_up_if_nobody_holds_a_state(run: KeptRun) -> None:
    with pytest.raises(UnreachableError, match="no peer or host"):
        await run.store.fetch_newest(0.3)
    state = run.make_round()
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    kept = await run.store.fetch_newest(5.0)
    assert kept.head == run.chain.head and kept.blob == Blob.of(state)
    assert run.directory.published == {}, "it does not say that it keeps anything"


async def test_state_is_not_kept_while_no_peer_shows_the_chain_to_it(run: KeptRun) -> None:
    class Endless(FakeReader):
        calls = 0

        async def read(self, peer: PeerId, after: int) -> ShownChain:
            self.calls += 1
            raise MalformedError("the commits do not lead to its head")

    run.make_round()
    state = run.make_round()
    reader = Endless(run.chain)
    object.__setattr__(run.store._sources, "reader", reader)
    await run.pool.add_honest("a", state)
    run.announce(Blob.of(state), "a")
    offer = run.store._choose()
    assert offer is not None
    with pytest.raises(UnreachableError, match="shows the chain"):
        await run.store._fetch_chain(offer)
    assert 0 < reader.calls < 1000


def test_checkpoint_of_a_host_names_its_state(tmp_path: Path) -> None:
    def manifests(folder: Path) -> Iterable[Path]:
        return folder.glob("checkpoints/*/manifest.json")

    run = KeptRun(tmp_path)
    state = run.make_round()
    blob = run.store.blobs.put(state)
    run.store.folder.save(StoredState(run.chain.head, run.chain.log, blob))
    body = json.loads(next(iter(manifests(run.folder))).read_text())["body"]
    assert body["chain"]["state"] == blob.name and body["inner"] == []
