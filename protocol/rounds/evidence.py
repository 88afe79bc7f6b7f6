"""What one peer knows in one round: contributions, who holds which blob, proposals and who acknowledged them.

It only ever grows and depends on no order, so duplicates and reordering cannot harm it. All of it is bounded: one
contribution, one newest holding and acknowledgement a member, a few proposals in all.
"""

from collections.abc import Iterable, Set

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Electorate
from protocol.rounds.reports import Acknowledgement, Decision, Holding
from protocol.rounds.statements import MAX_HELD, NO_ROSTER, Commit, Contribution, Digest, Listing, Statement

MAX_PROPOSALS = 256


class Evidence:
    """`proofs`: of every proposal, the newest decision that we were told."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.contributions: dict[PeerId, Statement[Contribution]] = {}
        self._senders: set[PeerId] = set()  # of these
        self.held: set[Digest] = set()
        self.holdings: dict[PeerId, Statement[Holding]] = {}
        self.moved: set[PeerId] = set()  # who has left the first view
        self.proposals: dict[Digest, Statement[Commit]] = {}
        self.acknowledged: dict[Digest, dict[PeerId, Statement[Acknowledgement]]] = {}
        self.proofs: dict[Digest, Statement[Decision]] = {}
        self._newest: dict[PeerId, Statement[Acknowledgement]] = {}
        self._stocks: dict[PeerId, set[Digest]] = {}
        self._holders: dict[Digest, set[PeerId]] = {}

    def learn_contribution(self, statement: Statement[Contribution]) -> bool:
        """False: its sender has already made another one, which stays."""
        self._senders.add(statement.sender)
        return self.contributions.setdefault(statement.sender, statement).digest == statement.digest

    def learn_contributions(self, body: Listing) -> list[PeerId]:
        """The senders of those that are not what they have made before."""
        if body.by_sender.items() <= self.contributions.items():
            return []
        return [entry.sender for entry in body.contributions if not self.learn_contribution(entry)]

    def learn_holding(self, statement: Statement[Holding]) -> None:
        sender = statement.sender
        if self._is_newer(statement):
            self.holdings[sender] = statement
            if statement.body.view:
                self.moved.add(sender)
        stock = self._stocks.setdefault(sender, set())
        fresh = [digest for digest in statement.body.blobs if digest not in stock]
        if len(stock) + len(fresh) <= MAX_HELD:
            stock.update(fresh)
            for digest in fresh:
                self._holders.setdefault(digest, set()).add(sender)

    def learn_acknowledgement(self, statement: Statement[Acknowledgement]) -> None:
        known = self._newest.get(statement.sender)
        if known is None or statement.body.view >= known.body.view:
            self._newest[statement.sender] = statement
        if statement.body.proposal in self.proposals:
            self.acknowledged[statement.body.proposal].setdefault(statement.sender, statement)

    def learn_proposal(self, statement: Statement[Commit]) -> None:
        if statement.digest in self.proposals:
            return
        if len(self.proposals) >= MAX_PROPOSALS:
            oldest = min(self.proposals, key=lambda digest: self.proposals[digest].body.view)
            del self.proposals[oldest], self.acknowledged[oldest]
            self.proofs.pop(oldest, None)
        self.proposals[statement.digest] = statement
        # Acknowledgements may have overtaken the proposal that they acknowledge.
        self.acknowledged[statement.digest] = {
            peer: known for peer, known in self._newest.items() if known.body.proposal == statement.digest
        }

    def learn_decision(self, statement: Statement[Decision], members: Set[PeerId]) -> None:
        proposal, votes = statement.body.proposal, statement.body.by_sender
        if proposal not in self.proposals:
            for acknowledgement in votes.values():
                if acknowledgement.sender in members:
                    self.learn_acknowledgement(acknowledgement)
            return
        self.proofs[proposal] = statement
        known = votes if votes.keys() <= members else {peer: votes[peer] for peer in votes.keys() & members}
        self.acknowledged[proposal].update(known)

    def _is_newer(self, statement: Statement[Holding]) -> bool:
        known = self.holdings.get(statement.sender)
        if known is None or statement.body.view != known.body.view:
            return known is None or statement.body.view > known.body.view
        if statement.body.roster == known.body.roster:
            return len(statement.body.blobs) >= len(known.body.blobs)
        return statement.body.roster != NO_ROSTER

    def holds(self, peer: PeerId, digest: Digest) -> bool:
        return digest in self.stock(peer)

    def stock(self, peer: PeerId) -> Set[Digest]:
        """What that peer is known to hold."""
        return self.held if peer == self.me else self._stocks.get(peer, frozenset())

    def holds_all(self, peer: PeerId, blobs: Iterable[Blob]) -> bool:
        stock = self.stock(peer)
        return all(blob.digest in stock for blob in blobs)

    def holders(self, digest: Digest, among: Set[PeerId]) -> list[PeerId]:
        """But for us, ascending."""
        return sorted(peer for peer in self._holders.get(digest, ()) if peer in among and peer != self.me)

    def is_obtainable(self, contribution: Statement[Contribution], part: int, live: frozenset[PeerId]) -> bool:
        """Whether somebody alive can still give out that part; its owner always can."""
        if contribution.sender in live or contribution.sender == self.me:
            return True
        digest = contribution.body.parts[part].digest
        return digest in self.held or not live.isdisjoint(self._holders.get(digest, ()))

    def obtainable(self, live: frozenset[PeerId]) -> Set[PeerId]:
        """The senders of contributions of which no part is lost."""
        if self._senders <= live:
            return self._senders
        absent = [self.contributions[peer] for peer in self._senders - live]
        lost = {
            contribution.sender
            for contribution in absent
            if not all(self.is_obtainable(contribution, part, live) for part in range(len(contribution.body.parts)))
        }
        return self._senders - lost

    def bound_to(self, digest: Digest) -> set[PeerId]:
        """Who is known to have acknowledged that proposal."""
        told = {peer for peer, holding in self.holdings.items() if holding.body.lock == digest}
        return told | self.acknowledged[digest].keys()

    def decided(self, electorate: Electorate) -> Statement[Commit] | None:
        """The proposal that a majority acknowledged."""
        for digest, proposal in self.proposals.items():
            if electorate.is_quorum(self.acknowledged[digest].keys()):
                return proposal
        return None
