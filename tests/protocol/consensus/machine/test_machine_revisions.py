"""Revisions in a round: the leader's commit adopts them, others need not know them, and no commit takes one back."""

import pytest

from protocol.consensus.machine import RoundMachine
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.settings import RoundStart
from protocol.identity import PeerId
from protocol.steering import REVISION_KIND, Revision, SignedRevision, encode_changes
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import ORGANISER, make_signer


def revision(number: int, previous: bytes = b"") -> SignedRevision:
    body = Revision(number, previous, 4, encode_changes({"target.rounds": number}), 1.0)
    return SignedMessage.of(make_signer(ORGANISER)(REVISION_KIND, body.to_wire()), body)


FIRST = revision(1)
SECOND = revision(2, FIRST.digest)


class SteeredCluster(Cluster):
    """Machines whose chain has adopted one revision; `informed` know the next one, `misled` know of none adopted."""

    def __init__(self, exchange: str) -> None:
        super().__init__(3, exchange, parts=1)
        leader = self.names[0]
        self.informed, self.misled = {leader}, set[PeerId]()
        self.restart_all()

    def restart_all(self) -> None:
        self.machines = {name: self.new_machine(name) for name in self.names}
        self.set_live(*self.names)

    def new_machine(self, name: PeerId, seen: dict[PeerId, float] | None = None) -> RoundMachine:
        if not hasattr(self, "informed"):
            return super().new_machine(name, seen)
        adopted, new = FIRST.digest, (SECOND,) if name in self.informed else ()
        if name in self.misled:
            adopted, new = b"", ()
        start = RoundStart(0, BASE, seen or {}, None, adopted, new)
        return RoundMachine(self.scenario.settings(), name, start, make_signer(name), self.now)

    def adoptions(self) -> set[Adoption]:
        found = [self.commit(name) for name in self.names if name not in self.dead]
        return {commit.adoption for commit in found if commit}


@pytest.mark.parametrize("exchange", ["gather", "butterfly"])
def test_commit_adopts_what_its_leader_knows_and_the_others_do_not(exchange: str) -> None:
    table = SteeredCluster(exchange)
    table.contribute(*table.names)
    assert table.adoptions() == {Adoption(SECOND.digest, (SECOND,))}
    assert all(table.commit(name) for name in table.names)


def test_commit_names_the_adopted_revision_where_there_is_nothing_new() -> None:
    table = SteeredCluster("gather")
    table.informed = set()
    table.restart_all()
    table.contribute(*table.names)
    assert table.adoptions() == {Adoption(FIRST.digest)}


def test_members_refuse_a_leader_that_takes_a_revision_back() -> None:
    table = SteeredCluster("gather")
    leader, *others = table.names
    table.misled = {leader}
    table.restart_all()
    table.contribute(*table.names)
    assert table.adoptions() == set(), "nobody acknowledges it"
    assert all((leader, "other revisions") in table.rejections_by(name) for name in others)
    table.elapse(20.0)
    assert Adoption(FIRST.digest) in table.adoptions(), "the next leader's commit is decided"


def test_next_leader_repeats_the_revisions_of_a_commit_that_may_be_decided() -> None:
    table = SteeredCluster("gather")
    leader, *others = table.names
    table.drop = lambda sender, receiver, kind: kind == "acknowledgement" and receiver == leader
    table.contribute(*table.names)
    assert table.adoptions() == set()
    table.kill(leader)
    table.drop = lambda sender, receiver, kind: False
    table.elapse(30.0)
    assert table.adoptions() == {Adoption(SECOND.digest, (SECOND,))}, "though none of them knew it by itself"
    assert all(table.commit(name) for name in others)
