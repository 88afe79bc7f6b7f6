"""The loop of a peer, with plain stand-ins around a real replica: joining, rounds, catching up, and whom it avoids."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.daemon import state_effects
from node.loop import round_loop
from node.loop.actions import PrecomputeCommit
from node.loop.contributions import StoredContribution
from node.loop.events import ContributionReady
from node.loop.peers import catch_up
from node.trainer.ipc.channel import ContributionHeader
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead
from protocol.errors import GoneError, MalformedError, UnreachableError
from tests.certificates import offer_of
from tests.node.daemon.round_loop_setup import FRIEND, LIAR, RoundLoopFactory
from tests.node.small_run import (
    PEERS,
    CopyingFetcher,
    certified,
    commit_of,
    grown,
    payload,
    stated,
    states_computed_by,
    until,
)


@pytest.fixture
async def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RoundLoopFactory]:
    monkeypatch.setattr(round_loop, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(catch_up, "SYNC_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(state_effects, "MIN_STATE_SECONDS", 5.0)
    make = RoundLoopFactory(tmp_path)
    yield make
    for world in make.made:
        if world.running is not None:
            world.running.cancel()
            await asyncio.gather(world.running, return_exceptions=True)


async def test_rounds_until_the_target_of_rounds(worlds: RoundLoopFactory) -> None:
    world = worlds("rounds = 2")
    world.run()
    await world.decide(1)
    await world.decide(2)
    await world.done()
    assert world.session.begun == [0, 1] and not world.session.is_open
    assert world.trainer.adopted == [1, 2] and world.keeper.kept == [1, 2]
    assert [head.round for head in world.members.heads] == [1, 2]


async def test_a_round_is_told_of_once_the_save_before_it_is_on_disk(worlds: RoundLoopFactory) -> None:
    """The trainer has it before: it need not wait."""
    world = worlds("rounds = 2")
    world.run()
    await world.decide(1)
    world.keeper.is_ready.clear()
    await world.decide(2)
    await until(lambda: world.replica.chain.round == 2)
    assert world.trainer.adopted == [1, 2]
    assert [head.round for head in world.members.heads] == [1] and len(world.standing.entries) == 1
    world.keeper.is_ready.set()
    await world.done()
    assert [head.round for head in world.members.heads] == [1, 2] and len(world.standing.entries) == 2


async def test_a_round_that_was_foreseen_is_computed_once(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds("rounds = 1")
    computed = states_computed_by(world.replica, monkeypatch)
    world.run()
    await until(lambda: world.session.is_open)
    commit = commit_of(world.replica.chain.head, {1: world.store.put(payload(1))})
    world.state_effects.precompute(PrecomputeCommit(commit.body, commit.body.contributions))
    await until(lambda: bool(computed))
    assert world.replica.chain.round == 0 and not world.trainer.adopted, "it is not decided yet"
    world.end_round(commit)
    await world.done()
    assert world.trainer.adopted == [1] and computed == [world.replica.state]


async def test_the_target_of_tokens(worlds: RoundLoopFactory) -> None:
    world = worlds("tokens = 150")
    world.run()
    for seed in range(2):
        assert not world.loop.steering.is_target_reached
        await world.decide(seed)
    await world.done()
    assert world.replica.chain.tokens == 200


async def test_round_0_begins_with_all(worlds: RoundLoopFactory) -> None:
    world = worlds(min_peers=2)
    world.run()
    await until(lambda: "waiting for peers" in world.standing.phases)
    await asyncio.sleep(0.05)
    assert not world.session.is_open and world.trainer.started == [0]
    world.show(FRIEND, world.replica.chain.head)
    await until(lambda: world.session.is_open)


async def test_a_run_that_has_begun_waits_only_a_while(worlds: RoundLoopFactory) -> None:
    world = worlds(min_peers=3)
    await grown(world.replica, world.store, 1)
    world.run()
    await until(lambda: world.session.is_open)
    assert world.session.begun == [1]


async def test_a_newcomer_looks_for_the_run_before_it_trains(worlds: RoundLoopFactory) -> None:
    world = worlds(has_contacts=True)
    world.run()
    await asyncio.sleep(0.05)
    assert world.trainer.started == []
    await world.peer(FRIEND, 2)
    await until(lambda: world.trainer.started == [2])


async def test_the_message_is_offered_to_the_open_round_and_to_no_other(worlds: RoundLoopFactory) -> None:
    world = worlds()
    message = ContributionHeader(round=0, sizes=(1,), tokens=10, steps=1, loss=1.0)
    world.trainer.contributions.submit(StoredContribution(message, (world.store.put(payload(5)),)))
    world.inbox.post(ContributionReady())
    assert world.session.offered == []
    world.run()
    await world.decide()
    await until(lambda: len(world.session.offered) == 2)
    assert [(offer.round, offer.tokens) for offer in world.session.offered] == [(0, 10), (1, 10)]
    assert world.session.offered[1].base == world.replica.chain.digest


async def test_a_small_gap_is_replayed(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer(FRIEND, 3)
    world.run()
    await world.until_round(3)
    assert world.scout.asked == [FRIEND] and world.standing.catch_ups == [("replayed", 1)] * 3
    assert world.replica.blob == theirs.blob and world.replica.chain.commits_since(0) is not None


async def test_a_commit_that_the_round_cannot_have_is_not_replayed_and_ends_nobody(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer(FRIEND, 2)
    blob, mine = world.store.put(payload(1)), world.replica.chain.head
    body = replace(commit_of(mine, {2: blob, 3: blob}).body, parts=(blob,))  # as of a butterfly
    false = Chain(mine, world.replica.chain.log)
    false.append(certified(false, stated(PEERS[3], body), world.replica.blob.digest, signers=[2, 3]))
    world.show(LIAR, replace(false.head, round=9, tokens=2**40), bytes(32))
    world.scout.offers[LIAR] = offer_of(false)
    world.run()
    await world.until_round(2)
    assert world.replica.chain.head == theirs.chain.head and world.scout.asked[0] == LIAR
    assert world.standing.recovered_errors[0] == "sync failed"


async def test_that_our_state_differs_is_told_once_however_often_its_better_is_asked_for(
    worlds: RoundLoopFactory,
) -> None:
    world = worlds()
    theirs = await world.peer_of_two(FRIEND, 2)
    world.show(LIAR, theirs.chain.head, theirs.blob.digest)
    await world.replica.install_state(theirs.chain.head, theirs.chain.log, world.replica.blob)
    world.scout.faults = dict.fromkeys((FRIEND, LIAR), UnreachableError("no answer"))
    world.run()
    await until(lambda: world.scout.asked.count(FRIEND) + world.scout.asked.count(LIAR) == 2)
    for _ in range(20):  # both are put aside: each turn of the loop looks for somebody
        world.tell_members()
        await asyncio.sleep(0)
    assert world.standing.recovered_errors.count("state differs") == len(world.standing.failures) == 1
    assert world.session.is_open, "its round goes on"


async def test_a_large_gap_takes_the_state(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer(FRIEND, 6)
    world.run()
    await world.until_round(6)
    assert world.scout.asked == [FRIEND] and world.replica.blob == theirs.blob
    assert world.standing.catch_ups == [("skipped", 6)] and world.standing.moves == [theirs.chain.head]


async def test_a_state_that_was_taken_is_told_of_once_it_is_on_disk(worlds: RoundLoopFactory) -> None:
    """A kill would take back the six rounds that were skipped for it."""
    world = worlds()
    await world.peer(FRIEND, 6)
    world.keeper.is_ready.clear()
    world.run()
    await until(lambda: world.keeper.kept == [6])
    assert world.trainer.adopted == [6] and world.members.heads == []
    world.keeper.is_ready.set()
    await until(lambda: [head.round for head in world.members.heads] == [6])


async def test_where_replay_fails_the_state_is_taken_from_the_same_peer_at_once(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer(FRIEND, 3)
    for commit in theirs.chain.commits_since(0) or ():
        world.fetcher.stores[FRIEND].discard(commit.body.blobs[0].digest)
    world.run()
    await world.until_round(3)
    assert world.scout.asked == [FRIEND, FRIEND] and world.replica.blob == theirs.blob
    assert world.standing.recovered_errors == ["sync failed"]


async def test_one_round_behind_it_waits_a_little_for_the_commit_to_come_by_itself(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "SYNC_AFTER_SECONDS", 30.0)
    world = worlds()
    world.run()
    await until(lambda: world.session.is_open)
    await world.peer(FRIEND, 1)
    await asyncio.sleep(0.05)
    assert world.scout.asked == [] and world.session.is_open
    monkeypatch.setattr(catch_up, "SYNC_AFTER_SECONDS", 0.01)
    world.tell_members()
    await world.until_round(1)


async def test_the_lesser_of_two_chains_is_left(worlds: RoundLoopFactory) -> None:
    world = worlds()
    await grown(world.replica, world.store, 2, peer=1)
    theirs = await world.peer(FRIEND, 3, seed=2)
    world.run()
    await world.until_round(3)
    assert world.replica.chain.digest == theirs.chain.digest and world.replica.blob == theirs.blob


async def test_another_chain_is_gone_to_although_our_own_rounds_never_pause(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with more votes and tokens in fewer rounds: whoever waits for its next commit waits in vain."""
    monkeypatch.setattr(catch_up, "SYNC_AFTER_SECONDS", 30.0)
    world = worlds()
    await grown(world.replica, world.store, 3, peer=1)
    world.run()
    await until(lambda: world.session.is_open)
    theirs = await world.peer_of_two(FRIEND, 2)
    head = theirs.chain.head
    await until(lambda: world.replica.chain.digest == head.digest)
    assert world.replica.blob == theirs.blob


async def test_a_liar_is_avoided_though_it_shows_a_new_head_each_time(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def opened(avoid_seconds: float) -> tuple[int, int]:
        """How often the liar was asked, and how many rounds were decided meanwhile."""
        monkeypatch.setattr(catch_up, "MIN_AVOID_SECONDS", avoid_seconds)
        monkeypatch.setattr(catch_up, "MAX_AVOID_SECONDS", avoid_seconds)
        world = worlds()
        world.scout.faults[LIAR] = MalformedError("a lie")
        world.run()
        await until(lambda: world.session.is_open)
        for number in range(100, 110):
            world.show(LIAR, ChainHead(number, bytes([number]) * 32, 10**9))
            world.tell_members()
            await asyncio.sleep(0.03)
            if world.session.is_open:
                await world.decide(number)
        return len(world.scout.asked), world.replica.chain.round

    asked, rounds = await opened(60.0)
    assert asked == 1 and rounds >= 8
    asked, rounds = await opened(0.0)  # negative control
    assert asked > 8 and rounds >= 8, "even then it stops no round"


async def test_a_liar_does_not_hide_who_stands_honestly_beside_it(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer(FRIEND, 6)
    world.show(LIAR, theirs.chain.head)
    world.others = {LIAR: world.others[LIAR], FRIEND: world.others[FRIEND]}
    world.scout.faults[LIAR] = UnreachableError("no answer")
    world.run()
    await world.until_round(6)
    assert world.scout.asked == [LIAR, FRIEND]


async def test_who_went_on_while_it_was_followed_is_asked_again(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, fetch, gone = worlds(), CopyingFetcher.fetch, list[Blob]()
    theirs = await world.peer(FRIEND, 6)

    async def too_late(self: CopyingFetcher, blob: Blob, sources: Any, seconds: float, **words: Any) -> None:
        if len(gone) < 2:
            gone.append(blob)
            raise GoneError("nobody has it any more")
        await fetch(self, blob, sources, seconds, **words)

    monkeypatch.setattr(CopyingFetcher, "fetch", too_late)
    world.run()
    await world.until_round(6)
    assert world.scout.asked == [FRIEND] * 3 and world.standing.recovered_errors == ["sync failed"] * 2
    assert world.replica.blob == theirs.blob


async def test_a_state_that_nobody_has_costs_bounded_time(worlds: RoundLoopFactory) -> None:
    world = worlds()
    await world.peer(LIAR, 6, seed=3)
    del world.fetcher.stores[LIAR]
    world.run()
    await until(lambda: world.session.is_open)
    assert world.replica.chain.round == 0 and len(world.scout.asked) == catch_up.MAX_VANISHED_STATES


async def test_who_is_the_odd_one_out_fetches_the_state_of_the_others(worlds: RoundLoopFactory) -> None:
    world = worlds()
    theirs = await world.peer_of_two(FRIEND, 2)
    world.show(LIAR, theirs.chain.head, theirs.blob.digest)
    await world.replica.install_state(theirs.chain.head, theirs.chain.log, world.replica.blob)
    assert world.replica.blob != theirs.blob and world.replica.chain.head == theirs.chain.head
    world.fetcher.stores[LIAR], world.scout.chains[LIAR] = world.fetcher.stores[FRIEND], theirs
    world.run()
    await until(lambda: world.replica.blob == theirs.blob)
    assert world.standing.failures == ["our state differed from the others'"]
    assert world.standing.recovered_errors == ["state differs"]
    assert len(world.scout.asked) == 1


async def test_a_decided_round_that_cannot_be_applied_is_tried_again(
    worlds: RoundLoopFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds()
    world.run()
    await until(lambda: world.session.is_open)
    commit = commit_of(world.replica.chain.head, {2: world.store.put(b"does not decode")})
    world.end_round(commit)
    await until(lambda: len(world.session.begun) == 2)
    assert world.replica.chain.round == 0 and "does not decode" in world.standing.failures[0]
    assert world.standing.recovered_errors == ["not applied"]
    await world.decide()


async def test_a_fault_in_the_background_ends_the_run(worlds: RoundLoopFactory) -> None:
    world = worlds()
    world.run()
    await until(lambda: world.session.is_open)
    world.inbox.fail(KeyError("a bug"))
    with pytest.raises(KeyError):
        await world.done()
