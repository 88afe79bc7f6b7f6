"""Real round machines in every state of `test_all_orders`: four voters, one of whom lies, and two views.

In each state that any order of messages leads to, each honest voter is a real machine with that history. It is shown
every commit, every set of promises and every lock that the liar, who leads both views, can make then. Its votes have to
be those of the model; so what holds for the model holds for the machines.

Messages that change no vote are left out of the histories.
"""

from typing import Any

import pytest

from protocol.consensus import acceptance, view_change
from protocol.consensus.events import BlobAvailable, Event, LocalContribution, MembershipChanged, MessageReceived, Send
from protocol.consensus.locks import Bounds, Vote, newest_confirmed, required_contents
from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Commit, Roster
from protocol.consensus.messages.kinds import Acknowledgement, CommitCertificate, Justification, Promise
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.quorum import Election
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.protocol.consensus.test_all_orders import (
    CONTENTS,
    QUORUM,
    TOLERATED,
    Shown,
    State,
    Voter,
    reachable,
    shown_promises,
    steps_of,
)
from tests.protocol.consensus.test_knowledge import entries_of, signed_message
from tests.simulation.virtual.network import NAMES, make_contribution

ME, *OTHERS = sorted(NAMES[:3])
LIAR = NAMES[3]
TABLE = Cluster(4, "gather")
ENTRIES = entries_of(TABLE, NAMES[:4])
BOTH = (True, True)
PARTS = tuple(BlobAvailable(part) for entry in ENTRIES for part in entry.body.part_blobs)
Step = tuple[Event, ...]


@pytest.fixture(autouse=True)
def _liar_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Election, "leader", lambda self, view, peers: LIAR)
    monkeypatch.setattr(view_change, "may_lead", lambda state, peer, view: peer == LIAR)


ROSTERS = [signed_message(LIAR, Roster(0, view, BASE, ENTRIES)) for view in range(2)]
COMMITS = {
    (view, content): signed_message(LIAR, Commit(0, view, BASE, ENTRIES[: 4 - place], ()))
    for view in range(2)
    for place, content in enumerate(CONTENTS)
}


def vote(view: int, content: bytes) -> Vote:
    return Vote.of(COMMITS[view, content])


def real_bounds(bounds: Bounds) -> Bounds:
    """Return what a promise of the model names, with the digests of real commits."""
    return Bounds(*(entry and vote(entry.view, entry.content) for entry in (bounds.acknowledged, bounds.confirmed)))


def lock(view: int, content: bytes, with_me: bool) -> CommitCertificate:
    """Return acknowledgements of a quorum, the liar's among them."""
    body = Acknowledgement.of(COMMITS[view, content], TABLE.machines[ME].basis)
    signers = (ME if with_me else OTHERS[1], OTHERS[0], LIAR)
    return CommitCertificate.of([signed_message(name, body) for name in sorted(signers)])


def justification(view: int, content: bytes, shown: Shown, names: dict[int, PeerId]) -> SignedMessage[Justification]:
    said = [(names[index], bounds) for index, bounds in shown.honest.items()] + [(LIAR, lie) for lie in shown.lies]
    roster, commit = ROSTERS[view].digest, COMMITS[view, content].digest
    promises = tuple(
        signed_message(name, Promise(0, view, roster, real_bounds(bounds))) for name, bounds in sorted(said)
    )
    newest = newest_confirmed(bounds for _, bounds in said)
    certificate = lock(newest.view, newest.content, with_me=False) if newest else None
    return signed_message(LIAR, Justification(0, BASE, view, roster, commit, TOLERATED, promises, certificate))


class Member:
    """One honest voter: a real machine for each history, and what its votes were when it was shown something."""

    def __init__(self) -> None:
        self._histories: dict[Voter, tuple[Step, ...]] = {Voter(): ()}
        self._votes: dict[Any, bool] = {}
        self._open: dict[tuple[Voter, bytes], RoundMachine] = {}  # machines that know a commit and wait for promises
        self.handled = 0

    def machine(self, voter: Voter) -> RoundMachine:
        """Return a machine with a history."""
        machine = TABLE.new_machine(ME)
        machine.handle(MembershipChanged(frozenset(NAMES[:4])), 0.0)
        machine.handle(LocalContribution(make_contribution(ME, 0, BASE, TABLE.scenario)), 0.0)
        machine.handle(MessageReceived(ROSTERS[0]), 0.0)
        for step in self._histories[voter]:
            self.show(machine, step)
        return machine

    def show(self, machine: RoundMachine, step: Step) -> list[SignedMessage[Any]]:
        """Return what a machine answers."""
        self.handled += 1
        actions = machine.handle_all(step, 0.0)
        return [TABLE.network.open(action.signed) for action in actions if isinstance(action, Send)]

    def remember(self, before: Voter, step: Step, after: Voter) -> None:
        self._histories.setdefault(after, (*self._histories[before], step))

    def joins(self, voter: Voter, after: Voter) -> bool:
        """Return whether the next roster makes the machine promise what the model says."""
        view = after.view
        if (voter, "joins") not in self._votes:
            step = (MessageReceived(ROSTERS[view]),)
            answers = self.show(self.machine(voter), step)
            promises = [message.body.bounds for message in answers if isinstance(message.body, Promise)]
            self._votes[voter, "joins"] = promises[:1] == [real_bounds(after.bounds(view))]
            self.remember(voter, step, after)
        return self._votes[voter, "joins"]

    def confirms(self, voter: Voter, after: Voter, content: bytes) -> bool:
        """Return whether the machine confirms a content of this view when it is shown a lock.

        One that has not acknowledged it lacks its parts, or the promises for it.
        """
        if (voter, "confirms", content) not in self._votes:
            shown = lock(voter.view, content, with_me=voter.acknowledged[voter.view] == content)
            step = _received(COMMITS[voter.view, content], signed_message(LIAR, shown))
            self._votes[voter, "confirms", content] = _votes(
                self.show(self.machine(voter), step), vote(voter.view, content), confirms=True
            )
            self.remember(voter, step, after)
        return self._votes[voter, "confirms", content]

    def acknowledges(self, voter: Voter, after: Voter, content: bytes, shown: Shown | None, others: list[int]) -> bool:
        """Return whether the machine acknowledges a content when it is shown some promises; None stands for view 0."""
        commit = COMMITS[voter.view, content]
        if shown is None:
            return self._acknowledges(voter, after, content, None, (*PARTS, *_received(commit)))
        ranked = sorted(others, key=lambda index: repr(shown.honest.get(index)))
        mine = next(index for index in range(3) if index not in others)
        names = {mine: ME, **dict(zip(ranked, OTHERS, strict=True))}
        said = frozenset((names[index], bounds) for index, bounds in shown.honest.items()), shown.lies
        if (voter, content, said) in self._votes:
            return self._votes[voter, content, said]
        step = _received(justification(voter.view, content, shown, names), commit)
        return self._acknowledges(voter, after, content, said, (*PARTS, *step))

    def _acknowledges(self, voter: Voter, after: Voter, content: bytes, said: object, step: Step) -> bool:
        key = voter, content
        machine = self._open.pop(key, None) or self.machine(voter)
        answer = _votes(self.show(machine, step), vote(voter.view, content), confirms=False)
        self._votes[voter, content, said] = answer
        if answer:
            self.remember(voter, step, after)
        elif said is not None:
            self._open[key] = machine  # it may be convinced by other promises
        return answer


def _received(*messages: SignedMessage[Any]) -> Step:
    return tuple(MessageReceived(message) for message in messages)


def _votes(answers: list[SignedMessage[Any]], given: Vote, confirms: bool) -> bool:
    """Return whether a machine votes for that proposal, and not for another one of the view that it knew before."""
    votes = [message.body for message in answers if isinstance(message.body, Acknowledgement)]
    return any((entry.proposal, entry.confirms) == (given.proposal, confirms) for entry in votes)


def check(state: State, member: Member) -> None:
    """Compare what a real machine does in the place of each voter with what the model says."""
    for index, voter in enumerate(state):
        allowed = steps_of(state, index, BOTH, required_contents)
        others = [place for place in range(len(state)) if place != index]
        for after in [step for step in allowed if step.view > voter.view]:
            assert member.joins(voter, after)
        view = voter.view
        for content in CONTENTS:
            acknowledged = _after(voter, "acknowledged", content)
            if voter.acknowledged[view] is None:
                offers = [None] if view == 0 else shown_promises(state, view)
                does = any([member.acknowledges(voter, acknowledged, content, shown, others) for shown in offers])
                assert does <= (acknowledged in allowed), (state, index, content)
                if voter.confirmed[view] is None:  # otherwise the commit that is locked is the first that it knows
                    assert does == (acknowledged in allowed), (state, index, content)
            confirmed = _after(voter, "confirmed", content)
            if confirmed in allowed:
                assert member.confirms(voter, confirmed, content), (state, index, content)


def _after(voter: Voter, done: str, content: bytes) -> Voter:
    values = getattr(voter, done)
    changed = {done: (*values[: voter.view], content, *values[voter.view + 1 :])}
    return Voter(**{**vars(voter), **changed})


def test_real_machines_vote_as_the_model_says_in_every_state() -> None:
    member = Member()
    states = sorted(reachable(BOTH, required_contents), key=_progress)
    for state in states:
        check(state, member)
    print(f"{len(states)} states, {member.handled} messages shown")
    assert len(states) > 1000 and QUORUM == 3


def _progress(state: State) -> int:
    """Order states so that each history is known before the ones that follow from it."""
    votes = [value for voter in state for value in (*voter.acknowledged, *voter.confirmed) if value is not None]
    return 10 * sum(voter.view for voter in state) + len(votes)


def test_control_machines_that_believe_a_leader_do_more_than_the_model_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "required_contents", lambda bounds, tolerated: None)
    member = Member()
    with pytest.raises(AssertionError):
        for state in sorted(reachable(BOTH, required_contents), key=_progress):
            check(state, member)
