"""A contribution has one outcome, however often the trainer dies; no anchor is written over one that is read."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from node.daemon import trainer_link
from node.daemon.state.outer_state import OuterState
from node.loop.contributions import MAX_AGE_ROUNDS, ContributionTracker, LastSent
from node.trainer.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    Evaluate,
    Evaluated,
    PauseChanged,
    Ready,
    RevisedOutcome,
    SubmitEarly,
    TrainerProgress,
)
from optim.compose import compose
from protocol.consensus.chain import ChainHead
from protocol.errors import DeviceError
from tests.node.daemon.trainer_link_setup import ME, NUMEL, SETTINGS, TrainerLinkSetup, ready
from tests.node.small_run import commit_of, program_of, until


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[TrainerLinkSetup]:
    made = TrainerLinkSetup(tmp_path)
    yield made
    await made.link.stop(0)
    made.arena.close()


async def test_a_contribution_becomes_blobs_and_its_outcome_is_sent_once(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(ready(0))
    await world.message(0)
    assert world.offers.pending is not None
    assert [world.store.read(part.digest) for part in world.offers.pending.parts] == [b"abcd", b"ef"]
    assert world.sent.load() == LastSent(world.offers.pending), "before anybody hears of it"
    assert await world.decide(0, included=True) == "included"
    await world.say(AnchorApplied(round=1))
    await world.decide(1, included=False)
    assert world.process.adopts == [(1, "included"), (2, "none")]
    assert torch.equal(world.arena.anchor(2), torch.full((NUMEL,), 2.0))


async def test_rounds_go_on_while_no_loop_of_the_user_is_connected(world: TrainerLinkSetup) -> None:
    """Control: a loop that is connected is waited for, and so is one that connects meanwhile."""
    await world.begin()
    await world.say(ready(0))
    await world.decide(0, included=False)
    late = asyncio.create_task(world.decide(1, included=False))
    await asyncio.sleep(0)
    await until(lambda: not late.done() and world.link.round == 1)
    assert not world.arena.anchor(0).any(), "the loop has not applied round 1, and may still read round 0"
    world.process.is_absent = True
    world.process.crash_count = 1
    await world.say(PauseChanged(reason="no training loop is connected"))
    await late
    await world.decide(2, included=False)
    assert world.link.round == 3 and torch.equal(world.arena.anchor(3), torch.full((NUMEL,), 3.0))
    async with world.process.handing_over:  # a loop connects while the next anchor waits to be written
        late = asyncio.create_task(world.decide(3, included=False))
        await asyncio.sleep(0)
        world.process.is_absent = False
    await world.say(ready(0))
    assert not late.done() and world.link.round == 3
    assert world.process.adopts[-1] == (3, "none"), "it gets the newest anchor and not those between"
    await world.say(AnchorApplied(round=3))
    await late
    assert world.process.adopts[-1] == (4, "none")


async def test_steps_are_sent_with_the_anchor_and_a_hurry_names_its_round(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(Ready(device="cpu", step=0, round=0, outstanding=None))
    await world.message(0)
    await world.decide(0, included=True)
    await world.link.request_early_submit()
    adopt, hurry = world.process.heard[-2:]
    assert adopt == ApplyAnchor(round=1, outcome="included", steps=5, settings=SETTINGS)
    assert hurry == SubmitEarly(round=1)


async def test_a_trainer_that_died_before_the_anchor_hears_the_outcome_and_repeats_nothing(
    world: TrainerLinkSetup,
) -> None:
    await world.begin()
    await world.say(ready(0))
    message = await world.message(0)
    world.process.crash_count = 1  # and the next life has not said Ready
    assert await world.decide(0, included=True) == "included"
    assert world.process.adopts == [], "told before Ready, it would be told twice"
    await world.say(ready(0, outstanding=0), message)
    assert world.process.adopts == [(1, "included")]
    assert world.offers.pending is None, "a decided message was offered again"
    await world.say(AnchorApplied(round=1))
    await world.message(1, b"second")
    assert world.offers.pending is not None and world.offers.pending.header.round == 1
    await world.decide(1, included=False)
    assert world.process.adopts[-1] == (2, "none"), "the fate of the first message passed for that of the second"


async def test_an_outcome_that_went_with_the_first_anchor_is_not_sent_again(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(ready(0))
    message = await world.message(0)
    copying = asyncio.Event()

    async def slowly(function: Callable[..., Any], *arguments: Any) -> Any:
        await copying.wait()
        return function(*arguments)

    world.work = slowly
    deciding = asyncio.create_task(world.decide(0, included=True))
    await until(lambda: world.offers.last_outcome is not None)
    world.process.crash_count = 1
    await world.say(ready(0, outstanding=0), message)
    assert world.process.adopts == [(0, "included")]
    copying.set()
    await deciding
    assert world.process.adopts == [(0, "included"), (1, "none")]


async def test_a_restarted_trainer_repeats_the_contribution_that_was_on_its_way(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(ready(0))
    message = await world.message(0)
    offer = world.offers.pending
    world.process.crash_count = 1
    await world.say(ready(0, outstanding=0), message)
    assert world.offers.pending is offer and world.process.adopts == []


async def test_a_contribution_that_the_next_round_cannot_take_is_given_back(world: TrainerLinkSetup) -> None:
    """Its round was decided elsewhere: we stand before one that is too far on, with no commit to settle it."""
    await world.begin()
    await world.say(ready(0))
    await world.message(0)
    assert world.offers.on_commits(ME, [], MAX_AGE_ROUNDS) == "none" and world.offers.pending is not None
    assert world.offers.on_commits(ME, [], MAX_AGE_ROUNDS + 1) == "excluded" and world.offers.pending is None
    await world.link.apply_anchor(MAX_AGE_ROUNDS + 1, [torch.zeros(NUMEL)], SETTINGS)
    assert world.process.adopts == [(MAX_AGE_ROUNDS + 1, "excluded")]


async def test_a_contribution_too_late_for_the_open_round_is_given_back_at_once(world: TrainerLinkSetup) -> None:
    """Of two fragments: offered to the open round, it would be read as values that it does not hold."""
    fragments = compose("averaging", {"schedule": {"fragments": 2}})
    world.offers = world.intake.tracker = ContributionTracker(program_of(fragments))
    await world.begin()
    await world.say(ready(0))
    await world.link.apply_anchor(1, [torch.zeros(NUMEL)], SETTINGS)
    await world.message(0)
    assert world.offers.pending is None and world.process.adopts == [(1, "none"), (1, "excluded")]
    await world.say(AnchorApplied(round=1))
    await world.message(1, b"second")
    assert world.offers.pending is not None, "and the next one is not mistaken for it"
    await world.decide(1, included=True)
    assert world.process.adopts[2:] == [(2, "included")]


async def test_a_contribution_that_comes_while_the_next_anchor_is_copied_is_given_back_with_it(
    world: TrainerLinkSetup,
) -> None:
    world.offers = world.intake.tracker = ContributionTracker(
        program_of(compose("averaging", {"schedule": {"fragments": 2}}))
    )
    await world.begin()
    await world.say(ready(0))
    copying = asyncio.Event()
    work = world.work

    async def slowly(function: Callable[..., Any], *arguments: Any) -> Any:
        if isinstance(arguments[0], int):  # the copy of an anchor, not of a message
            await copying.wait()
        return await work(function, *arguments)

    world.work = slowly
    adopting = asyncio.create_task(world.link.apply_anchor(1, [torch.zeros(NUMEL)], SETTINGS))
    await world.message(0)
    copying.set()
    await adopting
    assert world.offers.pending is None and world.process.adopts == [(1, "excluded")]


async def test_killed_between_snapshot_and_contribution_it_is_offered_after_all(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(ready(0))
    world.process.crash_count = 1
    await world.say(ready(0, outstanding=0))
    await world.message(0)
    assert world.offers.pending is not None


async def test_a_new_contribution_to_a_round_that_was_decided_on_another_chain_is_offered(
    world: TrainerLinkSetup,
) -> None:
    await world.begin(7)
    await world.say(ready(7))
    await world.message(7)
    await world.decide(7, included=True)
    await world.say(AnchorApplied(round=8))
    await world.link.apply_anchor(7, [torch.zeros(NUMEL)], SETTINGS)
    assert not await world.link.wait_until_applied(7, 0.01), "round 8 of the other chain passed for round 7 of this one"
    await world.say(AnchorApplied(round=7))
    assert await world.link.wait_until_applied(7, 0.01)
    await world.message(7, b"another")
    assert world.offers.pending is not None


async def test_on_another_chain_nothing_is_offered_until_the_trainer_has_heard_of_it(world: TrainerLinkSetup) -> None:
    """What it gave back was taken there: a message that is made before it hears of that carries it once more."""
    await world.begin()
    await world.say(ready(0))
    await world.message(0)
    first = world.offers.pending
    assert first is not None and world.offers.on_commits(ME, [], MAX_AGE_ROUNDS + 1) == "excluded"
    await world.link.apply_anchor(MAX_AGE_ROUNDS + 1, [torch.zeros(NUMEL)], SETTINGS)
    await world.say(AnchorApplied(round=MAX_AGE_ROUNDS + 1))
    taken = commit_of(ChainHead(0, bytes(32), 0), {1: first.parts}).body
    verdict = world.offers.on_fork(ME, [taken], 1, ChainHead(MAX_AGE_ROUNDS + 1, b"ours".ljust(32), 0))
    world.link.record_fork(verdict)
    assert verdict.retracts_restored
    await world.message(MAX_AGE_ROUNDS + 1, b"on its way already")
    assert world.offers.pending is None, "it was offered"
    assert world.errors.recovered == ["sent again"]
    last = world.sent.load()
    assert last is not None and last.contribution == first, "nor would a start from the disk offer it"
    adopt = world.process.heard[-1]
    assert isinstance(adopt, ApplyAnchor) and (adopt.round, adopt.outcome) == (MAX_AGE_ROUNDS + 1, "excluded")
    parts = tuple(blob.name for blob in first.parts)
    assert adopt.revised == (RevisedOutcome(header=first.header, parts=parts, outcome="included"),)
    await world.link.apply_anchor(1, [torch.zeros(NUMEL)], SETTINGS)
    await world.say(AnchorApplied(round=1))
    await world.message(1, b"clean")
    assert world.offers.pending is not None
    world.process.crash_count = 1
    await world.say(ready(1, outstanding=1))
    told = adopt.model_copy(update={"round": 1, "outcome": "none"})
    assert world.process.heard[-1] == told, "a life that may not have heard of it"


async def test_no_anchor_is_written_before_the_last_one_is_applied(world: TrainerLinkSetup) -> None:
    await world.begin()
    await world.say(ready(0))
    await world.link.apply_anchor(1, [torch.ones(NUMEL)], SETTINGS)
    adopting = asyncio.create_task(
        world.link.apply_anchor(2, [torch.full((5,), 2.0), torch.full((NUMEL - 5,), 2.0)], SETTINGS)
    )
    await asyncio.sleep(0.02)
    assert not adopting.done() and torch.equal(world.arena.anchor(2), torch.zeros(NUMEL))
    await world.say(AnchorApplied(round=1))
    await adopting
    assert torch.equal(world.arena.anchor(2), torch.full((NUMEL,), 2.0))


async def test_next_anchor_is_computed_in_its_place_once_the_last_but_one_is_not_read_any_more(
    world: TrainerLinkSetup,
) -> None:
    before = world.link.anchor_rooms(4)["weights"]
    await world.link.apply_anchor(4, [torch.full((NUMEL,), 4.0)], SETTINGS)
    assert bool((world.arena.anchor(4) == 4).all())
    downloaded = OuterState(torch.full((NUMEL,), 4.0), {})
    assert world.link.share_memory(4, downloaded).anchor.data_ptr() == before.data_ptr()
    await world.begin()
    await world.say(ready(0))
    room = world.link.anchor_rooms(1)["weights"]
    assert room.data_ptr() == world.arena.anchor(1).data_ptr()
    room.fill_(1.0)
    await world.link.apply_anchor(1, [room], SETTINGS)
    assert not world.link.anchor_rooms(2), "the trainer may still read the anchor of round 0"
    state = OuterState(torch.ones(NUMEL), {})
    assert world.link.share_memory(0, state) is state
    assert world.link.share_memory(1, state).anchor.data_ptr() == room.data_ptr()
    await world.say(AnchorApplied(round=1))
    assert world.link.anchor_rooms(2) and not world.link.anchor_rooms(3)


async def test_a_trainer_that_is_behind_is_sent_the_anchor_and_no_other(world: TrainerLinkSetup) -> None:
    await world.begin(3)
    await world.say(ready(2))
    assert world.process.adopts == [(3, "none")]
    await world.say(ready(3))
    assert len(world.process.adopts) == 1


async def test_anchor_of_another_chain_is_sent_although_its_round_is_the_same(world: TrainerLinkSetup) -> None:
    await world.begin(3)
    await world.say(ready(3))
    await world.link.apply_anchor(3, [torch.zeros(NUMEL)], SETTINGS)
    world.process.crash_count = 1
    await world.say(ready(3))  # it may have died before it heard of that
    heard = [each for each in world.process.heard if isinstance(each, ApplyAnchor)]
    assert [(each.round, each.is_other_chain) for each in heard] == [(3, True)] * 2
    await world.say(AnchorApplied(round=3), ready(3))
    assert len(world.process.adopts) == 2, "it has applied it"
    await world.link.apply_anchor(4, [torch.zeros(NUMEL)], SETTINGS)
    newest = world.process.heard[-1]
    assert isinstance(newest, ApplyAnchor) and not newest.is_other_chain


async def test_nothing_waits_for_a_trainer_that_does_not_run(
    world: TrainerLinkSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await world.link.wait_until_applied(5, 0.01)
    await world.link.apply_anchor(5, [torch.zeros(NUMEL)], SETTINGS)
    assert world.process.adopts == []
    await world.begin(5)
    await world.say(ready(5))
    await world.link.apply_anchor(6, [torch.zeros(NUMEL)], SETTINGS)
    waiting = asyncio.create_task(world.link.wait_until_applied(6, 30.0))
    await asyncio.sleep(0)
    monkeypatch.setattr(trainer_link, "LAST_APPLY_ANCHOR_SECONDS", 0.01)
    await world.link.stop(6)
    assert await asyncio.wait_for(waiting, 1.0), "a save would have waited for a trainer that is gone"
    assert world.process.stopped
    assert world.errors.recovered == ["trainer late"]


async def test_an_anchor_is_not_written_over_that_the_trainer_may_read(
    world: TrainerLinkSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_link, "APPLY_ANCHOR_SECONDS", 0.02)
    await world.begin()
    await world.say(ready(0))
    await world.link.apply_anchor(1, [torch.ones(NUMEL)], SETTINGS)
    assert world.errors.recovered == []
    adopting = asyncio.create_task(world.link.apply_anchor(2, [2 * torch.ones(NUMEL)], SETTINGS))
    await until(lambda: len(world.errors.recovered) > 1)
    assert set(world.errors.recovered) == {"trainer late"} and float(world.arena.anchor(0).sum()) == 0
    await world.say(AnchorApplied(round=1))
    await asyncio.wait_for(adopting, 10)
    assert float(world.arena.anchor(2).sum()) == 2 * NUMEL


async def test_the_error_that_ended_the_trainer_is_raised(world: TrainerLinkSetup) -> None:
    await world.begin()
    world.process.failure = DeviceError("no memory")
    world.process.say(None)
    with pytest.raises(DeviceError, match="no memory"):
        await world.link.wait_finished()


async def test_progress_is_passed_on_and_evaluation_is_of_the_newest_anchor(world: TrainerLinkSetup) -> None:
    await world.begin(4)
    await world.say(TrainerProgress(step=1, tokens=8, loss=2.0, tokens_per_second=1.0, seconds={}))
    await world.link.request_evaluation()
    assert world.process.heard == [Evaluate(round=4)]


async def test_trainer_measures_the_last_round_before_it_stops(world: TrainerLinkSetup) -> None:
    await world.begin(4)
    world.link.expect_evaluation()
    stopping = asyncio.create_task(world.link.stop(4, evaluates=True))
    done, _ = await asyncio.wait({stopping}, timeout=0.05)
    assert not done and not world.process.stopped
    await world.say(Evaluated(round=4, loss=2.0, tokens=8))
    await asyncio.wait_for(stopping, 10)
    assert world.process.stopped


async def test_evaluations_take_a_tenth_of_the_time_but_the_last_is_made(world: TrainerLinkSetup) -> None:
    little, much = (AnchorApplied(round=4, evaluation_share=share) for share in (0.1, 0.11))
    assert world.link.affords_evaluation(little, is_last=False)
    assert not world.link.affords_evaluation(much, is_last=False)
    assert world.link.affords_evaluation(much, is_last=True)


@pytest.mark.parametrize("evaluates", [False, True])
async def test_stop_does_not_wait_for_long(
    evaluates: bool, world: TrainerLinkSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that a person stops does not wait at all, and a trainer that never answers is not waited for."""
    monkeypatch.setattr(trainer_link, "EVALUATION_SECONDS", 0.05)
    await world.begin(4)
    world.link.expect_evaluation()
    await asyncio.wait_for(world.link.stop(4, evaluates=evaluates), 10)
    assert world.process.stopped
