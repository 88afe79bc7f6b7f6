"""What will most likely be decided is told once all of it is here: to compute it takes as long as to agree on it."""

from protocol.blobs.blob import Blob
from protocol.consensus.events import Finish, Reduce, Speculate
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import make_contribution

PROPOSAL = "commit"


def speculated_commits(table: Cluster) -> dict[PeerId, list[Digest]]:
    told: dict[PeerId, list[Digest]] = {name: [] for name in table.names}
    for name, action in table.log:
        if isinstance(action, Speculate):
            told[name].append(action.commit.content_digest)
    return told


def table_of(exchange: str, parts: int = 1) -> Cluster:
    table = Cluster(4, exchange, parts)
    table.drop = lambda sender, receiver, kind: kind == PROPOSAL
    return table


def decided_after(table: Cluster) -> Digest:
    """What is decided once proposals pass."""
    assert not any(isinstance(action, Finish) for _, action in table.log), "decided without a proposal"
    table.drop = lambda sender, receiver, kind: False
    table.elapse(table.scenario.settings().leader_timeout)
    (content,) = {action.commit.body.content_digest for _, action in table.log if isinstance(action, Finish)}
    return content


def test_each_foresees_once_what_is_then_decided_before_it_is_proposed() -> None:
    table = table_of("gather")
    table.contribute(*table.names)
    before = speculated_commits(table)
    content = decided_after(table)
    assert before == speculated_commits(table) == {name: [content] for name in table.names}


def test_of_a_butterfly_once_all_sums_are_here() -> None:
    table = table_of("butterfly", 12)
    slow, sums = table.names[1], set[Digest]()
    table.is_slow = lambda peer, digest: peer == slow and digest in sums
    real = table.reduce_part

    def watched(peer: PeerId, order: Reduce) -> Blob:
        blob = real(peer, order)
        sums.add(blob.digest)
        return blob

    table.reduce_part = watched
    table.contribute(*table.names)
    before = speculated_commits(table)
    assert before[slow] == [] and all(len(before[name]) == 1 for name in table.names if name != slow)
    table.is_slow = lambda peer, digest: False
    content = decided_after(table)
    assert speculated_commits(table) == {name: [content] for name in table.names}


def test_who_lacks_a_contribution_foresees_nothing() -> None:
    table = table_of("gather")
    *others, last = table.names
    lacking = {blob.digest for blob in make_contribution(last, 0, BASE, table.scenario).parts}
    table.is_slow = lambda peer, digest: peer == others[1] and digest in lacking
    table.contribute(*table.names)
    told = speculated_commits(table)
    assert told[others[1]] == [] and all(told[name] for name in table.names if name != others[1])


def test_in_groups_nobody_can_tell() -> None:
    table = Cluster(4, "groups")
    table.contribute(*table.names)
    assert not any(speculated_commits(table).values()) and table.included_peers() == {tuple(sorted(table.names))}
