"""What one peer knows in one round: contributions, who holds which blob, proposals and who acknowledged them.

It hardly depends on any order, so duplicates and reordering cannot harm it. All of it is bounded by member: one
contribution, the newest holding and acknowledgement, a few proposals, and of the blobs that it says it holds as many as
there are. Those who have left may have contributed before, so others name them; but no more than fit on a roster.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Electorate
from protocol.rounds.reports import Acknowledgement, Decision, Holding
from protocol.rounds.statements import (
    MAX_CONTRIBUTIONS,
    NO_ROSTER,
    Commit,
    Contribution,
    Digest,
    Listing,
    Portion,
    Statement,
)

MAX_PROPOSALS = 256
MAX_PROPOSALS_EACH = 4  # but for those that somebody else is bound to


class Evidence:
    """`proofs`: of every proposal, the newest decision that we were told."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.contributions: dict[PeerId, Statement[Contribution]] = {}
        self._senders: set[PeerId] = set()  # of these
        self.held: set[Portion] = set()
        self.sizes: dict[Digest, int] = {}  # of the blobs that we hold
        self.holdings: dict[PeerId, Holding] = {}  # without their lists
        self._reported: dict[PeerId, int] = {}  # how long these were
        self.moved: set[PeerId] = set()  # who has left the first view
        self.proposals: dict[Digest, Statement[Commit]] = {}
        self.acknowledged: dict[Digest, dict[PeerId, Statement[Acknowledgement]]] = {}
        self.proofs: dict[Digest, Statement[Decision]] = {}
        self._newest: dict[PeerId, Statement[Acknowledgement]] = {}
        self._stocks: dict[PeerId, set[Digest]] = {}
        self._holders: dict[Digest, set[PeerId]] = {}

    def hold(self, portions: Iterable[Portion]) -> None:
        """They are in our store, and well-formed."""
        self.held.update(portions)
        self.sizes.update((portion.blob.digest, portion.blob.size) for portion in portions)

    def learn_contribution(self, statement: Statement[Contribution]) -> bool:
        """False: its sender has already made another one, which stays."""
        self._senders.add(statement.sender)
        return self.contributions.setdefault(statement.sender, statement).digest == statement.digest

    def learn_contributions(self, body: Listing, members: Set[PeerId]) -> list[PeerId]:
        """As others tell them. The senders of those that are not what they have made before."""
        if body.by_sender.items() <= self.contributions.items():
            return []
        room = MAX_CONTRIBUTIONS - len(self._senders - members)
        fresh = body.by_sender.keys() - self._senders - members
        crowding = set(sorted(fresh)[max(0, room) :])
        listed = [entry for entry in body.contributions if entry.sender not in crowding]
        return [entry.sender for entry in listed if not self.learn_contribution(entry)]

    def learn_holding(self, statement: Statement[Holding], most: int) -> None:
        """`most`: as many blobs as there are to be held, as far as we know. Whoever said more over time is believed for
        what it says now."""
        sender, body = statement.sender, statement.body
        if self._is_newer(statement):
            self.holdings[sender], self._reported[sender] = replace(body, blobs=()), len(body.blobs)
            if body.view:
                self.moved.add(sender)
        if len(body.blobs) > most:
            return
        stock = self._stocks.setdefault(sender, set())
        if len(stock.union(body.blobs)) > most:
            self._forget_stock(sender)
        for digest in body.blobs:
            if digest not in stock:
                stock.add(digest)
                self._holders.setdefault(digest, set()).add(sender)

    def _forget_stock(self, peer: PeerId) -> None:
        for digest in self._stocks[peer]:
            self._holders[digest].discard(peer)
            if not self._holders[digest]:
                del self._holders[digest]
        self._stocks[peer].clear()

    def learn_acknowledgement(self, statement: Statement[Acknowledgement]) -> None:
        known = self._newest.get(statement.sender)
        if known is None or statement.body.view >= known.body.view:
            self._newest[statement.sender] = statement
        if statement.body.proposal in self.proposals:
            self.acknowledged[statement.body.proposal].setdefault(statement.sender, statement)

    def learn_proposal(self, statement: Statement[Commit]) -> None:
        if statement.digest in self.proposals:
            return
        own = [digest for digest, known in self.proposals.items() if known.sender == statement.sender]
        loose = [digest for digest in own if not self.is_backed(digest)]
        if len(loose) >= MAX_PROPOSALS_EACH:
            self._drop_oldest(loose)
        elif len(self.proposals) >= MAX_PROPOSALS:
            self._drop_oldest(self.proposals)
        self.proposals[statement.digest] = statement
        # Acknowledgements may have overtaken the proposal that they acknowledge.
        self.acknowledged[statement.digest] = {
            peer: known for peer, known in self._newest.items() if known.body.proposal == statement.digest
        }

    def _drop_oldest(self, digests: Iterable[Digest]) -> None:
        oldest = min(digests, key=lambda digest: self.proposals[digest].body.view)
        del self.proposals[oldest], self.acknowledged[oldest]
        self.proofs.pop(oldest, None)

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
        if known is None or statement.body.view != known.view:
            return known is None or statement.body.view > known.view
        if statement.body.roster == known.roster:
            return len(statement.body.blobs) >= self._reported[statement.sender]
        return statement.body.roster != NO_ROSTER

    def holds(self, peer: PeerId, digest: Digest) -> bool:
        return digest in self.stock(peer)

    def stock(self, peer: PeerId) -> Set[Digest]:
        """What that peer is known to hold."""
        return self.sizes.keys() if peer == self.me else self._stocks.get(peer, frozenset())

    def holds_all(self, peer: PeerId, portions: Iterable[Portion]) -> bool:
        """Of others we know no more than digests; our own vote is for what we have checked."""
        if peer == self.me:
            return self.held.issuperset(portions)
        stock = self.stock(peer)
        return all(portion.blob.digest in stock for portion in portions)

    def is_here(self, blob: Blob) -> bool:
        return self.sizes.get(blob.digest) == blob.size

    def holders(self, digest: Digest, among: Set[PeerId]) -> list[PeerId]:
        """But for us, ascending."""
        return sorted(peer for peer in self._holders.get(digest, ()) if peer in among and peer != self.me)

    def is_whole(self, contribution: Statement[Contribution], parts: Iterable[int], live: frozenset[PeerId]) -> bool:
        """Whether all these parts can still be had of somebody alive; its owner can always give them out."""
        if contribution.sender in live or contribution.sender == self.me:
            return True
        blobs = (contribution.body.parts[part] for part in parts)
        return all(self.is_here(blob) or not live.isdisjoint(self._holders.get(blob.digest, ())) for blob in blobs)

    def obtainable(self, live: frozenset[PeerId]) -> Set[PeerId]:
        """The senders of contributions of which no part is lost."""
        if self._senders <= live:
            return self._senders
        absent = [self.contributions[peer] for peer in self._senders - live]
        lost = {entry.sender for entry in absent if not self.is_whole(entry, range(len(entry.body.parts)), live)}
        return self._senders - lost

    def bound_to(self, digest: Digest) -> set[PeerId]:
        """Who is known to have acknowledged that proposal."""
        told = {peer for peer, holding in self.holdings.items() if holding.lock == digest}
        return told | self.acknowledged[digest].keys()

    def is_backed(self, digest: Digest) -> bool:
        """Whether anybody but its proposer is."""
        return not self.bound_to(digest) <= {self.proposals[digest].sender}

    def decided(self, electorate: Electorate) -> Statement[Commit] | None:
        """The proposal that a majority acknowledged."""
        for digest, proposal in self.proposals.items():
            if electorate.is_quorum(self.acknowledged[digest].keys()):
                return proposal
        return None
