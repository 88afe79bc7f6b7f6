"""What peers without votes can do to the round loop by their records and by the chains that they show."""

from dataclasses import replace

import pytest

from node.loop.actions import ApplyCommit, FetchState, FindPath, ReportRecovered, TakeState
from node.loop.events import PathFound, StateFetched
from node.loop.peers.catch_up import MAX_AVOID_SECONDS, MIN_AVOID_SECONDS, CatchUp
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.peers.syncing import FORK_CONFIRM_SECONDS
from node.loop.round_loop import POLL_SECONDS
from protocol.blobs.blob import Blob
from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainHead
from tests.certificates import offer_of
from tests.node.loop.loop_under_test import FRIEND, ME, OTHER, STATE, LoopUnderTest, head_state, of_kind
from tests.node.small_run import PEERS, RUN_ID, certified, commit_of

NOISE = Blob.of(b"noise")
LIAR = OTHER
VOTERS = (1, 2, 4)  # ME, FRIEND and one more


def founded(rounds: int = 2) -> Chain:
    chain = Chain.from_genesis(RUN_ID)
    for number in range(rounds):
        blobs = {peer: Blob.of(f"{number} {peer}".encode()) for peer in VOTERS}
        chain.append(certified(chain, commit_of(chain.head, blobs), b"mine", VOTERS))
    return chain


def invented(chain: Chain, rounds: int = 3) -> Chain:
    """Return commits that continue a chain, with the work and the acknowledgement of one key that has no vote."""
    false = Chain(chain.head, chain.log)
    for number in range(rounds):
        commit = commit_of(false.head, {3: Blob.of(f"invented {number}".encode())})
        false.append(certified(false, commit, b"mine", signers=[3]))
    return false


def peer_on(chain: Chain) -> LoopUnderTest:
    """Return a peer that trains on a chain, with two other voters that are alive."""
    peer = LoopUnderTest()
    peer.chain.switch_to(chain.head, chain.log)
    peer.others[PEERS[4].peer_id] = PeerState(chain.head, b"mine")
    peer.meet(friend=PeerState(chain.head, b"mine"))
    peer.start()
    assert peer.loop.session.is_open
    return peer


def test_claim_of_a_long_history_ends_no_round() -> None:
    """Attacks 1 and 1b: the record claims much, and the chain that its peer shows has nothing to it."""
    chain = founded()
    for tokens in (2**59, 2**60 - 1):
        peer = peer_on(chain)
        claim = ChainHead(1000, bytes(range(32)), tokens)
        assert of_kind(FindPath, peer.meet(other=PeerState(claim, NOISE.digest))) == [FindPath(LIAR, 2)]
        assert peer.loop.session.is_open, "it asks while its round goes on"
        empty = offer_of(Chain(claim, founded(1).log.since(1)), NOISE)
        actions = peer.post(PathFound(empty))
        assert not of_kind(TakeState, actions) and not of_kind(FetchState, actions)
        assert of_kind(ReportRecovered, actions)[0].kind == "not certified"
        assert peer.loop.session.is_open and peer.chain.head == chain.head


def test_another_live_chain_is_reported_once() -> None:
    """Control: a chain that is too short to tell it from the beginning of ours is not reported."""
    ours, theirs = founded(MAX_KEPT_COMMITS + 4), Chain.from_genesis(RUN_ID)
    for count, lines in ((4, 0), (40, 1)):
        while theirs.round < count:
            theirs.append(certified(theirs, commit_of(theirs.head, {5: Blob.of(b"other")}), b"other", (5,)))
        peer, told = peer_on(ours), 0
        for _ in range(3):
            peer.meet(other=head_state(theirs))
            peer.pass_time(MAX_AVOID_SECONDS)
            actions = peer.post(PathFound(offer_of(Chain(theirs.head, theirs.log.since(count // 4)), STATE)))
            told += sum(action.kind == "split" for action in of_kind(ReportRecovered, actions))
        assert told == lines


def test_commits_without_acknowledgements_are_not_replayed() -> None:
    """Attack 1d. Control: with those of the voters they are."""
    chain = founded()
    false = invented(chain)
    peer = peer_on(chain)
    peer.meet(other=head_state(false))
    actions = peer.post(PathFound(offer_of(false, STATE)))
    assert not of_kind(ApplyCommit, actions) and peer.loop.session.is_open
    assert of_kind(ReportRecovered, actions)[0].kind == "not certified"
    true = Chain(chain.head, chain.log)
    true.append(certified(true, commit_of(true.head, {3: Blob.of(b"work")}), b"mine", VOTERS))
    peer = peer_on(chain)
    peer.meet(other=head_state(true))
    peer.pass_time(2.0)
    assert of_kind(ApplyCommit, peer.post(PathFound(offer_of(true, STATE))))


def test_true_chain_with_a_false_state_is_not_taken() -> None:
    """A liar may show the chain of the others, and noise as its state: the voters and the next certificate decide."""
    chain = founded(1)
    longer = founded(9)
    peer = peer_on(chain)
    peer.meet(friend=PeerState(longer.head, STATE.digest), other=PeerState(longer.head, NOISE.digest))
    actions = peer.post(PathFound(offer_of(longer, NOISE)))
    assert not of_kind(TakeState, actions)
    [fetch] = of_kind(FetchState, actions)
    assert fetch.state == NOISE
    actions = peer.post(StateFetched())
    assert not of_kind(TakeState, actions) and of_kind(FindPath, actions), "it looks for the next certificate"
    later = Chain(longer.head, longer.log)
    later.append(certified(later, commit_of(later.head, {1: Blob.of(b"next")}), STATE.digest, VOTERS))
    actions = peer.post(PathFound(offer_of(later, NOISE)))
    assert not of_kind(TakeState, actions) and of_kind(ReportRecovered, actions)[0].kind == "sync failed"


def test_state_that_the_next_certificate_names_is_taken() -> None:
    longer = founded(9)
    peer = peer_on(founded(1))
    later = Chain(longer.head, longer.log)
    later.append(certified(later, commit_of(later.head, {1: Blob.of(b"next")}), STATE.digest, VOTERS))
    peer.meet(friend=PeerState(later.head, b"another"))
    assert of_kind(FetchState, peer.post(PathFound(offer_of(longer, STATE))))
    peer.post(StateFetched())
    [take] = of_kind(TakeState, peer.post(PathFound(offer_of(later, NOISE))))
    assert take.state == STATE and take.offer.chain.head == longer.head


def grown(chain: Chain, signers: tuple[int, ...], rounds: int) -> Chain:
    longer = Chain(chain.head, chain.log)
    for number in range(rounds):
        blobs = {peer: Blob.of(f"{signers} {number} {peer}".encode()) for peer in signers}
        longer.append(certified(longer, commit_of(longer.head, blobs), b"mine", signers))
    return longer


@pytest.mark.parametrize("loses_rounds", [True, False])
def test_state_of_another_branch_that_nobody_confirms_costs_our_branch_seconds(loses_rounds: bool) -> None:
    """Control: a peer that is only behind has nothing to go on with, and waits for the voters to arrive there."""
    fork = founded()
    ours, theirs = grown(fork, (1, 2), 1) if loses_rounds else fork, grown(fork, (2, 4), 7)
    peer = peer_on(ours)
    peer.meet(other=PeerState(theirs.head, STATE.digest))
    assert of_kind(FetchState, peer.post(PathFound(offer_of(theirs, STATE)))) and not peer.loop.session.is_open
    peer.post(StateFetched())
    peer.pass_time(FORK_CONFIRM_SECONDS + 2 * POLL_SECONDS)
    assert peer.loop.session.is_open == loses_rounds
    assert peer.chain.head == ours.head


def test_five_keys_without_a_vote_cannot_call_a_state_wrong() -> None:
    """Attack 2. Control: without the electorate their number would decide."""
    chain = founded()
    head, voters = chain.head, chain.electorate.voters
    honest = {name: PeerState(head, b"mine") for name in voters}
    fleet = {f"sybil {number}": PeerState(head, NOISE.digest) for number in range(5)}
    snapshot = SwarmSnapshot({**honest, **fleet})
    assert not snapshot.is_outvoted(ME, head, b"mine", voters)
    assert snapshot.is_outvoted(ME, head, b"mine", frozenset()), "the control"
    assert snapshot.is_outvoted(ME, head, b"other", voters), "that of the voters is right"
    assert snapshot.state_holders(ME, head, b"other", voters) == [name for name in voters if name != ME]


def test_peer_that_cannot_show_its_chain_is_avoided_with_growing_pauses() -> None:
    catch_up = CatchUp(ME, founded(), compares_states=True)
    now, pauses = 0.0, []
    for _ in range(9):
        catch_up.avoid(LIAR, now)
        before, now = now, catch_up.next_deadline(now) or now
        pauses.append(now - before)
    assert pauses[:3] == [MIN_AVOID_SECONDS, 2 * MIN_AVOID_SECONDS, 4 * MIN_AVOID_SECONDS]
    assert pauses[-1] == MAX_AVOID_SECONDS
    catch_up.succeeded(LIAR)
    catch_up.avoid(LIAR, now)
    assert catch_up.avoided(now) == {LIAR} and not catch_up.avoided(now + MIN_AVOID_SECONDS)


def test_liar_is_asked_after_the_voters() -> None:
    chain = founded()
    longer = founded(9)
    peer = LoopUnderTest()
    peer.chain.switch_to(chain.head, chain.log)
    peer.others[PEERS[4].peer_id] = head_state(longer)
    claim = PeerState(replace(longer.head, round=1000, digest=bytes(32), tokens=2**59), NOISE.digest)
    peer.meet(friend=head_state(longer), other=claim)
    [find] = of_kind(FindPath, peer.start())
    assert find.peer in (FRIEND, PEERS[4].peer_id)
