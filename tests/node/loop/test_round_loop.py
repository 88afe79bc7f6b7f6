"""The round loop as a pure function: events in, actions out, no clock but the one that the test passes in."""

from dataclasses import replace
from typing import Any

import pytest

from node.loop.actions import (
    AdoptState,
    AdvanceState,
    ApplyCommit,
    FindPath,
    LeaveRun,
    LoopAction,
    PublishHead,
    ReportMissed,
    ReportPhase,
    ReportRecovered,
    RestTrainer,
    StartTrainer,
    TakeState,
    TargetReached,
)
from node.loop.contributions import StoredContribution
from node.loop.events import (
    ApplyFailed,
    CommitApplied,
    CommitComputed,
    ContributionReady,
    HeadPublished,
    MessagesReceived,
    NodeLeaving,
    PathFound,
    RevisionsChanged,
    Started,
    StateInstalled,
    SwarmChanged,
    SyncFailed,
    TimePassed,
    TrainerStarted,
    VotePersisted,
)
from node.loop.options import SyncOptions
from node.loop.peers.catch_up import MIN_AVOID_SECONDS, SYNC_AFTER_SECONDS
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.peers.syncing import Syncing
from node.loop.round_loop import POLL_SECONDS
from node.trainer.ipc.channel import ContributionHeader
from protocol.blobs.blob import Blob
from protocol.consensus.chain import CertifiedCommit, Chain, ChainHead
from protocol.consensus.events import Send, VoteRecord
from protocol.consensus.messages.contributions import Adoption
from tests.certificates import offer_of
from tests.node.loop.loop_under_test import BLOB, FRIEND, ME, STATE, LoopUnderTest, chain_of, head_state, of_kind
from tests.node.loop.test_steering import signed_revision
from tests.node.small_run import PEERS, RUN_ID, certified, commit_of, contribution_of, stated


def test_trainer_starts_before_the_first_round_opens() -> None:
    peer = LoopUnderTest()
    peer.meet()
    assert of_kind(StartTrainer, peer.post(Started())) == [StartTrainer()] and not peer.loop.session.is_open
    peer.post(TrainerStarted())
    assert peer.loop.session.is_open and peer.loop.session.number == 0


def test_newcomer_with_contacts_waits_for_a_record() -> None:
    peer = LoopUnderTest(has_contacts=True)
    peer.meet()
    assert not of_kind(StartTrainer, peer.post(Started()))
    assert of_kind(StartTrainer, peer.meet(friend=PeerState(peer.chain.head)))


def test_run_begins_with_enough_peers_and_goes_on_with_fewer() -> None:
    peer = LoopUnderTest(min_peers=2, expiry=10.0)
    peer.start()
    assert not peer.loop.session.is_open
    peer.pass_time(11.0)
    assert not peer.loop.session.is_open, "the run has not begun"
    peer.meet(friend=PeerState(peer.chain.head))
    assert peer.loop.session.is_open
    resumed = LoopUnderTest(min_peers=2, expiry=10.0)
    resumed.chain.append(chain_of(1)[1][0])
    resumed.start()
    assert not resumed.loop.session.is_open and resumed.loop.next_deadline(0.0) == 10.0
    resumed.pass_time(10.0)
    assert resumed.loop.session.is_open


def test_who_comes_back_beside_another_trainer_goes_on_at_once() -> None:
    """The others may wait for its vote. The control, alone, is above."""
    peer = LoopUnderTest(min_peers=3, expiry=10.0)
    peer.chain.append(chain_of(1)[1][0])
    peer.meet(friend=PeerState(peer.chain.head))
    peer.start()
    assert peer.loop.session.is_open


def test_first_round_waits_for_trainers_that_are_ready() -> None:
    """Control: later rounds do not."""
    peer = LoopUnderTest(min_peers=2, expiry=10.0)
    peer.start()
    peer.meet(friend=PeerState(peer.chain.head, is_resting=True))
    peer.pass_time(11.0)
    assert not peer.loop.session.is_open, "its trainer still starts"
    peer.meet(friend=PeerState(peer.chain.head))
    assert peer.loop.session.is_open
    resumed = LoopUnderTest(min_peers=2, expiry=10.0)
    resumed.chain.append(chain_of(1)[1][0])
    resumed.start()
    resumed.meet(friend=PeerState(resumed.chain.head, is_resting=True))
    assert resumed.loop.session.is_open


def decided(peer: LoopUnderTest) -> CertifiedCommit:
    """Let the peer's own round end: it is alone, and decides by itself. Return the commit."""
    header = ContributionHeader(round=peer.chain.round, sizes=(BLOB.size,), tokens=100, steps=10, loss=1.0)
    peer.contributions.submit(StoredContribution(header, (BLOB,)))
    actions = peer.post(ContributionReady())
    for _ in range(10):
        if applies := of_kind(ApplyCommit, actions):
            return applies[0].commit  # type: ignore[no-any-return]
        votes = of_kind(VoteRecord, actions)
        actions = peer.post(VotePersisted()) if votes else peer.pass_time(0.5)
    raise AssertionError("nothing was decided")


def test_a_round_is_applied_then_published_then_the_next_one_opens() -> None:
    peer = LoopUnderTest()
    peer.start()
    commit = decided(peer)
    assert not peer.loop.session.is_open
    [advance] = of_kind(AdvanceState, peer.post(CommitComputed(commit.body.contributions)))
    assert advance.verdict.outcome == "included" and peer.contributions.pending is None
    peer.chain.append(commit)
    [publish] = of_kind(PublishHead, peer.post(CommitApplied(b"next")))
    assert publish.contributions == commit.body.contributions and peer.loop.state == b"next"
    assert not peer.loop.session.is_open, "the head is not published yet"
    peer.post(HeadPublished())
    assert peer.loop.session.is_open and peer.loop.session.number == 1


def test_nothing_leaves_behind_a_vote_that_is_not_on_disk() -> None:
    peer = LoopUnderTest()
    peer.meet(friend=PeerState(peer.chain.head))
    peer.start()
    header = ContributionHeader(round=0, sizes=(BLOB.size,), tokens=100, steps=10, loss=1.0)
    peer.contributions.submit(StoredContribution(header, (BLOB,)))
    actions = peer.post(ContributionReady())
    theirs = stated(PEERS[2], contribution_of(peer.chain.head, [Blob.of(b"theirs")]))
    actions += peer.post(MessagesReceived(FRIEND, (theirs,)))
    for _ in range(8):
        actions += peer.pass_time(0.5)
    assert len(of_kind(VoteRecord, actions)) == 1
    place = next(place for place, action in enumerate(actions) if isinstance(action, VoteRecord))
    assert not of_kind(Send, actions[place:]) and peer.loop.session.is_persisting
    assert of_kind(Send, peer.post(VotePersisted()))


def test_a_round_that_cannot_be_applied_is_opened_again_after_a_while() -> None:
    peer = LoopUnderTest()
    peer.start()
    decided(peer)
    actions = peer.post(ApplyFailed("nobody has it"))
    assert of_kind(ReportMissed, actions) and of_kind(ReportRecovered, actions)[0].kind == "not applied"
    assert peer.contributions.pending is not None, "it is not settled"
    assert not peer.loop.session.is_open and peer.loop.next_deadline(peer.now) == peer.now + POLL_SECONDS
    peer.pass_time(POLL_SECONDS)
    assert peer.loop.session.is_open and peer.loop.session.number == 0


def test_target_ends_the_loop() -> None:
    peer = LoopUnderTest(target_rounds=1)
    peer.start()
    actions = peer.apply(decided(peer))
    assert of_kind(TargetReached, actions) and peer.loop.is_done and not peer.loop.session.is_open
    assert peer.loop.next_deadline(peer.now) is None


def test_newcomer_to_a_run_that_is_over_ends_without_a_trainer() -> None:
    peer = LoopUnderTest(target_rounds=2, has_contacts=True, keepers=1)
    peer.post(Started())
    final = chain_of(2)[0].head
    actions = peer.meet(friend=PeerState(final, b"theirs", is_trainer=False))
    assert of_kind(TargetReached, actions) == [TargetReached(final, is_ours=False)] and of_kind(LeaveRun, actions)
    assert not of_kind(StartTrainer, actions) and not of_kind(FindPath, actions) and peer.loop.is_done


def test_one_claim_does_not_end_a_run_that_others_train() -> None:
    peer = LoopUnderTest(target_rounds=2, has_contacts=True)
    peer.post(Started())
    young, liar = chain_of(1)[0], PeerState(chain_of(2, peer=3)[0].head, b"theirs")
    actions = peer.meet(friend=head_state(young), other=liar)
    assert not of_kind(TargetReached, actions) and of_kind(FindPath, actions), "it joins"


def test_newcomer_takes_the_state_of_a_host_that_has_no_blobs_to_replay() -> None:
    def follow(is_trainer: bool) -> list[LoopAction]:
        peer = LoopUnderTest()
        peer.meet(friend=PeerState(chain_of(2)[0].head, STATE.digest, is_trainer=is_trainer))
        assert of_kind(FindPath, peer.post(Started())) == [FindPath(FRIEND, 0)]
        return peer.post(PathFound(offer_of(chain_of(2)[0], STATE, word=True)))

    assert of_kind(TakeState, follow(is_trainer=False)) and of_kind(ApplyCommit, follow(is_trainer=True))


def test_joiner_trains_once_it_holds_the_state_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that is ready serves its stage of a pipeline. The control starts it with the initial weights."""

    def join() -> tuple[LoopUnderTest, list[LoopAction]]:
        peer = LoopUnderTest()
        peer.meet(friend=PeerState(chain_of(2)[0].head, STATE.digest, is_trainer=False))
        return peer, peer.post(Started())

    peer, actions = join()
    actions += peer.post(PathFound(offer_of(chain_of(2)[0], STATE, word=True)))
    assert of_kind(TakeState, actions) and not of_kind(StartTrainer, actions)
    peer.chain.switch_to(chain_of(2)[0].head, chain_of(2)[0].log)
    assert of_kind(StartTrainer, peer.post(StateInstalled(STATE.digest), HeadPublished()))
    monkeypatch.setattr(Syncing, "is_behind", lambda self, now: False)
    assert of_kind(StartTrainer, join()[1])


def test_restarted_peer_of_a_run_that_is_over_starts_no_trainer() -> None:
    peer = LoopUnderTest(target_rounds=1, has_contacts=True, expiry=3.0, keepers=1)
    peer.chain.append(chain_of(1)[1][0])
    peer.meet()
    actions = peer.post(Started())
    assert of_kind(TargetReached, actions) == [TargetReached(peer.chain.head, is_ours=True)]
    assert not of_kind(StartTrainer, actions) and not of_kind(LeaveRun, actions)
    assert of_kind(LeaveRun, peer.pass_time(3.0)), "nobody is there"


def test_last_peer_stays_until_a_host_has_the_final_state() -> None:
    peer = LoopUnderTest(target_rounds=1, has_contacts=True, keepers=1)
    peer.meet(friend=PeerState(None, is_trainer=False))
    peer.post(Started(), TrainerStarted())
    actions = peer.apply(decided(peer))
    assert of_kind(TargetReached, actions) and not of_kind(LeaveRun, actions)
    assert of_kind(ReportPhase, actions)[-1].reason.endswith("until 1 other machine holds the final model")
    peer.post(NodeLeaving())  # the daemon has stopped the trainer and saved
    assert of_kind(LeaveRun, peer.meet(friend=PeerState(peer.chain.head, peer.loop.state, is_trainer=False)))


def test_one_round_behind_it_asks_while_its_round_goes_on() -> None:
    peer = LoopUnderTest()
    peer.start()
    actions = peer.meet(friend=head_state(chain_of(1)[0]))
    assert not of_kind(FindPath, actions), "the commit may come by itself"
    assert of_kind(FindPath, peer.pass_time(SYNC_AFTER_SECONDS)) == [FindPath(FRIEND, 0)]
    assert peer.loop.session.is_open and not peer.loop.is_syncing


def test_missed_rounds_are_replayed_one_by_one() -> None:
    peer = LoopUnderTest()
    peer.start()
    theirs, commits = chain_of(2)
    [find] = of_kind(FindPath, peer.meet(friend=head_state(theirs)))
    assert find == FindPath(FRIEND, 0) and peer.loop.session.is_open
    actions = peer.post(PathFound(offer_of(theirs, STATE)))
    assert peer.loop.is_syncing and not peer.loop.session.is_open
    assert [action.commit for action in of_kind(ApplyCommit, actions)] == commits[:1]
    assert [action.commit for action in of_kind(ApplyCommit, peer.apply(commits[0]))] == commits[1:]
    peer.apply(commits[1])
    assert not peer.loop.is_syncing and peer.loop.session.is_open and peer.loop.session.number == 2


def test_replay_ends_where_the_certificates_name_another_state_than_ours() -> None:
    peer = LoopUnderTest()
    peer.start()
    theirs, commits = chain_of(2)
    peer.meet(friend=head_state(theirs))
    peer.post(PathFound(offer_of(theirs, STATE)))
    peer.loop.handle(CommitComputed(commits[0].body.contributions), peer.now)
    peer.chain.append(commits[0])
    actions = peer.post(CommitApplied(b"another"), HeadPublished())
    assert not of_kind(ApplyCommit, actions) and of_kind(ReportRecovered, actions)[0].kind == "sync failed"
    assert not peer.loop.is_syncing


def test_a_state_is_taken_where_replay_fails_and_its_peer_avoided_where_that_fails_too() -> None:
    peer = LoopUnderTest()
    peer.start()
    theirs, _ = chain_of(2)
    peer.meet(friend=head_state(theirs))
    peer.post(PathFound(offer_of(theirs, STATE)))
    peer.post(ApplyFailed("the blobs are gone"))
    assert of_kind(FindPath, peer.pass_time(POLL_SECONDS)) == [FindPath(FRIEND, 0)]
    [take] = of_kind(TakeState, peer.post(PathFound(offer_of(theirs, STATE))))
    assert take.holders == (FRIEND,)
    assert not of_kind(FindPath, peer.post(SyncFailed("it does not come")))
    peer.pass_time(POLL_SECONDS)
    assert peer.loop.session.is_open, "nobody is left to follow"
    assert of_kind(FindPath, peer.pass_time(MIN_AVOID_SECONDS)) == [FindPath(FRIEND, 0)]


def test_a_state_that_vanished_meanwhile_is_looked_for_again_at_once() -> None:
    peer = LoopUnderTest()
    peer.start()
    theirs, _ = chain_of(9)
    peer.meet(friend=head_state(theirs))
    assert of_kind(TakeState, peer.post(PathFound(offer_of(theirs, STATE))))
    assert of_kind(FindPath, peer.post(SyncFailed("gone", has_vanished=True))) == [FindPath(FRIEND, 0)]


def test_taking_over_a_state_settles_contributions_before_the_trainer_hears_of_it() -> None:
    peer = LoopUnderTest()
    peer.start()
    header = ContributionHeader(round=0, sizes=(BLOB.size,), tokens=100, steps=10, loss=1.0)
    peer.contributions.submit(StoredContribution(header, (BLOB,)))
    theirs = Chain.from_genesis(RUN_ID)
    theirs.append(certified(theirs, commit_of(theirs.head, {1: BLOB}), b"other", signers=[1, 2]))
    theirs.append(certified(theirs, commit_of(theirs.head, {2: Blob.of(b"later")}), b"other", signers=[1, 2]))
    peer.meet(friend=head_state(theirs))
    peer.post(PathFound(offer_of(theirs, STATE)))
    peer.chain.switch_to(theirs.head, theirs.log)
    [adopt] = of_kind(AdoptState, peer.post(StateInstalled(STATE.digest)))
    assert adopt.verdict.outcome == "included" and adopt.skipped == 2 and len(adopt.commits) == 2
    assert not peer.loop.session.is_open, "the state is not on disk yet"
    peer.post(HeadPublished())
    assert peer.loop.session.is_open and peer.loop.session.number == 2


def test_an_outvoted_state_is_replaced_by_that_of_the_voters() -> None:
    peer = LoopUnderTest()
    peer.start()
    same_head = PeerState(peer.chain.head, STATE.digest)
    assert not of_kind(FindPath, peer.meet(friend=PeerState(peer.chain.head, b"mine")))
    actions = peer.meet(friend=same_head, other=same_head)
    assert of_kind(FindPath, actions) and of_kind(ReportRecovered, actions)[0].kind == "state differs"
    assert of_kind(TakeState, peer.post(PathFound(offer_of(peer.chain, STATE))))
    groups = LoopUnderTest(sync=SyncOptions(compares_states=False))
    groups.start()
    assert not of_kind(FindPath, groups.meet(friend=same_head, other=same_head)), "each peer has a state of its own"


def test_results_that_come_after_the_end_change_nothing() -> None:
    peer = LoopUnderTest()
    peer.start()
    commit = decided(peer)
    peer.post(NodeLeaving())
    assert peer.post(CommitComputed(commit.body.contributions), HeadPublished(), TimePassed()) == []
    assert peer.contributions.pending is not None and peer.loop.is_done


def test_the_same_events_give_the_same_actions() -> None:
    def run() -> list[type[Any]]:
        peer = LoopUnderTest(target_rounds=1)
        actions = peer.start()
        return [type(action) for action in [*actions, *peer.apply(decided(peer))]]

    assert run() == run()


def test_a_head_of_no_peer_is_nowhere_to_go() -> None:
    peer = LoopUnderTest()
    peer.start()
    assert not of_kind(FindPath, peer.meet(friend=PeerState(None)))
    better = PeerState(ChainHead(5, bytes(32), 10**6), is_trainer=False)
    assert of_kind(FindPath, peer.meet(friend=better)), "observers show the way too"


def test_state_of_a_chain_is_not_taken_without_the_revisions_that_the_chain_has_adopted() -> None:
    revision = signed_revision((), 0, target__rounds=500)
    for sent, is_taken in (((), False), ((revision,), True)):
        peer = LoopUnderTest()
        peer.start()
        chain = chain_of(8)[0]
        commit = commit_of(chain.head, {2: Blob.of(b"last")})
        body = replace(commit.body, adoption=Adoption(revision.digest, (revision,)))
        chain.append(certified(chain, stated(PEERS[0], body), b"next"))
        assert of_kind(FindPath, peer.meet(friend=head_state(chain)))
        actions = peer.post(PathFound(replace(offer_of(chain, STATE), revisions=sent)))
        assert bool(of_kind(TakeState, actions)) == is_taken
        reasons = [action.line for action in of_kind(ReportRecovered, actions)]
        assert is_taken or "revisions of the organiser that are not known here" in reasons[0]


def test_paused_stage_serves_on_until_the_other_stages_have_reached_the_pause() -> None:
    """Its trainer computes what the others need for their last round. Control: nobody is behind, and it rests."""
    for other_stages, phase in ((-1, "waiting for peers"), (0, "paused")):
        peer = LoopUnderTest()
        pause = signed_revision((), 0, paused=True)
        peer.log.add(pause)
        peer.start()
        peer.loop.session.close()
        peer.chain.switch_to(replace(peer.chain.head, revision=pause.digest), peer.chain.log)
        seen = SwarmSnapshot({ME: PeerState(peer.chain.head, peer.loop.state)}, other_stages=other_stages)
        actions = [*peer.post(SwarmChanged(seen)), *peer.pass_time(1.0)]
        assert bool(of_kind(RestTrainer, actions)) == (phase == "paused") and not peer.loop.session.is_open
        assert of_kind(ReportPhase, actions)[-1].phase == phase


def test_paused_run_opens_no_round_and_goes_on_with_the_news() -> None:
    peer = LoopUnderTest()
    pause = signed_revision((), 0, paused=True)
    peer.log.add(pause)
    assert not of_kind(RestTrainer, peer.start()) and peer.loop.session.is_open, "no commit has adopted it"
    peer.loop.session.close()
    peer.chain.switch_to(replace(peer.chain.head, revision=pause.digest), peer.chain.log)
    actions = peer.pass_time(1.0)
    assert of_kind(RestTrainer, actions) == [RestTrainer(is_resting=True)] and not peer.loop.session.is_open
    assert of_kind(ReportPhase, actions)[-1].phase == "paused"
    peer.log.add(signed_revision((pause,), 0, paused=False))
    actions = peer.post(RevisionsChanged())
    assert of_kind(RestTrainer, actions) == [RestTrainer(is_resting=False)] and peer.loop.session.is_open
