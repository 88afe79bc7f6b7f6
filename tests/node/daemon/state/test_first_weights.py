"""A peer without the weights with which a run starts: it takes them from others, checked, and trains nothing before."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from node.daemon.state.outer_state import OuterState
from node.loop import round_loop
from node.loop.peers import catch_up
from node.model.weight_files import block_digests
from protocol.manifest.run import Manifest
from tests.node.daemon.round_loop_setup import FRIEND, LIAR, RoundLoopSetup
from tests.node.small_run import METHOD, NUMEL, manifest_of, until

TRUE_WEIGHTS = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))  # those of every replica of the tests


def manifest_from(weights: torch.Tensor) -> Manifest:
    plain = manifest_of()
    model = plain.model.model_copy(update={"weights": block_digests(plain.model, weights)})
    return plain.model_copy(update={"model": model})


@pytest.fixture
async def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoundLoopSetup]:
    monkeypatch.setattr(round_loop, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(catch_up, "MIN_AVOID_SECONDS", 60.0)
    world = RoundLoopSetup(tmp_path, manifest_from(TRUE_WEIGHTS), has_contacts=True)
    world.replica.state = OuterState.initial(torch.zeros(NUMEL), METHOD)
    yield world
    assert world.running is not None
    world.running.cancel()
    await asyncio.gather(world.running, return_exceptions=True)


async def test_newcomer_takes_the_first_weights_from_a_peer_before_it_trains(newcomer: RoundLoopSetup) -> None:
    newcomer.run()
    await asyncio.sleep(0.05)
    assert newcomer.trainer.started == [] and newcomer.members.heads == [], "it announces no head without a state"
    theirs = await newcomer.peer(FRIEND, 0)
    await until(lambda: newcomer.trainer.started == [0])
    assert torch.equal(newcomer.replica.state.anchor, TRUE_WEIGHTS)
    assert newcomer.replica.blob == theirs.blob and newcomer.members.heads == [theirs.chain.head]


async def test_newcomer_to_a_run_under_way_takes_the_state_instead_of_replaying(newcomer: RoundLoopSetup) -> None:
    theirs = await newcomer.peer(FRIEND, 2)
    newcomer.run()
    await until(lambda: newcomer.trainer.started == [2])
    assert newcomer.replica.blob == theirs.blob and newcomer.standing.catch_ups == [("skipped", 2)]


@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "control: unchecked"])
async def test_weights_that_the_manifest_does_not_name_are_refused(
    newcomer: RoundLoopSetup, monkeypatch: pytest.MonkeyPatch, is_checked: bool
) -> None:
    if not is_checked:
        monkeypatch.setattr("node.daemon.state.outer_state.is_start", lambda *_: True)
    lying = await newcomer.peer(LIAR, 0)
    lying.state = OuterState.initial(TRUE_WEIGHTS + 1, METHOD)
    lying.blob = newcomer.fetcher.stores[LIAR].put(b"".join(bytes(view) for view in lying.state.byte_views()))
    newcomer.show(LIAR, lying.chain.head, lying.blob.digest)
    newcomer.run()
    if not is_checked:
        await until(lambda: newcomer.trainer.started == [0])
        assert not torch.equal(newcomer.replica.state.anchor, TRUE_WEIGHTS)
        return
    await until(lambda: newcomer.standing.recovered_errors == ["sync failed"])
    assert newcomer.trainer.started == [] and not newcomer.replica.state.anchor.any()
    await newcomer.peer(FRIEND, 0)
    await until(lambda: newcomer.trainer.started == [0])
    assert torch.equal(newcomer.replica.state.anchor, TRUE_WEIGHTS)
