"""The settings of one round, which follow from the manifest, and its start at one peer."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.consensus.events import VoteRecord
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.kinds import Basis
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.topology import Topology
from protocol.electorate import NOBODY, Electorate
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.steering import NO_REVISION, Revision


@dataclass(frozen=True)
class RoundSettings:
    """The topology and the times of a round, in seconds.

    `vote_memory`: how long a member that vanished without a goodbye still counts in every majority. Within that time
    only one side of a split network can commit; after it, each side continues alone, and the chains decide when they
    meet. `roster_quorum`: the share of the awaited members whose contributions close the roster at once (1.0: all; less
    as with backup workers and buffered aggregation, arXiv 2106.06639). Later contributions join the next round.
    `awaits_standing`: members are awaited that contributed to one of the last commits, because the round needs what
    they have (exact steps); the sums of others hold nothing.
    """

    topology: Topology
    grace: float
    leader_timeout: float
    exchange_timeout: float
    vote_memory: float = 30.0
    roster_quorum: float = 1.0
    awaits_standing: bool = False

    @property
    def run_id(self) -> RunId:
        """Return the run to which the round belongs."""
        return self.topology.run_id

    @property
    def parts(self) -> int:
        """Return how many parts each contribution consists of."""
        return self.topology.parts

    @property
    def exchange_seconds(self) -> float:
        """Return the longest time that all exchanges of blobs in a round may take."""
        return self.exchange_timeout * self.topology.exchange_count


@dataclass(frozen=True)
class RoundStart:
    """The place of a round on the chain, and the memory that a peer brings into it.

    `base`: the digest of the chain that the round continues. `last_seen`: the time at which each peer that may take
    part was last known to be alive: that of the round before, or in the first round of a process all live trainers.
    `last_vote`: the last vote record of this peer, of any round. `revision`: the newest revision that the chain has
    adopted. `new_revisions`: those with which the list goes on; if this peer leads, its commit adopts them.
    `audit_secret`: random bytes that draw the part that this peer checks. `electorate`: the keys that may vote.
    `state`: the digest of the outer state before the round; empty where peers share none. `tokens`: those of all
    rounds before. `patience`: the seconds for which a complete roster may wait for arriving peers.
    """

    number: int
    base: Digest
    last_seen: Mapping[PeerId, float] = field(default_factory=dict)
    last_vote: VoteRecord | None = None
    revision: Digest = NO_REVISION
    new_revisions: tuple[SignedMessage[Revision], ...] = ()
    audit_secret: bytes = b""
    electorate: Electorate = NOBODY
    state: Digest = b""
    tokens: int = 0
    patience: float = 0.0

    @property
    def basis(self) -> Basis:
        """Return what the acknowledgements of this peer say about the chain before the round."""
        return Basis(self.state, self.electorate.digest, self.tokens)

    @property
    def adoption(self) -> Adoption:
        """Return the revisions that a commit of this peer adopts."""
        new = self.new_revisions
        return Adoption(new[-1].digest if new else self.revision, new)
