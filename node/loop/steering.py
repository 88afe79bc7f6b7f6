"""The manifest of a round, as the chain and the organiser's revisions decide it. PURE.

The settings of a round follow from the revisions that the chain before it has adopted, so all peers on that chain have
the same ones. Only one question may be answered by revisions that no commit has adopted yet: whether a run that is
paused, or over, goes on. No round is made there that could adopt them. A peer that goes on alone harms nobody, because
a round needs a majority, and the others go on as soon as they know the same revisions.
"""

from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.messages.contributions import Adoption, Commit
from protocol.consensus.messages.signed import Digest
from protocol.errors import LimitError, StaleError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.recent import RecentTable
from protocol.steering import (
    REFERENCE_MANIFEST,
    RevisedManifest,
    Revision,
    RevisionLog,
    SignedRevision,
    manifest_of_round,
)

MAX_CACHED = 16


class Steering:
    """The manifest of a run by round.

    Args:
        base: the manifest of the run as it began.
        chain: our chain.
        log: the revisions that we know.
    """

    def __init__(self, base: Manifest, chain: Chain, log: RevisionLog) -> None:
        self.base = base
        self.log = log
        self._chain = chain
        self._cache = RecentTable[tuple[Digest, int], RevisedManifest](MAX_CACHED)

    def manifest_at(self, round_number: int) -> Manifest:
        """Return the manifest of a round after our head; its run id is not that of the run."""
        return self._revised(self._chain.head.revision, round_number).manifest

    def tokens_at(self, round_number: int) -> int | None:
        """Return the tokens of our chain after `round_number` rounds; `None` if it has dropped their commits."""
        commits = self._chain.commits_since(round_number)
        return None if commits is None else self._chain.tokens - sum(entry.body.tokens for entry in commits)

    def manifest_after(self, commit: Commit) -> Manifest:
        """Return the manifest of the round after a commit that continues our chain."""
        return self._revised(commit.adoption.newest, commit.round + 1).manifest

    @property
    def adopted(self) -> tuple[SignedRevision, ...]:
        """Return the revisions that our chain has adopted, oldest first."""
        return self.log.list_to(self._chain.head.revision) or ()

    @property
    def revisions_in_force(self) -> tuple[Revision, ...]:
        """Return the revisions that hold for the round after our head, oldest first."""
        number = self._chain.round
        return tuple(entry.body for entry in self.adopted if entry.body.from_round <= number)

    @property
    def new_revisions(self) -> tuple[SignedRevision, ...]:
        """Return the revisions that the next commit of our chain should adopt."""
        return self.log.list_after(self._chain.head.revision)

    def learn(self, adoption: Adoption) -> bool:
        """Add the revisions of a decided commit; return whether the list that it names is known now."""
        try:
            for revision in adoption.added:
                self.log.add(revision)
        except (StaleError, LimitError):
            return False
        return adoption.newest in self.log

    @property
    def is_target_reached(self) -> bool:
        """Return whether the run is over at our head; a run that is paused and stays so can be ended by any peer."""
        head = self._chain.head
        adopted, known = self._views()
        is_certain = adopted.is_target_reached(head.round, head.tokens) or (adopted.is_paused and known.is_paused)
        return is_certain and known.is_target_reached(head.round, head.tokens)

    def is_final(self, head: ChainHead) -> bool:
        """Return whether the run is over at the head of any chain, as far as we know of revisions."""
        newest = self.log.newest(self._chain.head.revision)
        return self._revised(newest, head.round).is_target_reached(head.round, head.tokens)

    def knows_all(self, snapshot: SwarmSnapshot) -> bool:
        """Return whether we know the newest revision that each live peer announces."""
        return all(state.revision in self.log for state in snapshot.peers.values())

    def final_head(self, snapshot: SwarmSnapshot, peer_id: PeerId) -> ChainHead | None:
        """Return the head at which the run is over for most other peers; None if we may lack a revision."""
        return snapshot.final_head(peer_id, self.is_final) if self.knows_all(snapshot) else None

    @property
    def is_paused(self) -> bool:
        """Return whether the organiser has paused the run at our head."""
        adopted, known = self._views()
        return adopted.is_paused and known.is_paused

    def _views(self) -> tuple[RevisedManifest, RevisedManifest]:
        """Return the manifest at our head by the revisions that are adopted, and by all that are known."""
        head = self._chain.head
        adopted = self._revised(head.revision, head.round)
        newest = self.log.newest(head.revision)
        return adopted, adopted if newest == head.revision else self._revised(newest, head.round)

    def _revised(self, newest: Digest, round_number: int) -> RevisedManifest:
        entries = self.log.list_to(newest)
        if entries is None:  # lost with a file; peers send them again
            entries = self.log.list_after(b"")
        bodies = [entry.body for entry in entries if entry.body.from_round <= round_number]
        if not bodies:
            return RevisedManifest(self.base)
        key = entries[-1].digest, len(bodies)
        if key not in self._cache:
            self._cache[key] = manifest_of_round(self.base, bodies, round_number)
        return self._cache[key]


def unsteered(base: Manifest = REFERENCE_MANIFEST) -> Steering:
    """Return the steering of a run that nobody steers and that has no target."""
    return Steering(base, Chain.from_genesis(base.run_id), RevisionLog())
