"""The leader of a view: it selects the contributions, assigns the reducers and proposes a commit.

The rule that keeps two leaders from committing different things is that of Paxos. A leader proposes only after a
majority has joined its view: an inventory of its roster is the promise to acknowledge nothing older, and names the
proposal that its sender acknowledged last. If a member that joined acknowledged an older proposal, the leader proposes
the same again, the one with the highest ballot (see `rules.locks`): so nothing that may have been decided is replaced.

A proposal is decided when a majority acknowledges it. A peer acknowledges it only when it holds everything that it
needs to apply it: so a decided commit outlives any minority. Acknowledgements go to the leader, which shows those of a
majority to all. They bind their senders, whether or not anybody else knows of them: if the leader dies, the next one
learns of them with the promises.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import NamedTuple

from protocol.blobs.blob import Blob
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.messages.adoption import Adoption
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.reduction.evidence import Evidence
from protocol.consensus.rules.locks import BoundProposal, Repetition, choose_repetition
from protocol.consensus.settings import RoundSettings
from protocol.consensus.topology import Contributions
from protocol.consensus.views.quorum import Ballot, Election, VoterSet
from protocol.consensus.views.view import View
from protocol.identity import PeerId

Assignment = tuple[Contributions, tuple[PeerId, ...]]  # contributions to sum, and the reducer of each part


class Proposal(NamedTuple):
    """The content of a proposed commit; see `Commit`. Without an adoption it adopts the revisions of its leader."""

    contributions: Contributions
    parts: tuple[Blob, ...]
    left_out: tuple[PeerId, ...] = ()
    adoption: Adoption | None = None
    evidence: Evidence | None = None

    def to_commit(self, number: int, view: int, base: Digest, own: Adoption) -> Commit:
        """Return the commit with this content; `own` are the revisions that its leader adopts."""
        adoption = own if self.adoption is None else self.adoption
        content = self.contributions, self.parts, self.left_out, adoption
        return Commit(number, view, base, *content, self.evidence)


class Leader(ABC):
    """The role of the leader in one view, from its roster to its proposal; owned by the round state of the leader."""

    def __init__(
        self, settings: RoundSettings, election: Election, voter_set: VoterSet, knowledge: RoundKnowledge, view: View
    ) -> None:
        self.silent_reducers: set[PeerId] = set()  # those that announced no sum for too long
        self.false_reducers: Set[PeerId] = frozenset()  # those that announced a wrong sum
        self.set_aside: Set[PeerId] = frozenset()  # those that failed to serve in earlier rounds
        self.unusable: Set[PeerId] = frozenset()  # those whose contribution this peer cannot get or decode
        self.excluded: Set[PeerId] = frozenset()  # those whose misdeeds are proved
        self._settings = settings
        self._election = election
        self._voter_set = voter_set
        self._knowledge = knowledge
        self._view = view
        self._ready_since: float | None = None
        self._mostly_ready_since: float | None = None  # a majority holds more than half of the obtainable blobs
        self._present: frozenset[PeerId] = voter_set.live

    @property
    def _exchange_deadline(self) -> float:
        """Return the time from which the leader waits for no slow peer."""
        return self._view.started_at + self._settings.exchange_timeout

    def _update_present_peers(self, now: float) -> set[PeerId]:
        """Return the peers that joined this view; after a grace, count all others as absent."""
        joined = self.joined_peers()
        overdue = now >= self._view.started_at + self._settings.grace
        self._present = self._voter_set.live & joined if overdue else self._voter_set.live
        return joined

    def joined_peers(self) -> set[PeerId]:
        """Return the members that joined this view and whose last acknowledged proposal is known here."""
        return {self._knowledge.me} | {
            peer
            for peer, inventory in self._knowledge.inventories.items()
            if inventory.roster == self._view.roster.digest
            and (not inventory.lock or inventory.lock in self._knowledge.proposals)
        }

    def has_quorum(self) -> bool:
        """Return whether a majority has joined this view."""
        return self._voter_set.is_quorum(self.joined_peers())

    def locked_proposal(self) -> SignedMessage[Commit] | None:
        """Return the highest older proposal that any voter of this view acknowledged."""
        return found.proposal if (found := self._repetition()) else None

    def _is_doubtful(self) -> bool:
        """Return whether silent voters may know of a decision for another proposal of the same view."""
        return (found := self._repetition()) is not None and found.is_doubtful

    def _repetition(self) -> Repetition | None:
        knowledge, joined = self._knowledge, self.joined_peers() & self._voter_set.voters
        bound = [
            BoundProposal(self._ballot(entry), entry, joined & knowledge.acknowledgers(entry.digest))
            for entry in knowledge.proposals.values()
            if self._ballot(entry) < self._view.ballot and self._binds(entry, joined)
        ]
        return choose_repetition(bound, self._voter_set, joined, self.excluded)

    def _binds(self, proposal: SignedMessage[Commit], joined: Set[PeerId]) -> bool:
        """Return whether this leader has to repeat a proposal that some of these voters may have acknowledged.

        Honest voters refuse one with a wrong sum for ever, so it is given up once it cannot have been decided.
        """
        bound, evidence = joined & self._knowledge.acknowledgers(proposal.digest), proposal.body.evidence
        if not bound or evidence is None or self.false_reducers.isdisjoint(evidence.peers):
            return bool(bound)
        return self._voter_set.is_quorum(self._voter_set.voters - (joined - bound))

    def _ballot(self, proposal: SignedMessage[Commit]) -> Ballot:
        return self._election.ballot(proposal.body.view, proposal.sender)

    def has_nothing_to_propose(self) -> bool:
        """Return whether all contributions died with their owners and no member is bound to a proposal."""
        return self.has_quorum() and not self._obtainable_contributions() and self.locked_proposal() is None

    def _obtainable_contributions(self) -> Contributions:
        """Return the contributions on the roster that are neither lost nor unusable.

        If a third or more of them are unusable here, the fault may be with this peer.
        """
        senders, known = self._knowledge.obtainable_senders(self._present), self._knowledge.contributions
        listed = self._view.roster.body.contributions
        found = tuple(
            entry for entry in listed if entry.sender in senders and known[entry.sender].digest == entry.digest
        )
        usable = tuple(entry for entry in found if entry.sender not in self.unusable)
        return usable if 3 * (len(found) - len(usable)) < len(found) else found

    def next_proposal(self, now: float) -> Proposal | None:
        """Return a proposal once it is safe and worthwhile to make one."""
        joined = self._update_present_peers(now)
        if not self._voter_set.is_quorum(joined):
            return None
        locked = self.locked_proposal()
        if locked is None:
            return self._new_proposal(joined, now)
        if now < self._exchange_deadline and self._is_doubtful():
            return None
        body = locked.body
        return Proposal(body.contributions, body.parts, body.left_out, body.adoption, body.evidence)

    @abstractmethod
    def _new_proposal(self, joined: set[PeerId], now: float) -> Proposal | None:
        """Return a proposal that repeats no older one, once the members hold what they need to apply it."""

    def next_assignment(self, now: float) -> Assignment | None:
        """Return the next assignment of reducers, if one is due."""
        return None

    def _straggler_deadline(self, joined: set[PeerId], contributions: Contributions, now: float) -> float:
        """Return the time from which the leader leaves out the few contributions that a majority still lacks.

        The links of their senders are so thin that they delay all other peers. The blobs that have arrived are kept for
        the next round. Where all links are equally slow, all contributions arrive at about the same time; so the leader
        waits a grace and as long again as it took until most had arrived.
        """
        if self._mostly_ready_since is None:
            if not self._is_mostly_ready(joined, contributions):
                return math.inf
            self._mostly_ready_since = now
        return self._mostly_ready_since + self._settings.grace + (self._mostly_ready_since - self._view.started_at)

    @abstractmethod
    def _is_mostly_ready(self, joined: set[PeerId], contributions: Contributions) -> bool:
        """Return whether most peers have more than half of the parts that they wait for."""

    def _is_ready(self, joined: set[PeerId], required_blobs: Mapping[PeerId, Set[Digest]], now: float) -> bool:
        """Return whether all voters that contributed hold their blobs, or a quorum does and the others had a grace."""
        nothing = frozenset[Digest]()
        ready = {peer for peer in joined if required_blobs.get(peer, nothing) <= self._knowledge.held_digests(peer)}
        if not self._voter_set.is_quorum(ready):
            self._ready_since = None
            return False
        if self._ready_since is None:
            self._ready_since = now
        awaited = self._present.intersection(self._view.contributors) & self._voter_set.voters
        return awaited <= ready or now >= self._ready_since + self._settings.grace

    def deadlines(self) -> list[float]:
        """Return the times at which the passing of time alone may change a decision of the leader."""
        grace, started_at = self._settings.grace, self._view.started_at
        ready = [] if self._ready_since is None else [self._ready_since + grace]
        mostly = [] if self._mostly_ready_since is None else [2 * self._mostly_ready_since - started_at + grace]
        return [started_at + grace, self._exchange_deadline, *ready, *mostly]
