"""Topologies: how the members of a round exchange their contributions.

A topology answers every question that depends on the kind of exchange: the parts that a peer fetches, the reducer of
each part, the contributions that a peer applies, the shape of a commit. It is a value without state: all peers that
follow the same roster, or read the same commit, get the same answers without negotiation.

    all-gather   every peer fetches every whole contribution; with `gather-all` no contribution is left out for its
                 slow link before the exchange times out
    butterfly    peer j reduces part j of all contributions; every peer fetches the reduced parts
    groups       every peer fetches the contributions of its own group and keeps a state of its own

The groups of a round follow from the run, the round and the senders on the roster:

    random        the roster in an order shuffled by a shared seed, cut into groups of g     (arXiv 2506.10911)
    ring          neighbours in ascending order, alternately to the left and to the right    (arXiv 2410.11998)
    exponential   peer i with peer i xor 2^(round mod log2 n)                                (arXiv 2410.11998)

Ring and exponential make pairs. Each member is in exactly one group; a peer without a partner is a group of one.

To add a topology, write a class and add it to `TOPOLOGIES`.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final, Literal

from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.contributions import (
    Commit,
    Contribution,
    PartBlob,
    blobs_of,
    enumerate_parts,
    part_blobs_of,
)
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import VoterSet
from protocol.consensus.view import View
from protocol.identity import PeerId
from protocol.manifest.run import RunId

Contributions = tuple[SignedMessage[Contribution], ...]
Group = tuple[PeerId, ...]  # in ascending order
Pattern = Literal["random", "ring", "exponential"]
NeededPart = tuple[PartBlob, PeerId | None, bool]  # a part to fetch, its author if known, and whether it is a sum


@dataclass(frozen=True)
class ExchangeStatus:
    """The progress of an exchange as the leader of its view knows it.

    `contributions`: those on the roster that somebody can still give out. `joined`: the members that promised to follow
    this view. `present`: the members that count as alive.
    """

    view: View
    contributions: Contributions
    joined: Set[PeerId]
    present: Set[PeerId]
    knowledge: RoundKnowledge
    voter_set: VoterSet


@dataclass(frozen=True)
class Topology(ABC):
    """The kind of exchange in a round; `parts`: how many blobs a contribution consists of.

    `has_shared_state`: all peers hold the same state after a round. `may_skip_lost`: a peer applies a commit without a
    contribution whose blob nobody has any more. `is_predictable`: a member that holds everything can tell what the
    leader will propose. `exchange_count`: exchanges of blobs in a round, one after the other.
    """

    kind: ClassVar[str]
    has_shared_state: ClassVar[bool] = True
    may_skip_lost: ClassVar[bool] = False
    is_predictable: ClassVar[bool] = True
    exchange_count: ClassVar[int] = 1

    run_id: RunId
    parts: int = 1

    @property
    def reduced_part_count(self) -> int:
        """Return how many reduced parts a commit names."""
        return 0

    def accepts_commit(self, commit: Commit) -> bool:
        """Return whether a commit has the shape that this exchange gives it."""
        has_all_parts = len(commit.parts) == self.reduced_part_count and commit.part_counts == {self.parts}
        return has_all_parts and not commit.left_out

    def contributions_for(self, commit: Commit, peer: PeerId) -> Contributions:
        """Return the contributions that a peer applies, in the order of the commit."""
        return commit.contributions

    def proposed_parts(self, commit: Commit, peer: PeerId) -> Iterator[NeededPart]:
        """Yield the parts that a peer fetches for a proposed commit."""
        return parts_by_owner(self.contributions_for(commit, peer))

    def required_parts(self, commit: Commit, peer: PeerId, live: Set[PeerId]) -> Sequence[PartBlob]:
        """Return the parts that a peer must hold before it acknowledges a commit."""
        return part_blobs_of(self.contributions_for(commit, peer))

    @abstractmethod
    def offered_parts(
        self, peer: PeerId, known: Iterable[SignedMessage[Contribution]], voters: Set[PeerId], view: View | None
    ) -> Iterator[NeededPart]:
        """Yield the parts that a peer fetches before anything is proposed.

        Args:
            known: all contributions that the peer knows of.
            voters: the members whose contributions are most likely on the next roster.
            view: the view that the peer follows, once it has a roster.
        """

    def fallback_sources(self, owners: Sequence[PeerId], others: Iterable[PeerId]) -> Sequence[PeerId]:
        """Return the peers to ask for a blob whose owners are gone or unknown."""
        return sorted(others)

    def assign_reducers(self, seed: Digest, contributors: Group) -> tuple[PeerId, ...]:
        """Return the reducer of each slot (see `View`) in the first attempt."""
        return ()


@dataclass(frozen=True)
class GatherTopology(Topology):
    """An exchange in which peers apply contributions as they are.

    `drops_stragglers`: the leader leaves out the few contributions that a majority still lacks, after a while.
    """

    drops_stragglers: ClassVar[bool] = True

    @abstractmethod
    def required_blobs(self, status: ExchangeStatus) -> Mapping[PeerId, Set[Digest]]:
        """Return the blobs that each peer must hold to apply all contributions that concern it."""

    @abstractmethod
    def ready_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return the contributions to propose once the members hold the blobs that they need."""

    @abstractmethod
    def partial_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return the contributions to propose when the leader waits no longer."""

    def left_out(self, view: View, included: Contributions) -> tuple[PeerId, ...]:
        """Return the peers on the roster that a commit has to name in addition to those that it includes."""
        return ()


@dataclass(frozen=True)
class AllGather(GatherTopology):
    """Every peer fetches every whole contribution."""

    kind: ClassVar[str] = "gather"

    def offered_parts(
        self, peer: PeerId, known: Iterable[SignedMessage[Contribution]], voters: Set[PeerId], view: View | None
    ) -> Iterator[NeededPart]:
        """Yield the parts of all contributions, without waiting for the roster: nearly all will be on it."""
        yield from parts_by_owner(entry for entry in known if entry.sender in voters)
        listed = view.roster.body.contributions if view else ()
        yield from parts_by_owner(entry for entry in listed if entry.sender not in voters)

    def required_blobs(self, status: ExchangeStatus) -> Mapping[PeerId, Set[Digest]]:
        """Return all blobs for every member."""
        everything = frozenset(blob.digest for blob in blobs_of(status.contributions))
        return dict.fromkeys(status.voter_set.members, everything)

    def ready_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return all contributions."""
        return status.contributions

    def partial_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return the contributions that the best supplied majority has in common."""
        has_all_parts = status.knowledge.has_all_parts
        held = {
            peer: {entry.sender for entry in status.contributions if has_all_parts(peer, entry.body.part_blobs)}
            for peer in status.joined
        }
        ranking = sorted(status.joined, key=lambda peer: (-len(held[peer]), peer))
        sizes = range(1, len(ranking) + 1)
        size = next(size for size in sizes if status.voter_set.is_quorum(ranking[:size]))
        shared = set.intersection(*(held[peer] for peer in ranking[:size]))
        return tuple(entry for entry in status.contributions if entry.sender in shared)


@dataclass(frozen=True)
class PatientAllGather(AllGather):
    """An all-gather that waits until every peer has every contribution, or the exchange times out."""

    kind: ClassVar[str] = "gather-all"
    drops_stragglers: ClassVar[bool] = False


@dataclass(frozen=True)
class Butterfly(Topology):
    """A reduce-scatter and an all-gather: reducers sum each part, and every peer fetches the sums.

    `reducers_per_part`: number of peers that sum each part independently and have to agree, if enough contribute. One
    is enough where the peers trust one another.
    """

    kind: ClassVar[str] = "butterfly"
    exchange_count: ClassVar[int] = 2

    reducers_per_part: int = 2

    @property
    def reduced_part_count(self) -> int:
        """Return one reduced part for each part of a contribution."""
        return self.parts

    def proposed_parts(self, commit: Commit, peer: PeerId) -> Iterator[NeededPart]:
        """Yield the reduced parts."""
        return ((part_blob, None, True) for part_blob in enumerate_parts(commit.parts))

    def required_parts(self, commit: Commit, peer: PeerId, live: Set[PeerId]) -> Sequence[PartBlob]:
        """Return the reduced parts."""
        return enumerate_parts(commit.parts)

    def offered_parts(
        self, peer: PeerId, known: Iterable[SignedMessage[Contribution]], voters: Set[PeerId], view: View | None
    ) -> Iterator[NeededPart]:
        """Yield the parts that the peer reduces, then the reduced parts that others announced."""
        if view is None:
            return
        own_parts = view.parts_reduced_by(peer)
        for entry in view.included:
            for part in own_parts:
                yield entry.body.part_blobs[part], entry.sender, False
        for reduced in view.reduced_parts():
            for reducer in view.reducers_of(reduced.body.part):
                yield PartBlob(reduced.body.blob, reduced.body.part), reducer, True

    def accepts_commit(self, commit: Commit) -> bool:
        """Return whether a commit has all parts, each with the signatures of its reducers."""
        evidence = commit.evidence
        if evidence is None or not super().accepts_commit(commit):
            return False
        return len(evidence.peers) >= self.parts * min(self.reducers_per_part, len(commit.contributions))

    def assign_reducers(self, seed: Digest, contributors: Group) -> tuple[PeerId, ...]:
        """Return the reducers of each part: round robin over the peers in an order shuffled by the seed."""
        return draw_reducers(seed, contributors, self.parts, min(self.reducers_per_part, len(contributors)))


@dataclass(frozen=True)
class Groups(GatherTopology):
    """Every peer fetches the contributions of its group of `size`, which changes with each round."""

    kind: ClassVar[str] = "groups"
    has_shared_state: ClassVar[bool] = False
    may_skip_lost: ClassVar[bool] = True  # the blob may have died with its owner, and nobody else fetched it
    is_predictable: ClassVar[bool] = False  # the leader includes what each whole group holds, which members do not know
    drops_stragglers: ClassVar[bool] = False  # a slow member delays only its own group

    size: int = 2
    pattern: Pattern = "random"

    def accepts_commit(self, commit: Commit) -> bool:
        """Return whether a commit has the right number of parts; it may leave peers out."""
        return not commit.parts and commit.part_counts == {self.parts}

    def partners(self, round_number: int, senders: Group) -> Mapping[PeerId, frozenset[PeerId]]:
        """Map every sender on a roster to the members of its group, itself included."""
        return groups_by_peer(self, round_number, senders)

    def contributions_for(self, commit: Commit, peer: PeerId) -> Contributions:
        """Return the contributions of the peer's own group.

        A peer that is not included itself applies nothing: so the mean over all peers stays the same. A commit names
        the peers that it leaves out, and with them the whole roster, from which the groups follow.
        """
        if all(entry.sender != peer for entry in commit.contributions):
            return ()
        group = self.partners(commit.round, tuple(sorted(commit.roster_peers)))[peer]
        return tuple(entry for entry in commit.contributions if entry.sender in group)

    def required_parts(self, commit: Commit, peer: PeerId, live: Set[PeerId]) -> Sequence[PartBlob]:
        """Return the parts of the peer's partners that are alive: a dead partner's blob may have died with it."""
        alive = live | {peer}
        return part_blobs_of([entry for entry in self.contributions_for(commit, peer) if entry.sender in alive])

    def offered_parts(
        self, peer: PeerId, known: Iterable[SignedMessage[Contribution]], voters: Set[PeerId], view: View | None
    ) -> Iterator[NeededPart]:
        """Yield the parts of the peer's own group, which the roster determines."""
        return parts_by_owner(self.group_contributions(view, peer) if view else ())

    def group_contributions(self, view: View, peer: PeerId) -> Contributions:
        """Return the contributions on the roster that come from a peer's group."""
        group = self._partners_in(view).get(peer, frozenset())
        return tuple(entry for entry in view.roster.body.contributions if entry.sender in group)

    def fallback_sources(self, owners: Sequence[PeerId], others: Iterable[PeerId]) -> Sequence[PeerId]:
        """Return the owners: nobody else has the blob, but an owner may come back."""
        return owners

    def required_blobs(self, status: ExchangeStatus) -> Mapping[PeerId, Set[Digest]]:
        """Return for each contributor the blobs of its group; other peers need nothing."""
        blobs = {entry.sender: [blob.digest for blob in entry.body.parts] for entry in status.contributions}
        return {
            peer: {digest for partner in group for digest in blobs.get(partner, ())}
            for peer, group in self._partners_in(status.view).items()
        }

    def ready_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return the contributions that all present members of their group hold; there must be at least one."""
        partners, present = self._partners_in(status.view), status.joined & status.present
        return tuple(
            entry for entry in status.contributions if _is_held_by(status, entry, partners[entry.sender] & present)
        )

    def partial_contributions(self, status: ExchangeStatus) -> Contributions:
        """Return the same contributions as without a delay."""
        return self.ready_contributions(status)

    def left_out(self, view: View, included: Contributions) -> tuple[PeerId, ...]:
        """Return all others on the roster: the groups follow from it."""
        senders = {entry.sender for entry in included}
        return tuple(peer for peer in view.contributors if peer not in senders)

    def _partners_in(self, view: View) -> Mapping[PeerId, frozenset[PeerId]]:
        return self.partners(view.roster.body.round, view.contributors)


TOPOLOGIES: Final[Mapping[str, type[Topology]]] = {
    AllGather.kind: AllGather,
    PatientAllGather.kind: PatientAllGather,
    Butterfly.kind: Butterfly,
    Groups.kind: Groups,
}


def make_topology(kind: str, run_id: RunId, parts: int = 1, **options: Any) -> Topology:
    """Build the topology of that kind; `options` are those of its class."""
    return TOPOLOGIES[kind](run_id, parts, **options)


def parts_by_owner(contributions: Iterable[SignedMessage[Contribution]]) -> Iterator[NeededPart]:
    """Yield every part of these contributions."""
    return ((part_blob, entry.sender, False) for entry in contributions for part_blob in entry.body.part_blobs)


def _is_held_by(status: ExchangeStatus, entry: SignedMessage[Contribution], peers: Collection[PeerId]) -> bool:
    return bool(peers) and all(status.knowledge.has_all_parts(peer, entry.body.part_blobs) for peer in peers)


@lru_cache(maxsize=16)
def draw_reducers(seed: Digest, peers: Group, parts: int, copies: int) -> tuple[PeerId, ...]:
    """Return the reducers of each part, different ones: round robin over the peers in an order shuffled by the seed."""
    order = sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    return tuple(order[(part + copy) % len(order)] for copy in range(copies) for part in range(parts))


@lru_cache(maxsize=64)
def groups_by_peer(topology: Groups, round_number: int, senders: Group) -> Mapping[PeerId, frozenset[PeerId]]:
    if topology.pattern == "ring":
        cut = ring_pairs(round_number, senders)
    elif topology.pattern == "exponential":
        cut = exponential_pairs(round_number, senders)
    else:
        seed = hashlib.sha256(f"murmur groups {topology.run_id} {round_number}".encode()).digest()
        cut = random_groups(seed, senders, topology.size)
    return {peer: frozenset(group) for group in cut for peer in group}


def random_groups(seed: bytes, peers: Collection[PeerId], size: int) -> list[Group]:
    """Cut the shuffled peers into groups; a remainder of one joins the last group, unless the groups are pairs."""
    order = sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    cut = [order[start : start + size] for start in range(0, len(order), size)]
    if size > 2 and len(cut) > 1 and len(cut[-1]) == 1:
        cut[-2:] = [cut[-2] + cut[-1]]
    return [tuple(sorted(group)) for group in cut]


def ring_pairs(round_number: int, peers: Collection[PeerId]) -> list[Group]:
    """Return pairs of neighbours on a ring, alternately with the left and the right one."""
    order = sorted(peers)
    if round_number % 2 and len(order) % 2 == 0:
        order = order[1:] + order[:1]
    elif round_number % 2:
        return [tuple(order[:1]), *_pairs(order[1:])]
    return _pairs(order)


def _pairs(order: Sequence[PeerId]) -> list[Group]:
    return [tuple(sorted(order[start : start + 2])) for start in range(0, len(order), 2)]


def exponential_pairs(round_number: int, peers: Collection[PeerId]) -> list[Group]:
    """Return pairs of peers at distance 1, 2, 4, ...; without a peer at that distance, a peer stays alone."""
    order = sorted(peers)
    distance = 1 << round_number % max(1, (len(order) - 1).bit_length())
    positions = (
        tuple(sorted({position, position ^ distance}))
        for position in range(len(order))
        if position < position ^ distance
    )
    found = [tuple(order[position] for position in pair if position < len(order)) for pair in positions]
    alone = set(order).difference(*found)
    return sorted([*found, *((peer,) for peer in alone)])
