"""Define the events that the round loop handles. PURE.

Events and actions are values: a log of the events with their times replays a node's part in a run exactly.
"""

from dataclasses import dataclass
from typing import Any

from node.daemon.state.outer_state import SignedContributions
from node.loop.peers.catch_up import SyncOffer
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.events import (
    MisbehaviourSeen,
    PartReduced,
    RejectReason,
)
from protocol.consensus.messages.contributions import PartBlob
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId


@dataclass(frozen=True)
class SwarmChanged:
    """The swarm view has changed, or may have."""

    snapshot: SwarmSnapshot


@dataclass(frozen=True)
class MessagesReceived:
    """`sender` delivered these verified messages; it need not have signed all of them."""

    sender: PeerId
    messages: tuple[SignedMessage[Any], ...]


@dataclass(frozen=True)
class ContributionReady:
    """The contribution tracker has a new pending contribution, whose blobs are in the store."""


@dataclass(frozen=True)
class BlobFetched:
    """Answers FetchBlob: the blob is complete in our store, and well-formed as that part."""

    opening: int
    part_blob: PartBlob


@dataclass(frozen=True)
class BlobMissing:
    """Answers FetchBlob: these owners deny that they have the blob, or it does not decode."""

    opening: int
    owners: tuple[PeerId, ...]
    reason: RejectReason


@dataclass(frozen=True)
class SumReady:
    """Answers ReducePart."""

    opening: int
    result: PartReduced


@dataclass(frozen=True)
class VotePersisted:
    """Answers VoteRecord: the vote is on disk, and so are the blobs that it requires."""


@dataclass(frozen=True)
class TrainerStarted:
    """Answers StartTrainer."""


@dataclass(frozen=True)
class CommitComputed:
    """Answers ApplyCommit: the next state is computed from these contributions; nothing has changed yet."""

    contributions: SignedContributions


@dataclass(frozen=True)
class CommitApplied:
    """Answers AdvanceState: the chain ends with the commit, and `state` is the digest of the state after it."""

    state: Digest


@dataclass(frozen=True)
class ApplyFailed:
    """Answers ApplyCommit when a blob is unavailable or does not decode. Nothing has changed."""

    reason: str


@dataclass(frozen=True)
class PathFound:
    """Answers FindPath: the chain that the peer shows, which nothing but its signatures has verified."""

    offer: SyncOffer


@dataclass(frozen=True)
class StateFetched:
    """Answers FetchState: the state is in our store."""


@dataclass(frozen=True)
class StateInstalled:
    """Answers TakeState: chain and outer state are those of the offer."""

    state: Digest


@dataclass(frozen=True)
class SyncFailed:
    """Answers FindPath or TakeState. `has_vanished`: no peer has the blob any more. Nothing has changed."""

    reason: str
    has_vanished: bool = False


@dataclass(frozen=True)
class HeadPublished:
    """Answers PublishHead and AdoptState: the next round may open."""


@dataclass(frozen=True)
class RevisionsChanged:
    """The node knows revisions of the organiser that it did not know before."""


@dataclass(frozen=True)
class Started:
    """The node is on the network; the first event."""


@dataclass(frozen=True)
class NodeLeaving:
    """The node leaves; from now on the loop only answers peers that ask about decided rounds."""


@dataclass(frozen=True)
class TimePassed:
    """The deadline of `RoundLoop.next_deadline` has passed."""


LoopEvent = (
    SwarmChanged
    | MessagesReceived
    | MisbehaviourSeen
    | ContributionReady
    | BlobFetched
    | BlobMissing
    | SumReady
    | VotePersisted
    | TrainerStarted
    | CommitComputed
    | CommitApplied
    | ApplyFailed
    | PathFound
    | StateFetched
    | StateInstalled
    | SyncFailed
    | HeadPublished
    | RevisionsChanged
    | Started
    | NodeLeaving
    | TimePassed
)
