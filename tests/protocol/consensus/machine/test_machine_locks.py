"""What may have been decided is proposed again; and without each of the rules for it, two commits come about."""

from collections.abc import Callable

import pytest

from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.leader import Leader
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.quorum import Election
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster


def _lone_decision(seconds_without_commits: float = 0.0) -> tuple[Cluster, Commit]:
    """The leader decides with one acknowledgement and dies unheard; then the third peer, late before, contributes.

    It is the one that leads next, and for a while it may be told no commits.
    """
    table = Cluster(3, "gather")
    leader = table.names[0]
    late = Election(BASE).leader(1, frozenset(table.names[1:]))
    locked = next(name for name in table.names[1:] if name != late)
    assert late is not None
    table.contribute(leader, locked)
    table.drop = lambda sender, receiver, kind: kind == "decision" or (receiver, kind) == (late, "commit")
    table.elapse(2.4)
    decided = table.commit(leader)
    assert decided and table.commit(locked) is None and table.commit(late) is None
    table.drop = lambda sender, receiver, kind: (receiver, kind) == (late, "commit")
    table.contribute(late)
    table.kill(leader)
    table.elapse(seconds_without_commits)
    table.drop = lambda sender, receiver, kind: False
    table.elapse(20)
    return table, decided


@pytest.mark.parametrize("seconds_without_commits", [0.0, 1.0])
def test_what_may_have_been_decided_is_proposed_again(seconds_without_commits: float) -> None:
    table, decided = _lone_decision(seconds_without_commits)
    for name in table.names[1:]:
        commit = table.commit(name)
        assert commit and commit.view > decided.view and commit.content_digest == decided.content_digest


def _without_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "locked_proposal", lambda self: None)


def _without_what_promises_tell(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoundKnowledge, "acknowledgers", lambda self, digest: set(self.acknowledgements[digest]))


def _with_promises_half_understood(patch: pytest.MonkeyPatch) -> None:
    def joined(self: Leader) -> set[PeerId]:
        holdings = self._knowledge.inventories.items()
        return {self._knowledge.me} | {p for p, told in holdings if told.roster == self._view.roster.digest}

    patch.setattr(Leader, "joined_peers", joined)


@pytest.mark.parametrize("cripple", [_without_locks, _without_what_promises_tell, _with_promises_half_understood])
def test_without_each_of_its_rules_two_commits_come_about(
    cripple: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cripple(monkeypatch)
    table, decided = _lone_decision(seconds_without_commits=1.0)
    commit = table.commit(table.names[1])
    assert commit and commit.content_digest != decided.content_digest
