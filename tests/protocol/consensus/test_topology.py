import ast
import hashlib
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from protocol.blobs.blob import Blob
from protocol.consensus.events import MessageReceived, Send
from protocol.consensus.messages.contributions import Commit, Evidence
from protocol.consensus.messages.kinds import ReducedPart, ReducerAssignment, kind_of
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.topology import (
    TOPOLOGIES,
    AllGather,
    Contributions,
    ExchangeStatus,
    Group,
    Groups,
    Pattern,
    exponential_pairs,
    groups_by_peer,
    make_topology,
    random_groups,
    ring_pairs,
)
from tests.protocol.consensus.cluster import BASE, Cluster
from tests.simulation.virtual.network import NAMES, RUN_ID, Scenario, make_contribution, make_signer

GROUPS = Groups(RUN_ID)
PEERS = tuple(sorted(NAMES))


def seed_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(4, "big")).digest()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("count", range(1, 13))
def test_everybody_is_in_one_group_of_the_right_size(count: int, size: int) -> None:
    cut = random_groups(seed_of(1), PEERS[:count], size)
    assert sorted(itertools.chain(*cut)) == list(PEERS[:count])
    sizes = sorted(len(group) for group in cut)
    expected = [size] * (count // size) + [count % size] * (count % size > 0)
    if size > 2 and count > size and count % size == 1:
        expected = [size + 1] + [size] * (count // size - 1)
    assert sizes == sorted(expected)


def test_the_order_in_which_peers_are_named_does_not_matter() -> None:
    assert (
        random_groups(seed_of(1), PEERS, 3)
        == random_groups(seed_of(1), PEERS[::-1], 3)
        != random_groups(seed_of(2), PEERS, 3)
    )


def test_every_pair_is_as_likely_as_any_other() -> None:
    """Chi-square over the 15 pairs of 6 peers, 3 of which meet in each draw: mean 14, standard deviation 5.3."""
    draws = 3000
    met = Counter(group for number in range(draws) for group in random_groups(seed_of(number), PEERS[:6], 2))
    expected = draws * 3 / 15
    assert len(met) == 15
    assert sum((count - expected) ** 2 / expected for count in met.values()) < 40
    fixed = Counter(group for number in range(draws) for group in random_groups(seed_of(0), PEERS[:6], 2))
    assert len(fixed) == 3, "the negative control: one seed for all rounds mixes nothing"


def places(cut: list[Group]) -> set[tuple[int, ...]]:
    return {tuple(PEERS.index(peer) for peer in group) for group in cut}


def test_the_ring_alternates_between_left_and_right() -> None:
    assert places(ring_pairs(0, PEERS[:4])) == {(0, 1), (2, 3)}
    assert places(ring_pairs(1, PEERS[:4])) == {(1, 2), (0, 3)}
    assert places(ring_pairs(2, PEERS[:5])) == {(0, 1), (2, 3), (4,)}
    assert places(ring_pairs(3, PEERS[:5])) == {(0,), (1, 2), (3, 4)}
    assert places(ring_pairs(5, PEERS[:1])) == {(0,)} and places(ring_pairs(1, PEERS[:2])) == {(0, 1)}


def test_exponential_distances_double() -> None:
    assert places(exponential_pairs(0, PEERS[:8])) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert places(exponential_pairs(4, PEERS[:8])) == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert places(exponential_pairs(2, PEERS[:8])) == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert places(exponential_pairs(2, PEERS[:6])) == {(0, 4), (1, 5), (2,), (3,)}
    assert places(exponential_pairs(7, PEERS[:1])) == {(0,)}


def averaged(pattern: Pattern, count: int, rounds: int) -> list[float]:
    """One number a peer, averaged in its group in each round; at first 1 for the first peer and 0 for the others."""
    values = {peer: float(peer == PEERS[0]) for peer in PEERS[:count]}
    for number in range(rounds):
        cut = groups_by_peer(replace(GROUPS, pattern=pattern), number, PEERS[:count])
        values = {peer: sum(values[mate] for mate in cut[peer]) / len(cut[peer]) for peer in values}
    return list(values.values())


def test_log2_n_exponential_rounds_are_an_exact_average() -> None:
    assert averaged("exponential", 8, 3) == [1 / 8] * 8


@pytest.mark.parametrize("pattern", ["random", "ring", "exponential"])
@pytest.mark.parametrize("count", [5, 8])
def test_mixing_keeps_the_mean_and_reaches_everybody(pattern: Pattern, count: int) -> None:
    values = averaged(pattern, count, 200)
    assert sum(values) == pytest.approx(1)
    assert values == pytest.approx([1 / count] * count, abs=1e-3)


def commit_of(included: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Commit:
    scenario = Scenario(len(PEERS), "groups", 1, 1, 0, 0, 0, 0, 0)
    bodies = [(peer, make_contribution(peer, 0, BASE, scenario)) for peer in included]
    entries = tuple(SignedMessage.of(make_signer(peer)("contribution", body.to_wire()), body) for peer, body in bodies)
    return Commit(0, 0, BASE, entries, (), left_out)


def test_a_commit_alone_tells_the_groups_of_its_roster() -> None:
    cut = groups_by_peer(GROUPS, 0, PEERS[:6])
    absent = PEERS[2]
    commit = commit_of(tuple(peer for peer in PEERS[:6] if peer != absent), (absent,))
    for peer in commit_senders(commit):
        assert {entry.sender for entry in GROUPS.contributions_for(commit, peer)} == cut[peer] - {absent}
    assert GROUPS.contributions_for(commit, absent) == GROUPS.contributions_for(commit, PEERS[9]) == ()
    forgetful = replace(commit, left_out=())
    assert any(
        GROUPS.contributions_for(forgetful, peer) != GROUPS.contributions_for(commit, peer) for peer in PEERS[:6]
    )


def commit_senders(commit: Commit) -> list[str]:
    return [entry.sender for entry in commit.contributions]


def test_without_groups_a_commit_is_for_everybody() -> None:
    commit = commit_of(PEERS[:3])
    assert AllGather(RUN_ID).contributions_for(commit, PEERS[5]) == commit.contributions


def test_a_commit_has_the_shape_of_its_topology() -> None:
    commit, part = commit_of(PEERS[:3]), Blob.of(b"sum")
    evidence = Evidence(0, BASE, 0, PEERS[:2], (bytes(64), bytes(64)))
    partial, reduced = replace(commit, left_out=PEERS[3:5]), replace(commit, parts=(part,), evidence=evidence)
    accepted = {
        kind: [make_topology(kind, RUN_ID).accepts_commit(given) for given in (commit, partial, reduced)]
        for kind in TOPOLOGIES
    }
    assert accepted == {
        "gather": [True, False, False],
        "gather-all": [True, False, False],
        "butterfly": [False, False, True],
        "groups": [True, True, False],
    }
    assert not make_topology("butterfly", RUN_ID).accepts_commit(replace(reduced, evidence=None))
    assert not AllGather(RUN_ID, parts=2).accepts_commit(commit)


def test_only_a_butterfly_takes_reduced_parts_and_reducers() -> None:
    for kind in TOPOLOGIES:
        cluster = Cluster(3, kind)
        leader, member, _ = cluster.names
        cluster.drop = lambda sender, receiver, kind: kind != "contribution" and kind != "roster"
        cluster.contribute(*cluster.names)
        (roster,) = [action.signed for _, action in cluster.log if isinstance(action, Send) and is_roster(action)]
        digest = cluster.network.open(roster).digest
        part = ReducedPart(0, 0, digest, 0, 0, Blob.of(b"sum"), BASE)
        assignment = ReducerAssignment(0, 0, digest, 1, tuple(sorted(cluster.names)), (member, leader))
        for body in (part, assignment):
            message = SignedMessage.of(make_signer(leader)(kind_of(body), body.to_wire()), body)
            cluster.feed_event(member, MessageReceived(message))
        assert ((leader, "wrong round") in cluster.rejections_by(member)) == (kind != "butterfly")


def is_roster(action: Send) -> bool:
    return action.signed.kind == "roster"


def kind_comparisons(source: str) -> list[int]:
    """Return the lines that compare something with the kind of a topology."""
    compared = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare | ast.MatchValue))
    return [node.lineno for node in compared if any(is_kind(part) for part in ast.walk(node))]


def is_kind(node: ast.AST) -> bool:
    is_literal = isinstance(node, ast.Constant) and node.value in TOPOLOGIES
    is_attribute = isinstance(node, ast.Attribute) and node.attr == "kind"
    return is_literal or (is_attribute and ast.unparse(node).endswith("topology.kind"))


def test_product_asks_the_topology_instead_of_comparing_its_kind() -> None:
    owners = {Path("protocol/consensus/topology.py"), Path("optim/topologies.py")}
    paths = {path for package in ("protocol", "optim", "node") for path in Path(package).rglob("*.py")}
    assert owners <= paths
    found = [f"{path}:{line}" for path in paths - owners for line in kind_comparisons(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "x = method.topology.kind != other",
        "x = kind == 'groups'",
        "x = kind in ('gather', 1)",
        "x = {'butterfly'} & y <= z",
    ],
)
def test_a_comparison_of_kinds_would_be_found(line: str) -> None:
    assert kind_comparisons(line) == [1]


@dataclass(frozen=True)
class FirstTwo(AllGather):
    """Every peer applies the first two contributions."""

    kind: ClassVar[str] = "first two"

    def ready_contributions(self, status: ExchangeStatus) -> Contributions:
        return status.contributions[:2]


def test_a_new_topology_takes_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOPOLOGIES, FirstTwo.kind, FirstTwo)
    cluster = Cluster(3, FirstTwo.kind)
    cluster.contribute(*cluster.names)
    assert cluster.included_peers() == {tuple(sorted(cluster.names)[:2])}
