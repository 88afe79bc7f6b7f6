"""What one peer knows in one round: contributions, who holds which blob, proposals and who acknowledged them.

It only ever grows and depends on no order, so duplicates and reordering cannot harm it. All of it is bounded: one
contribution and one newest holding a member, a few proposals in all.
"""

from collections.abc import Iterable

from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.election import Electorate
from protocol.rounds.statements import MAX_HELD, NO_ROSTER, Commit, Contribution, Digest, Holding, Statement

MAX_PROPOSALS = 256


class Evidence:
    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.contributions: dict[PeerId, Statement[Contribution]] = {}
        self.held: set[Digest] = set()
        self.holdings: dict[PeerId, Statement[Holding]] = {}
        self.proposals: dict[Digest, Statement[Commit]] = {}
        self.acknowledged: dict[Digest, dict[PeerId, Statement[Holding]]] = {}
        self._holders: dict[PeerId, set[Digest]] = {}

    def learn_contribution(self, statement: Statement[Contribution]) -> bool:
        """False: its sender has already made another one, which stays."""
        return self.contributions.setdefault(statement.sender, statement).digest == statement.digest

    def learn_holding(self, statement: Statement[Holding]) -> None:
        if self._is_newer(statement):
            self.holdings[statement.sender] = statement
        facts = self._holders.setdefault(statement.sender, set())
        if len(facts) + len(statement.body.blobs) <= MAX_HELD:
            facts.update(statement.body.blobs)
        for digest in statement.body.blobs:
            if digest in self.proposals:
                self.acknowledged[digest].setdefault(statement.sender, statement)

    def learn_proposal(self, statement: Statement[Commit]) -> None:
        if statement.digest in self.proposals:
            return
        if len(self.proposals) >= MAX_PROPOSALS:
            oldest = min(self.proposals, key=lambda digest: self.proposals[digest].body.view)
            del self.proposals[oldest], self.acknowledged[oldest]
        self.proposals[statement.digest] = statement
        # Acknowledgements may have overtaken the proposal that they acknowledge.
        self.acknowledged[statement.digest] = {
            peer: holding for peer, holding in self.holdings.items() if statement.digest in holding.body.blobs
        }

    def _is_newer(self, statement: Statement[Holding]) -> bool:
        known = self.holdings.get(statement.sender)
        if known is None or statement.body.view != known.body.view:
            return known is None or statement.body.view > known.body.view
        if statement.body.roster == known.body.roster:
            return len(statement.body.blobs) >= len(known.body.blobs)
        return statement.body.roster != NO_ROSTER

    def holds(self, peer: PeerId, digest: Digest) -> bool:
        return digest in (self.held if peer == self.me else self._holders.get(peer, ()))

    def holds_all(self, peer: PeerId, blobs: Iterable[Blob]) -> bool:
        return all(self.holds(peer, blob.digest) for blob in blobs)

    def holders(self, digest: Digest, among: Iterable[PeerId]) -> list[PeerId]:
        """Ascending."""
        return sorted(peer for peer in among if self.holds(peer, digest))

    def is_obtainable(self, contribution: Statement[Contribution], part: int, live: frozenset[PeerId]) -> bool:
        """Whether somebody alive can still give out that part; its owner always can."""
        if contribution.sender in live or contribution.sender == self.me:
            return True
        digest = contribution.body.parts[part].digest
        return digest in self.held or any(self.holds(peer, digest) for peer in live)

    def obtainable(self, live: frozenset[PeerId]) -> list[Statement[Contribution]]:
        """The contributions of which no part is lost, in ascending order of their senders."""
        return [
            contribution
            for _, contribution in sorted(self.contributions.items())
            if contribution.sender in live
            or all(self.is_obtainable(contribution, part, live) for part in range(len(contribution.body.parts)))
        ]

    def decided(self, electorate: Electorate) -> Statement[Commit] | None:
        """The proposal that a majority acknowledged."""
        for digest, proposal in self.proposals.items():
            if electorate.is_quorum(self.acknowledged[digest]):
                return proposal
        return None
