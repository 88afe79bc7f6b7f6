"""Events of the round machine, and the actions that it returns.

Events report to the machine; actions instruct its driver. Both are values, so a log of the events with their times
replays a round exactly.
"""

from dataclasses import dataclass
from typing import Any, Literal

from protocol import murmur_pb2 as wire
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Commit, Contribution, PartBlob
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId


@dataclass(frozen=True)
class EarlySubmitPolicy:
    """The time at which the machine asks for an early contribution.

    It asks `margin_seconds` before the grace of the others ends, provided that one of them has contributed at least
    `min_full_tokens`. `awaits_half`: the grace begins once half of them have contributed; for a peer that has come in
    the middle of the round it begins with the first one, so that the others need not wait until it has made all steps.
    """

    margin_seconds: float
    min_full_tokens: int
    awaits_half: bool = True


@dataclass(frozen=True)
class MembershipChanged:
    """The live peers whose records name this round and base; this peer is among them if it trains.

    `departed`: peers that said goodbye; they lose their vote at once. `resting`: live peers that do not train at the
    moment; they vote and hold blobs like all others, but no peer waits for their contribution. `ahead`: peers on the
    chain that this peer should move to. They may have decided this round, and so keep their votes in it. `trainers`:
    all live trainers of the run, wherever their chains end: their contributions may be on a roster. `excluded`: keys
    whose misdeeds are proved. `doubted`: those of them that this peer alone excludes, because no proof can be passed
    on: the rosters of others may list them. `missed`: peers that vanished for most of the run, not for us alone.
    `ended`: peers that vanished because their process did. `set_aside`: peers that neither reduce nor delay a roster.
    `not_leading`: peers that lead no early view. `arriving`: trainers that may have neither a vote nor our head yet,
    but will soon: a roster waits for them within the patience of this peer.
    """

    peers: frozenset[PeerId]
    departed: frozenset[PeerId] = frozenset()
    resting: frozenset[PeerId] = frozenset()
    ahead: frozenset[PeerId] = frozenset()
    trainers: frozenset[PeerId] = frozenset()
    excluded: frozenset[PeerId] = frozenset()
    doubted: frozenset[PeerId] = frozenset()
    missed: frozenset[PeerId] = frozenset()
    ended: frozenset[PeerId] = frozenset()
    set_aside: frozenset[PeerId] = frozenset()
    not_leading: frozenset[PeerId] = frozenset()
    arriving: frozenset[PeerId] = frozenset()


@dataclass(frozen=True)
class LocalContribution:
    """A contribution of the local trainer, with its blobs in the store; the machine signs and announces it."""

    contribution: Contribution


@dataclass(frozen=True)
class MessageReceived:
    """A checked message of another peer."""

    message: SignedMessage[Any]


@dataclass(frozen=True)
class MisbehaviourSeen:
    """`peer` has signed a statement about `round` that no honest peer signs: forged inside, malformed or too large."""

    peer: PeerId
    round: int


@dataclass(frozen=True)
class ContributionFaulty:
    """`peer` denies that it has a part of its own contribution, or the part does not decode."""

    peer: PeerId
    reason: "RejectReason"


@dataclass(frozen=True)
class BlobAvailable:
    """A blob that is complete in the store and valid as that part: the answer to Fetch."""

    part_blob: PartBlob


@dataclass(frozen=True)
class PartReduced:
    """The result of a Reduce with the same `part` and `request_id`; its blob is in the store."""

    part: int
    request_id: int
    blob: Blob


@dataclass(frozen=True)
class Tick:
    """The passing of time; see `RoundMachine.next_deadline`."""


Event = (
    MembershipChanged
    | LocalContribution
    | MessageReceived
    | MisbehaviourSeen
    | ContributionFaulty
    | BlobAvailable
    | PartReduced
    | Tick
)

RejectReason = Literal[
    "wrong round",  # a message of another round, another base or another kind of exchange
    "not a member",  # a message of a peer that is not a voter in this round
    "equivocation",  # two different messages where a peer may send one
    "late",  # a contribution that missed the roster
    "left out",  # a contribution that is not in the commit
    "not fetched",  # a contribution that no peer could fetch in time
    "not served",  # a contribution whose sender says that it lacks a part of it
    "does not decode",  # a contribution of which a part does not decode
    "not the leader",  # a roster of a peer that does not lead that view
    "stale view",  # a message of a view that is over
    "view too far",  # a roster of a view that is too far ahead
    "other revisions",  # a commit that does not continue the list of revisions that this chain has adopted
    "unknown contributor",  # a roster or commit with a contribution of a key that does not train in this run
    "forgets a decision",  # a commit of a later view that is not what the promises in it require
    "false proposal",  # a commit with contributions or sums that it may not have, or a forged statement of a leader
    "wrong sum",  # a reduced part that is not the sum of its inputs
    "other basis",  # an acknowledgement after another state, electorate or number of tokens
    "smaller roster",  # a roster of another leader, with fewer contributions than the current one
    "leader left",
    "leader silent",
    "leader moved on",  # to a later view
    "not followed",  # a view led by this peer that no majority has joined
    "exchange stalled",
    "outvoted",  # the peers outside later views are not a majority
    "reducer left",
    "reducer silent",
    "excluded",  # a message of a key whose misdeeds are proved
    "proved",  # a proof that excludes a key
    "slow disk",  # a message that waited for a vote to be written, with too many others
]


@dataclass(frozen=True)
class Lock:
    """A proposal, and the acknowledgements of a quorum."""

    proposal: SignedMessage[Commit]
    certificate: SignedMessage[Any]  # a CommitCertificate


@dataclass(frozen=True)
class VoteRecord:
    """The promise of a peer in the round that continues `base`: it joins no view up to `view` a second time.

    An acceptor of Paxos may vote again after a restart only if it remembers its last vote. As an action: no later
    action may be carried out before the record is on disk. After a restart (or when the same round is opened again)
    the new machine takes the last record, begins in the view after it and keeps the lock. So a peer does not have to
    remember its messages in earlier views.

    `lock`: the newest proposal that the peer acknowledged. `confirmed`: the newest one that it confirmed. `members`:
    the members; a restarted peer that sees none of them still counts them until their votes are forgotten.
    `required_blobs`: the blobs that these proposals need. Those that the peer holds must be on disk before the record,
    because no other peer may have them any more; it holds all that it has acknowledged.
    """

    round: int
    base: Digest
    view: int
    lock: SignedMessage[Commit] | None
    members: frozenset[PeerId]
    required_blobs: tuple[Blob, ...] = ()
    confirmed: Lock | None = None


@dataclass(frozen=True)
class Send:
    """Send a message to these peers."""

    peers: tuple[PeerId, ...]
    signed: wire.Signed


@dataclass(frozen=True)
class Fetch:
    """Download a blob, unless an earlier process left it in the store.

    `sources`: in order of preference; the action is repeated when they change, and there may be none at first.
    `is_reduced`: the blob is a sum over contributions. `owners`: peers that named it in a contribution of their own, so
    that they have to have it; an answer may be that one of them is at fault.
    """

    part_blob: PartBlob
    sources: tuple[PeerId, ...]
    is_reduced: bool = False
    owners: tuple[PeerId, ...] = ()


@dataclass(frozen=True)
class Reduce:
    """Sum one part of these contributions in this order and answer with PartReduced; all blobs are in the store.

    `request_id`: a number that the answer repeats.
    """

    part: int
    request_id: int
    contributions: tuple[SignedMessage[Contribution], ...]


@dataclass(frozen=True)
class Finish:
    """End the round with this commit; the driver still has to fetch the blobs that the store lacks."""

    commit: SignedMessage[Commit]


@dataclass(frozen=True)
class Rejected:
    """Report a message, contribution or leader that was rejected, for the log and the counters."""

    peer: PeerId | None
    reason: RejectReason


@dataclass(frozen=True)
class RequestEarlySubmit:
    """Ask the trainer for its contribution, because the grace of the others is about to end; once per round."""


@dataclass(frozen=True)
class Speculate:
    """Compute the state after a commit that will most likely be decided; all its blobs are in the store."""

    commit: Commit


Action = VoteRecord | Send | Fetch | Reduce | Finish | Rejected | RequestEarlySubmit | Speculate
