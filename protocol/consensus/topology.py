"""Who exchanges with whom in a round whose members are cut into groups, and what of its commit concerns a member.

Nobody negotiates: the groups are a pure function of the run, the round and the senders on the roster, so all who
follow a roster draw the same. A commit names whom it includes and whom it leaves out, together its roster, so whoever
comes later draws the same from the commit alone.

    random        the roster in an order shuffled by a shared seed, cut into groups of g     (arXiv 2506.10911)
    ring          neighbours in ascending order; to the left and to the right by turns       (arXiv 2410.11998)
    exponential   place i with place i xor 2^(round mod log2 n)                              (arXiv 2410.11998)

Ring and exponential make pairs. Each member is in exactly one group; who has no partner is a group of one.

What of a commit really went into a peer's state, for whoever tells it: the log, the counters, the simulation.

Not what was offered, nor all that the commit names: in groups that is what other groups applied, and where a partner
died with its message, even our own group applied less.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

from protocol.consensus.events import RoundSettings
from protocol.consensus.messages import Commit, Contribution, SignedMessage
from protocol.consensus.view import blobs_of
from protocol.identity import PeerId

Group = tuple[PeerId, ...]  # ascending


def random_groups(seed: bytes, peers: Collection[PeerId], size: int) -> list[Group]:
    """A remainder of one joins the last group, or stays alone where the groups are pairs."""
    order = sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())
    cut = [order[start : start + size] for start in range(0, len(order), size)]
    if size > 2 and len(cut) > 1 and len(cut[-1]) == 1:
        cut[-2:] = [cut[-2] + cut[-1]]
    return [tuple(sorted(group)) for group in cut]


def ring_pairs(round_number: int, peers: Collection[PeerId]) -> list[Group]:
    order = sorted(peers)
    if round_number % 2 and len(order) % 2 == 0:
        order = order[1:] + order[:1]
    elif round_number % 2:
        return [tuple(order[:1]), *_pairs(order[1:])]
    return _pairs(order)


def _pairs(order: Sequence[PeerId]) -> list[Group]:
    return [tuple(sorted(order[start : start + 2])) for start in range(0, len(order), 2)]


def exponential_pairs(round_number: int, peers: Collection[PeerId]) -> list[Group]:
    """Where the number of peers is no power of two, whose partner's place is empty stays alone."""
    order = sorted(peers)
    distance = 1 << round_number % max(1, (len(order) - 1).bit_length())
    places = (tuple(sorted({place, place ^ distance})) for place in range(len(order)) if place < place ^ distance)
    found = [tuple(order[place] for place in pair if place < len(order)) for pair in places]
    alone = set(order).difference(*found)
    return sorted([*found, *((peer,) for peer in alone)])


@lru_cache(maxsize=64)
def groups_by_peer(settings: RoundSettings, round_number: int, senders: Group) -> Mapping[PeerId, frozenset[PeerId]]:
    """Of every sender on the roster of that round, with whom it exchanges, itself included."""
    if settings.exchange != "groups":
        return dict.fromkeys(senders, frozenset(senders))
    if settings.pattern == "ring":
        cut = ring_pairs(round_number, senders)
    elif settings.pattern == "exponential":
        cut = exponential_pairs(round_number, senders)
    else:
        seed = hashlib.sha256(f"murmur groups {settings.run_id} {round_number}".encode()).digest()
        cut = random_groups(seed, senders, settings.group_size)
    return {peer: frozenset(group) for group in cut for peer in group}


def contributions_for(commit: Commit, me: PeerId, settings: RoundSettings) -> tuple[SignedMessage[Contribution], ...]:
    """The contributions that are for us to apply, in the order of the commit.

    In a round of groups these are those of our group; none where our own is not included: whoever gives nothing takes
    nothing, so that the mean over all peers stays what it was. In any other round they are all.
    """
    if settings.exchange != "groups":
        return commit.contributions
    included = [entry.sender for entry in commit.contributions]
    if me not in included:
        return ()
    group = groups_by_peer(settings, commit.round, tuple(sorted(commit.roster_peers)))[me]
    return tuple(entry for entry in commit.contributions if entry.sender in group)


@dataclass(frozen=True)
class AppliedContributions:
    """`parts`: of the contributions of `peers`; `size`: of these together, in bytes."""

    peers: tuple[PeerId, ...]
    part_count: int
    total_bytes: int

    @classmethod
    def of(cls, contributions: Sequence[SignedMessage[Contribution]]) -> Self:
        """`share`: the contributions that were applied."""
        blobs = blobs_of(contributions)
        return cls(tuple(entry.sender for entry in contributions), len(blobs), sum(blob.size for blob in blobs))
