"""No round is decided twice: a leader of a later view shows what binds the members, and proposes it again."""

from dataclasses import replace
from typing import Any

import pytest

from protocol import murmur_pb2 as wire
from protocol.conduct import Conduct, Proof, excludes
from protocol.consensus import acceptance, machine
from protocol.consensus.events import MembershipChanged, MessageReceived, Send, VoteRecord
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.leader import Leader
from protocol.consensus.locks import Bounds, Vote, required_contents
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.kinds import Acknowledgement, Justification
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.quorum import VoterSet
from protocol.consensus.settings import RoundStart
from protocol.consensus.state import RoundState
from protocol.electorate import Electorate
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.sections import AdmissionSection
from tests.protocol.consensus.cluster import BASE, Cluster, Drop
from tests.protocol.consensus.test_knowledge import entries_of, signed_message
from tests.simulation.virtual.network import NAMES, make_signer

ENTRIES = entries_of(Cluster(4, "gather"), NAMES[:4])
TRUSTED_FIVE = Electorate.at_genesis(AdmissionSection(mode="list", keys=tuple(NAMES[:5]), trusted=True))
X, Y = Vote(b"x" * 32, 0, b"X" * 32), Vote(b"y" * 32, 0, b"Y" * 32)
LATER = Vote(b"l" * 32, 1, b"Y" * 32)
NOTHING = Bounds()


def commit_of(count: int) -> SignedMessage[Commit]:
    body = Commit(0, 0, BASE, ENTRIES[:count], ())
    return SignedMessage.of(signed_message(NAMES[0], body).signed, body)


def vote_of(author: PeerId, body: Acknowledgement) -> SignedMessage[Acknowledgement]:
    return SignedMessage.of(signed_message(author, body).signed, body)


@pytest.mark.parametrize(
    ("promises", "required"),
    [
        ([NOTHING] * 3, None),
        ([Bounds(X), Bounds(X), NOTHING], {X.content}),  # all four may have acknowledged X
        ([Bounds(X), Bounds(Y), NOTHING], None),  # neither can have the votes of all
        ([Bounds(X), Bounds(Y), Bounds(Y)], {Y.content}),
        ([Bounds(X, X), Bounds(Y), Bounds(Y)], {X.content}),  # a quorum acknowledged X in that view
        ([Bounds(X, X), Bounds(LATER), Bounds(LATER)], {Y.content}),  # only after promises without the lock of X
        ([Bounds(LATER, X), NOTHING, Bounds(LATER, LATER)], {Y.content}),
    ],
)
def test_leader_repeats_what_may_be_decided(promises: list[Bounds], required: set[bytes] | None) -> None:
    assert required_contents(promises, tolerated=1) == required


FORGETFUL: set[PeerId] = set()


class Round:
    """A round whose decision reaches nobody, or one peer, before the leader of the next view forgets it.

    With two liars among seven, the first leader lies too: it shows its decision to one victim. Alone among four, the
    liar waits until an honest leader is slow.
    """

    def __init__(self, peers: int, liars: int) -> None:
        self.table = Cluster(peers, "gather")
        self.first = self.table.names[0]
        others = frozenset(self.table.names[1:])
        second = self.table.machines[self.first]._state.election.leader(1, others)
        assert second is not None
        self.second, self.victim = second, min(others - {second})
        self.liars = {self.second, self.first} if liars > 1 else {self.second}
        self.away = {self.first, self.victim} if liars > 1 else {self.first}

    def play(self) -> set[bytes]:
        """Return what honest peers decide while the peers that know of the decision are cut off."""
        table = self.table
        FORGETFUL.add(self.second)
        table.drop = lambda sender, receiver, kind: kind == "decision" and receiver not in self.away
        table.contribute(*table.names)
        assert table.commit(self.first) is not None
        table.drop = lambda sender, receiver, kind: not self.away.isdisjoint((sender, receiver))
        table.elapse(40.0)
        return self.decisions()

    def decisions(self) -> set[bytes]:
        found = (self.table.commit(name) for name in self.table.names if name not in self.liars)
        return {commit.content_digest for commit in found if commit is not None}

    def shown_by(self, kind: str, view: int) -> list[SignedMessage[Any]]:
        """Return the messages of a kind that were sent in a view."""
        sent = (action.signed for _, action in self.table.log if isinstance(action, Send))
        found = {signed.signature: self.table.network.open(signed) for signed in sent if signed.kind == kind}
        return [message for message in found.values() if message.body.view == view]


@pytest.fixture(autouse=True)
def _liars_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leaders in FORGETFUL propose one contribution fewer, whatever binds the members."""
    FORGETFUL.clear()
    next_proposal = Leader.next_proposal
    locked = Leader.locked_proposal

    def propose(self: Leader, now: float) -> object:
        proposal = next_proposal(self, now)
        if proposal is None or self._knowledge.me not in FORGETFUL or not self._view.ballot.view:
            return proposal
        return proposal._replace(contributions=proposal.contributions[:-1])

    def recall(self: Leader) -> SignedMessage[Commit] | None:
        return None if self._knowledge.me in FORGETFUL else locked(self)

    monkeypatch.setattr(Leader, "next_proposal", propose)
    monkeypatch.setattr(Leader, "locked_proposal", recall)


def decides_in_one_phase(patch: pytest.MonkeyPatch) -> None:
    """Restore the rule of before: a quorum acknowledges, and a leader is believed."""
    patch.setattr(VoterSet, "tolerated", property(lambda self: 0))


@pytest.mark.parametrize(("peers", "liars"), [(4, 1), (7, 2)])
def test_leader_that_forgets_a_decision_makes_no_second_one(peers: int, liars: int) -> None:
    story = Round(peers, liars)
    assert len(story.play()) == 1
    witnesses = set(story.table.names) - story.liars - story.away
    for name in witnesses:
        assert (story.second, "forgets a decision") in story.table.rejections_by(name)
        assert story.table.commit(name) is not None, "a later leader repeats what was decided"


@pytest.mark.parametrize(("peers", "liars"), [(4, 1), (7, 2)])
def test_control_in_one_phase_it_makes_a_second_decision(
    peers: int, liars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decides_in_one_phase(monkeypatch)
    assert len(Round(peers, liars).play()) == 2


def forgetful_statements() -> tuple[SignedMessage[Commit], SignedMessage[Justification]]:
    """Return the commit of a leader that forgets, and the promises that it showed."""
    story = Round(4, 1)
    story.play()
    (commit,), (shown,) = (
        [message for message in story.shown_by(kind, 1) if message.sender == story.second]
        for kind in ("commit", "justification")
    )
    return commit, shown


def open_nested(signed: wire.Signed) -> SignedMessage[Any]:
    return Cluster(4, "gather").network.open(signed)


def test_anybody_can_check_that_a_leader_forgot_a_decision() -> None:
    commit, shown = forgetful_statements()
    for messages in ((commit, shown), (shown, commit)):
        conduct = Conduct(NAMES[7])
        (proof,) = [proof for message in messages for proof in conduct.observe(message, 0)]
        assert proof.culprit == commit.sender and conduct.is_excluded(commit.sender)
        assert "forgets what may be decided" in proof.describe()
        terms = Cluster(4, "gather").scenario.terms()
        opened = Proof.from_wire(proof.to_wire(), terms, open_nested)
        assert opened == proof


def test_promises_prove_nothing_about_a_commit_that_repeats_the_decision_or_another_one() -> None:
    commit, shown = forgetful_statements()
    honest = signed_message(commit.sender, replace(commit.body, contributions=ENTRIES))
    assert not excludes(honest, shown)
    assert not excludes(commit, signed_message(commit.sender, replace(shown.body, proposal=honest.digest)))
    assert not excludes(commit, signed_message(NAMES[7], shown.body))
    unbound = tuple(signed_message(entry.sender, replace(entry.body, bounds=NOTHING)) for entry in shown.body.promises)
    assert not excludes(commit, signed_message(commit.sender, replace(shown.body, promises=unbound)))


def test_commit_of_a_later_view_without_promises_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "build_justification", lambda state, proposal: None)
    story = Round(4, 1)
    assert len(story.play()) == 1
    votes = story.shown_by("acknowledgement", 1)
    assert not votes, "nobody believes the leader of view 1"


def test_promises_of_too_few_voters_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    build = acceptance.build_justification

    def shorten(*given: Any) -> Justification | None:
        body = build(*given)
        return body and replace(body, promises=body.promises[:2])

    monkeypatch.setattr(machine, "build_justification", shorten)
    story = Round(4, 1)
    story.play()
    assert not story.shown_by("acknowledgement", 1)


def test_promise_names_what_its_sender_acknowledged_before() -> None:
    story = Round(4, 1)
    story.play()
    (decided,) = story.shown_by("commit", 0)
    promises = story.shown_by("promise", 1)
    assert len(promises) == 2  # the leader's own is in its justification
    assert {entry.body.bounds.acknowledged for entry in promises} == {Vote.of(decided)}


def slow_round(lost: int) -> tuple[Cluster, PeerId]:
    """Let the acknowledgements of some voters get lost."""
    table = Cluster(4, "gather")
    leader, *others = table.names
    late = others[:lost]
    table.drop = lambda sender, receiver, kind: kind == "acknowledgement" and sender in late
    table.contribute(*table.names)
    return table, leader


def sent(table: Cluster, kind: str) -> list[SignedMessage[Any]]:
    found = (action.signed for _, action in table.log if isinstance(action, Send) and action.signed.kind == kind)
    return [table.network.open(signed) for signed in found]


def confirmers(table: Cluster) -> set[PeerId]:
    return {vote.sender for vote in sent(table, "acknowledgement") if vote.body.confirms}


def test_round_takes_one_phase_while_all_acknowledge() -> None:
    table, leader = slow_round(lost=0)
    assert table.commit(leader) is not None
    assert not any(message.body.confirms for message in sent(table, "acknowledgement"))
    decided = table.machines[leader].decided
    assert decided is not None and len(decided.signers) == 4 and not decided.certificate.confirms
    assert not sent(table, "promise") and not sent(table, "justification")


def test_quorum_confirms_where_an_acknowledgement_is_missing() -> None:
    table, leader = slow_round(lost=1)
    assert table.commit(leader) is None
    table.elapse(1.0)
    table.deliver_all()
    assert len(table.included_peers()) == 1 and table.commit(leader) is not None
    decided = table.machines[leader].decided
    assert decided is not None and decided.certificate.confirms and len(decided.signers) == 3


def test_acknowledgements_of_a_quorum_alone_decide_nothing() -> None:
    table = Cluster(4, "gather")
    leader, late, *_ = table.names
    table.drop = lambda sender, receiver, kind: kind == "decision" or (kind == "acknowledgement" and sender == late)
    table.contribute(*table.names)
    table.elapse(1.0)
    assert table.included_peers() == set()


def test_lock_is_on_disk_before_it_is_confirmed_and_outlives_a_restart() -> None:
    table, leader = slow_round(lost=1)
    table.elapse(1.0)
    name = next(peer for peer in table.names if peer != leader and peer in confirmers(table))
    actions = [action for peer, action in table.log if peer == name]
    confirmation = next(
        place
        for place, action in enumerate(actions)
        if isinstance(action, Send)
        and action.signed.kind == "acknowledgement"
        and table.network.open(action.signed).body.confirms
    )
    record = next(action for action in reversed(actions[:confirmation]) if isinstance(action, VoteRecord))
    assert record.confirmed is not None and record.confirmed.proposal == record.lock
    start = RoundStart(0, BASE, last_vote=record)
    again = RoundMachine(table.scenario.settings(), name, start, make_signer(name), table.now)
    (vote,) = [again._state.bounds]
    assert vote == Bounds(Vote.of(record.lock), Vote.of(record.lock)) and again.view == 1
    assert record.confirmed.certificate in again._state.binding_messages


def test_member_confirms_nothing_of_an_earlier_view() -> None:
    table = Cluster(4, "gather")
    leader, late, *_ = table.names
    kept: list[SignedMessage[Any]] = []
    table.drop = lambda sender, receiver, kind: kind == "decision" or (kind == "acknowledgement" and sender == late)
    table.contribute(*table.names)
    table.elapse(0.4)
    kept += sent(table, "decision")
    table.drop = lambda sender, receiver, kind: leader in (sender, receiver)
    table.elapse(12.0)
    member = next(name for name in table.names[1:] if table.machines[name].view > 0)
    before = len(sent(table, "acknowledgement"))
    for message in kept:
        table.feed_event(member, MessageReceived(message))
    assert all(vote.body.view for vote in sent(table, "acknowledgement")[before:])


def test_malformed_justifications_are_refused() -> None:
    _, shown = forgetful_statements()
    body, terms = shown.body, Cluster(4, "gather").scenario.terms()
    foreign = signed_message(body.promises[0].sender, replace(body.promises[0].body, view=2))
    confirmed = Bounds(body.bounds[0].acknowledged, body.bounds[0].acknowledged)
    unlocked = signed_message(body.promises[0].sender, replace(body.promises[0].body, bounds=confirmed))
    for promises in (
        body.promises[::-1],
        (body.promises[0],) * 2,
        (foreign, *body.promises[1:]),
        (unlocked, *body.promises[1:]),  # without the certificate of what it says is confirmed
    ):
        with pytest.raises(MalformedError):
            Justification.from_wire(replace(body, promises=promises).to_wire(), terms, open_nested)
    assert Justification.from_wire(body.to_wire(), terms, open_nested) == body


def test_vote_that_says_something_false_about_its_proposal_is_not_counted() -> None:
    knowledge, proposal = RoundKnowledge(NAMES[5]), commit_of(3)
    knowledge.learn_proposal(proposal)
    true = Acknowledgement.of(proposal, Acknowledgement(0, 0, proposal.digest).basis)
    for false in (replace(true, content=b"c" * 32), replace(true, view=1)):
        knowledge.learn_acknowledgement(vote_of(NAMES[1], false))
    assert not knowledge.acknowledgements[proposal.digest]
    knowledge.learn_acknowledgement(vote_of(NAMES[1], true))
    assert knowledge.acknowledgements[proposal.digest].keys() == {NAMES[1]}


def test_proposal_of_an_excluded_key_binds_whoever_acknowledged_it() -> None:
    knowledge, commit = RoundKnowledge(NAMES[1]), commit_of(3)
    assert not knowledge.is_lock(commit.digest)
    knowledge.learn_acknowledgement(vote_of(NAMES[2], Acknowledgement(0, 0, commit.digest)))
    assert knowledge.is_lock(commit.digest)


def silence(voter: PeerId) -> Drop:
    return lambda sender, receiver, kind: kind == "acknowledgement" and sender == voter


def test_three_voters_and_trusted_lists_decide_in_one_phase() -> None:
    for table in (Cluster(3, "gather"), Cluster(5, "gather", electorate=TRUSTED_FIVE)):
        leader, late, *_ = table.names
        table.drop = silence(late)
        table.contribute(*table.names)
        decided = table.machines[leader].decided
        assert decided is not None and not decided.certificate.confirms


def doubt(table: Cluster, member: PeerId, key: PeerId) -> None:
    """Let a member exclude a key by its own sums alone."""
    others, keys = frozenset(table.names) - {key}, frozenset({key})
    table.feed_event(member, MembershipChanged(others, departed=keys, excluded=keys, doubted=keys))


def test_member_follows_rosters_that_list_a_key_which_it_alone_excludes_and_lists_it_on_none() -> None:
    """Otherwise a round that needs all honest voters would stand still."""
    table = Cluster(4, "gather")
    leader, member, liar, _ = table.names
    doubt(table, member, liar)
    table.drop = lambda sender, receiver, kind: kind == "commit"
    table.contribute(*table.names)
    listed = acceptance.build_roster(table.machines[member]._state).by_sender
    assert liar not in listed and leader in listed
    table.drop = lambda sender, receiver, kind: False
    table.elapse(1.0)
    assert (leader, "unknown contributor") not in table.rejections_by(member)
    assert member in {vote.sender for vote in sent(table, "acknowledgement")}


def test_control_member_refuses_rosters_with_a_key_that_a_proof_excludes() -> None:
    table = Cluster(4, "gather")
    leader, member, liar, _ = table.names
    excluded = frozenset({liar})
    live = frozenset(table.names) - excluded
    table.feed_event(member, MembershipChanged(live, departed=excluded, excluded=excluded))
    table.contribute(*table.names)
    assert (leader, "unknown contributor") in table.rejections_by(member)


def lacking_round() -> tuple[Cluster, PeerId, PeerId]:
    """Let one of four members lack a blob, and another one acknowledge, but never confirm."""
    table = Cluster(4, "gather")
    leader, member, silent, _ = table.names
    blobs = {blob.digest for blob in table.blobs_of_contribution(leader)}
    table.is_slow = lambda peer, digest: peer == member and digest in blobs

    def drop(sender: PeerId, receiver: PeerId, kind: str) -> bool:
        return sender == silent and kind == "acknowledgement" and bool(sent(table, "decision"))

    table.drop = drop
    table.contribute(*table.names)
    table.elapse(4.0)
    return table, leader, member


def test_member_that_has_not_acknowledged_confirms_what_a_quorum_has() -> None:
    table, leader, member = lacking_round()
    acknowledged = {vote.sender for vote in sent(table, "acknowledgement") if not vote.body.confirms}
    assert member not in acknowledged and member in confirmers(table)
    assert table.commit(leader) is not None


def test_control_without_its_confirmation_nothing_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    is_asked = RoundState.lock_to_confirm
    monkeypatch.setattr(RoundState, "lock_to_confirm", lambda self: is_asked(self) if self.lock is not None else None)
    table, leader, member = lacking_round()
    assert member not in confirmers(table) and table.commit(leader) is None


def test_confirmation_without_a_roster_binds_its_sender_over_a_restart() -> None:
    table, leader = slow_round(lost=1)
    table.elapse(1.0)
    commit, lock = sent(table, "commit")[0], next(entry for entry in sent(table, "decision") if not entry.body.confirms)
    member = next(name for name in table.names if name != leader)
    machine = table.new_machine(member)
    machine.handle(MembershipChanged(frozenset(table.names)), 0.0)
    record, *_ = machine.handle_all([MessageReceived(commit), MessageReceived(lock)], 0.0)
    assert isinstance(record, VoteRecord) and record.confirmed is not None
    assert (record.view, record.lock) == (0, None)
    start = RoundStart(0, BASE, last_vote=record)
    again = RoundMachine(table.scenario.settings(), member, start, make_signer(member), table.now)
    assert again.view == 1 and again._state.bounds == Bounds(None, Vote.of(commit))


def test_what_promises_require_is_acknowledged_whatever_a_member_thinks_of_its_sums() -> None:
    """It may be decided already, so refusing it would keep the round from ending."""
    table = Cluster(4, "butterfly", 4)
    leader, *others = table.names
    table.drop = lambda sender, receiver, kind: kind == "decision"
    table.contribute(*table.names)
    decided = table.commit(leader)
    assert decided is not None and not any(table.commit(name) for name in others)
    for name in others:
        table.machines[name]._state.false_reducers.add(leader)
    table.drop = lambda sender, receiver, kind: leader in (sender, receiver)
    table.elapse(40.0)
    again = [table.commit(name) for name in others]
    assert {commit and commit.content_digest for commit in again} == {decided.content_digest}


def test_quorum_of_the_beginning_still_counts_once_one_of_its_voters_is_excluded() -> None:
    table = Cluster(7, "gather")
    voters, gone = table.machines[table.names[0]]._state.voter_set, frozenset(table.names[:1])
    assert voters.is_full_quorum(frozenset(table.names[:5])) and not voters.is_full_quorum(frozenset(table.names[:4]))
    voters.update(MembershipChanged(frozenset(table.names) - gone, departed=gone), 0.0)
    assert voters.was_quorum(frozenset(table.names[:5])) and voters.is_quorum(frozenset(table.names[1:5]))
    assert not voters.was_quorum(frozenset(table.names[:4]))


@pytest.mark.parametrize("count", [4, 5, 7, 10, 50, 100])
def test_quorums_of_members_that_exclude_some_of_the_liars_share_an_honest_voter(count: int) -> None:
    """A promise or lock may count at one member by a quorum of all, and at another by one of those that are left."""
    rule = Electorate.at_genesis()
    liars, quorum = rule.tolerated_liars(count), rule.quorum_size(count)
    for excluded in range(liars + 1):
        smaller = rule.quorum_size(count - excluded)
        assert smaller + quorum - count > liars - excluded
        assert smaller - liars > liars - excluded, "what so many promises name, an honest voter has acknowledged"
