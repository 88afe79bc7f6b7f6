"""A store that follows the run computes each state from the commits, with the bits of the replicas."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from node.daemon.state.outer_state import OuterState, ReplicatedState, RoundCompute
from node.daemon.stored_states.announcing import WholeRunAnnouncer
from node.daemon.stored_states.replay import CommitReplay
from node.daemon.stored_states.state_folder import StateFolder
from node.daemon.stored_states.state_store import StateSources, StateStore, StorePlan
from node.from_manifest import build_program
from node.loop.peers.catch_up import RETAINED_ROUNDS
from node.model import initial_weights
from node.run_dir import RunDir
from protocol.blobs.blob import Blob
from protocol.blobs.server import BlobService
from protocol.consensus.chain import Chain
from protocol.manifest.reading import parse_manifest
from protocol.murmur_pb2 import PeerRecord
from protocol.steering import RevisionLog
from tests.node.daemon.stored_states.test_state_store import FakeDirectory, FakeReader
from tests.node.small_run import TOML, admitted_of, apply, at_once, commit_of, store_in, until
from tests.protocol.blobs.fake_sources import SourcePool

pytestmark = pytest.mark.slow
METHOD = 'recipe = "diloco"\ncodec = { kind = "none" }\ntopology = { kind = "gather" }'
TEXT = TOML.format(min_peers=1, target="").replace('recipe = "diloco"', METHOD)
MANIFEST = parse_manifest(TEXT.encode(), "test")
PLANNER = build_program(MANIFEST)


class FollowedRun:
    """A trainer's replica, whose store is a source of blobs, and a store in another folder that follows it."""

    def __init__(self, folder: Path) -> None:
        self.pool = SourcePool(folder)
        self.blobs = store_in(folder / "trainer")
        compute = RoundCompute(PLANNER, self.blobs, lambda *_: 1.0)
        anchor = initial_weights(MANIFEST.model, MANIFEST.run.seed)
        self.replica = ReplicatedState(
            Chain.from_genesis(MANIFEST.run_id), OuterState.initial(anchor, PLANNER.method), compute, at_once, at_once
        )
        self.directory = FakeDirectory()
        (folder / "follower").mkdir()
        state_folder = StateFolder(RunDir(folder / "follower"), MANIFEST, PLANNER)
        self.pool.store = state_folder.store
        sources = StateSources(
            admitted=admitted_of(self.directory, MANIFEST),
            downloader=self.pool.new_fetcher(),
            reader=cast(Any, FakeReader(self.replica.chain)),
            contacts=("a",),
            recently_requested=set,
        )
        plan = StorePlan(announcer=WholeRunAnnouncer(cast(Any, self.directory)), follower=at_once)
        self.store = StateStore(MANIFEST, state_folder, sources, plan, RevisionLog(), has_one_state=True)
        self.store.replay = CommitReplay(PLANNER, self.store.steering, state_folder, sources.downloader, "me", at_once)

    async def make_round(self, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        values = torch.randn(PLANNER.numel, generator=random)
        blob = self.blobs.put(bytes(PLANNER.method.codec.encode(values)))
        await apply(self.replica, commit_of(self.replica.chain.head, {1: blob}))
        self.announce()

    def announce(self, state: Blob | None = None) -> None:
        head = self.replica.chain.head
        self.directory.records["a"] = PeerRecord(
            role="trainer", round=head.round, digest=head.digest, chain_tokens=head.tokens,
            state_digest=(state or self.replica.blob).digest,
        )  # fmt: skip

    async def follow(self) -> None:
        """Run the store until it holds the trainer's state."""
        task = asyncio.create_task(self.store.run())
        try:
            await until(lambda: task.done() or self.store.blob == self.replica.blob, 20)
            assert not task.done(), task.exception()
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[FollowedRun]:
    followed = FollowedRun(tmp_path)
    await followed.pool.add_source("a", BlobService(followed.blobs, lambda context: "me", None))
    yield followed
    await followed.pool.stop()


async def test_follower_fetches_one_state_and_then_applies_commits_to_the_same_bits(run: FollowedRun) -> None:
    await run.make_round(1)
    await run.follow()
    assert (run.store.fetched, run.store.replayed) == (1, 0)
    for seed in range(2, 5):
        await run.make_round(seed)
        await run.follow()
    assert (run.store.fetched, run.store.replayed) == (1, 3)
    assert run.store.chain.head == run.replica.chain.head
    assert len(run.store.chain.commits_since(0) or ()) == 4, "it shows the whole chain to others"
    assert run.directory.published["state_digest"] == run.replica.blob.digest


async def test_follower_that_was_away_for_some_rounds_applies_all_of_them(run: FollowedRun) -> None:
    await run.make_round(1)
    await run.follow()
    for seed in range(RETAINED_ROUNDS):
        await run.make_round(seed)
    await run.follow()
    assert (run.store.fetched, run.store.replayed) == (1, RETAINED_ROUNDS)


async def test_follower_that_was_away_for_longer_fetches_the_state(run: FollowedRun) -> None:
    await run.make_round(1)
    await run.follow()
    for seed in range(RETAINED_ROUNDS + 1):
        await run.make_round(seed)
    await run.follow()
    assert (run.store.fetched, run.store.replayed) == (2, 0)


async def test_follower_without_the_blobs_of_a_commit_fetches_the_state(run: FollowedRun) -> None:
    await run.make_round(1)
    await run.follow()
    await run.make_round(2)
    [commit] = run.replica.chain.commits_since(1) or ()
    for blob in commit.body.blobs:
        run.blobs.discard(blob.digest)
    await run.follow()
    assert (run.store.fetched, run.store.replayed) == (2, 0)


async def test_result_that_differs_from_what_trainers_announce_is_not_kept(run: FollowedRun) -> None:
    await run.make_round(1)
    await run.follow()
    held = run.store.blob
    await run.make_round(2)
    run.announce(Blob.of(b"another state"))
    offer = run.store._choose()
    assert offer is not None
    assert await run.store._replay_commits(offer) is None
    assert run.store.blob == held and run.store.replayed == 0
