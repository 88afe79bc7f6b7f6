"""What goes into the round machine and what comes out of it.

Events tell the machine what happened; actions tell its driver what to do. Both are values: a log of the events with
their times replays a round exactly.
"""

from dataclasses import dataclass
from typing import Any, Literal

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.messages import Commit, Contribution, Digest, PartBlob, SignedMessage
from protocol.identity import PeerId


@dataclass(frozen=True)
class EarlySubmitPolicy:
    """When Hurry comes out: `reserve` seconds before the others' grace ends, where one of them offered so much."""

    margin_seconds: float
    min_full_tokens: int


@dataclass(frozen=True)
class MembershipChanged:
    """The peers that are alive and, by their records, at this round and base; with ourselves if we train.

    `departed`: those known to have said good-bye; they lose their vote at once. `resting`: those of the peers who say
    that they train no step for now; they vote and hold blobs like all others, but nobody waits for a contribution.
    `ahead`: those who stand where we should go. They may have decided this round, and so keep their votes in it.
    """

    peers: frozenset[PeerId]
    departed: frozenset[PeerId] = frozenset()
    resting: frozenset[PeerId] = frozenset()
    ahead: frozenset[PeerId] = frozenset()


@dataclass(frozen=True)
class LocalContribution:
    """Our own trainer's message; its blobs are in our store. The machine signs and announces it."""

    contribution: Contribution


@dataclass(frozen=True)
class MessageReceived:
    """A checked statement of another peer for this round."""

    message: SignedMessage[Any]


@dataclass(frozen=True)
class BlobAvailable:
    """A blob is complete in our store, and well-formed as that part: the answer to Fetch."""

    part_blob: PartBlob


@dataclass(frozen=True)
class PartReduced:
    """A reduction that was asked for is done, its blob in our store; `part` and `attempt` are those of the Reduce."""

    part: int
    request_id: int
    blob: Blob


@dataclass(frozen=True)
class Tick:
    """Time has passed: see `Round.next_deadline`."""


Event = MembershipChanged | LocalContribution | MessageReceived | BlobAvailable | PartReduced | Tick

RejectReason = Literal[
    "foreign",  # a statement of another round, another base or another kind of exchange
    "stranger",  # a statement of a peer that is no member of this round
    "equivocation",  # two different statements where one peer may make one
    "late",  # a contribution that missed the roster
    "left out",  # a contribution that is not in the commit
    "lost",  # a contribution that died with its owner
    "not the leader",  # a roster of a peer that does not lead that view
    "stale view",  # a statement of a view that is over
    "far view",  # a roster of a view so far ahead that nobody can take us there alone
    "poorer roster",  # of another leader, who knows of fewer contributions than the one that we follow
    "leader left",
    "leader silent",
    "leader moved on",  # to a later view, where something keeps it from leading on in this one
    "not followed",  # a view of our own that no majority has joined
    "exchange stalled",
    "outvoted",  # so many are in a later view that the others decide nothing
    "reducer left",
    "reducer silent",
    "slow disk",  # a message of ours that waited for a vow, with too many others
]


@dataclass(frozen=True)
class VoteRecord:
    """What binds a peer in the round that continues `base`: it takes no part in a view up to `view` a second time.

    An acceptor of Paxos may vote again after a restart only if it remembers how it voted. As an action: nothing that
    follows may leave this process before the vow is on disk. A peer that comes back (or opens the same round again)
    hands the last one to the new machine, which begins in the view after it and brings the lock along: so it need not
    remember what it said in the views before. `lock`: the newest proposal that it acknowledged. `members`: those of
    whom a majority decides; until they are given up, they count for whoever comes back and sees nobody. `rests_on`: the
    blobs that the lock is of no use without; they are to be on disk before it, as whoever comes back with the lock may
    be the only one that still has them.
    """

    round: int
    base: Digest
    view: int
    lock: SignedMessage[Commit] | None
    members: frozenset[PeerId]
    required_blobs: tuple[Blob, ...] = ()


@dataclass(frozen=True)
class Send:
    peers: tuple[PeerId, ...]
    signed: wire.Signed


@dataclass(frozen=True)
class Fetch:
    """This blob is wanted, unless an earlier process left it in our store; sources in order of preference.

    Comes again when the sources change. There may be none, of whom we know. `is_sum`: it is not a contribution's part,
    but all contributions' together.
    """

    part_blob: PartBlob
    sources: tuple[PeerId, ...]
    is_reduced: bool = False


@dataclass(frozen=True)
class Reduce:
    """Sum this part of these contributions in this order; all its blobs are in our store. Answer with Reduced.

    `attempt` is only to be handed back.
    """

    part: int
    request_id: int
    contributions: tuple[SignedMessage[Contribution], ...]


@dataclass(frozen=True)
class Finish:
    """The round is decided; whatever the commit names and our store lacks is still to be fetched."""

    commit: SignedMessage[Commit]


@dataclass(frozen=True)
class Rejected:
    """Something was refused, left out or given up: for the log and the counters."""

    peer: PeerId | None
    reason: RejectReason


@dataclass(frozen=True)
class RequestEarlySubmit:
    """The others' patience is about to end, and nothing was offered here yet. Once a round."""


@dataclass(frozen=True)
class Speculate:
    """What will most likely be decided, by whichever leader's proposal; all that it takes is here. It binds nobody."""

    commit: Commit


Action = VoteRecord | Send | Fetch | Reduce | Finish | Rejected | RequestEarlySubmit | Speculate
