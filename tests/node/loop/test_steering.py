"""The manifest of a round: the chain decides which revisions hold, and only a halt may end by others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.steering import Steering
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import SignedMessage
from protocol.identity import Identity
from protocol.signing import sign
from protocol.steering import REFERENCE_MANIFEST, REVISION_KIND, Revision, RevisionLog, SignedRevision, encode_changes
from tests.node.small_run import RUN_ID, certified, commit_of

ORGANISER = Identity.create()


def signed_revision(before: Sequence[SignedRevision], from_round: int, **values: Any) -> SignedRevision:
    """Return a revision that continues these; `__` in a name stands for a dot."""
    changes = encode_changes({key.replace("__", "."): value for key, value in values.items()})
    body = Revision(len(before) + 1, before[-1].digest if before else b"", from_round, changes, 1.0)
    return SignedMessage.of(sign(ORGANISER, REVISION_KIND, RUN_ID, body.to_wire()), body)


class SteeredChain:
    """A chain of empty rounds, and the organiser's revisions that its peer knows."""

    def __init__(self) -> None:
        self.chain, self.log = Chain.from_genesis(RUN_ID), RevisionLog()
        self.steering = Steering(REFERENCE_MANIFEST, self.chain, self.log)

    def sign(self, from_round: int, **values: Any) -> SignedRevision:
        revision = signed_revision(self.log.list_to(self.log.newest()) or (), from_round, **values)
        self.log.add(revision)
        return revision

    def decide(self, adopts: bool = True) -> None:
        """Decide a round, whose commit adopts all known revisions."""
        commit = commit_of(self.chain.head, {2: Blob.of(str(self.chain.round).encode())})
        new = self.steering.new_revisions if adopts else ()
        newest = new[-1].digest if new else self.chain.head.revision
        adopting = replace(commit, body=replace(commit.body, adoption=Adoption(newest, new)))
        self.chain.append(certified(self.chain, adopting))

    def rate(self) -> float:
        return self.steering.manifest_at(self.chain.round).train.learning_rate


def test_a_revision_holds_from_its_round_on_if_it_is_adopted_before() -> None:
    run = SteeredChain()
    run.sign(2, train__learning_rate=0.5)
    rates = []
    for _ in range(4):
        rates.append(run.rate())
        run.decide()
    assert rates == [1.0, 1.0, 0.5, 0.5]


def test_a_late_revision_holds_from_the_round_after_its_adoption() -> None:
    run = SteeredChain()
    run.decide()
    run.sign(0, train__learning_rate=0.5)
    assert run.rate() == 1.0, "known, but not adopted"
    run.decide(adopts=False)
    assert run.rate() == 1.0
    run.decide()
    assert run.rate() == 0.5 and [entry.number for entry in run.steering.revisions_in_force] == [1]


def test_the_manifest_after_a_commit_is_that_of_the_next_round() -> None:
    run = SteeredChain()
    revision = run.sign(0, train__learning_rate=0.5)
    commit = commit_of(run.chain.head, {2: Blob.of(b"x")}).body
    adopting = replace(commit, adoption=Adoption(revision.digest, (revision,)))
    assert run.steering.manifest_after(adopting).train.learning_rate == 0.5
    assert run.steering.manifest_after(commit).train.learning_rate == run.rate() == 1.0


def test_a_stop_ends_the_run_only_once_it_is_adopted() -> None:
    run = SteeredChain()
    run.decide()
    run.sign(1, target__rounds=1)
    assert not run.steering.is_target_reached, "others may not know of it"
    run.decide()
    assert run.steering.is_target_reached


def test_a_pause_begins_with_its_adoption_and_ends_when_a_peer_hears_of_it() -> None:
    run = SteeredChain()
    run.sign(1, paused=True)
    assert not run.steering.is_paused
    run.decide()
    assert run.steering.is_paused
    run.sign(1, paused=False)
    assert not run.steering.is_paused, "no commit of a paused run could adopt this"
    run.decide()
    assert not run.steering.is_paused and run.steering.adopted[-1].body.number == 2


def test_a_paused_run_can_be_stopped_though_no_commit_adopts_the_stop() -> None:
    run = SteeredChain()
    run.sign(0, paused=True)
    run.decide()
    run.sign(1, target__rounds=1)
    assert run.steering.is_target_reached
    run.sign(1, paused=False)
    assert not run.steering.is_target_reached, "the next commit adopts it, and all end there"
    run.decide()
    assert run.steering.is_target_reached


@pytest.mark.parametrize("from_round", [1, 2])
def test_a_run_that_is_over_goes_on_with_a_new_target(from_round: int) -> None:
    run = SteeredChain()
    run.sign(0, target__rounds=1)
    run.decide()
    assert run.steering.is_target_reached
    run.sign(from_round, target__rounds=3)
    assert run.steering.is_target_reached == (from_round > 1), "a round that is never reached never begins"


def test_revisions_of_a_commit_are_learned_and_unknown_ones_are_not_guessed() -> None:
    run, other = SteeredChain(), SteeredChain()
    first, second = other.sign(0, train__clip=2.0), other.sign(0, train__clip=3.0)
    assert run.steering.learn(Adoption(second.digest, (second,))) is False, "the first one is missing"
    assert run.steering.learn(Adoption(second.digest)) is False
    assert run.steering.learn(Adoption(second.digest, (first, second))) and run.log.revisions == (first, second)
    assert run.steering.learn(Adoption(second.digest, (first, second))) and run.log.revisions == (first, second)


def test_newcomer_does_not_take_a_run_for_over_before_it_knows_all_revisions() -> None:
    run = SteeredChain()
    run.sign(0, target__rounds=1)
    head = replace(run.chain.head, round=1)
    others = {name: PeerState(head, b"s" * 32) for name in "abc"}
    assert run.steering.final_head(SwarmSnapshot(others), "me") == head
    informed = {**others, "d": PeerState(head, b"s" * 32, revision=b"r" * 32)}
    assert run.steering.final_head(SwarmSnapshot(informed), "me") is None
    run.sign(0, target__rounds=9)
    assert run.steering.final_head(SwarmSnapshot(others), "me") is None
