"""What one peer knows in one round: contributions, who holds which blob, proposals and who acknowledged them.

It hardly depends on any order, so duplicates and reordering cannot harm it. All of it is bounded by member: one
contribution, the newest holding and acknowledgement, a few proposals, and of the blobs that it says it holds as many as
there are. Those who have left may have contributed before, so others name them; but no more than fit on a roster.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from protocol.blobs.blob import Blob
from protocol.consensus.message_kinds import Acknowledgement, CommitCertificate, Inventory
from protocol.consensus.messages import (
    MAX_CONTRIBUTIONS,
    NO_ROSTER,
    Commit,
    Contribution,
    ContributionList,
    Digest,
    PartBlob,
    SignedMessage,
)
from protocol.consensus.quorum import VoterSet
from protocol.identity import PeerId

MAX_PROPOSALS = 256
MAX_PROPOSALS_PER_PEER = 4  # but for those that somebody else is bound to


class RoundKnowledge:
    """`proofs`: of every proposal, the newest decision that we were told."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.contributions: dict[PeerId, SignedMessage[Contribution]] = {}
        self._senders: set[PeerId] = set()  # of these
        self.held_parts: set[PartBlob] = set()
        self.held_sizes: dict[Digest, int] = {}  # of the blobs that we hold
        self.inventories: dict[PeerId, Inventory] = {}  # without their lists
        self._inventory_sizes: dict[PeerId, int] = {}  # how long these were
        self.in_later_view: set[PeerId] = set()  # who has left the first view
        self.proposals: dict[Digest, SignedMessage[Commit]] = {}
        self.acknowledgements: dict[Digest, dict[PeerId, SignedMessage[Acknowledgement]]] = {}
        self.certificates: dict[Digest, SignedMessage[CommitCertificate]] = {}
        self._latest_acknowledgements: dict[PeerId, SignedMessage[Acknowledgement]] = {}
        self._held_by_peer: dict[PeerId, set[Digest]] = {}
        self._holders: dict[Digest, set[PeerId]] = {}

    def add_held_parts(self, part_blobs: Iterable[PartBlob]) -> None:
        """They are in our store, and well-formed."""
        self.held_parts.update(part_blobs)
        self.held_sizes.update((portion.blob.digest, portion.blob.size) for portion in part_blobs)

    def learn_contribution(self, message: SignedMessage[Contribution]) -> bool:
        """False: its sender has already made another one, which stays."""
        self._senders.add(message.sender)
        return self.contributions.setdefault(message.sender, message).digest == message.digest

    def learn_contributions(self, contribution_list: ContributionList, members: Set[PeerId]) -> list[PeerId]:
        """As others tell them. The senders of those that are not what they have made before."""
        if contribution_list.by_sender.items() <= self.contributions.items():
            return []
        room = MAX_CONTRIBUTIONS - len(self._senders - members)
        fresh = contribution_list.by_sender.keys() - self._senders - members
        crowding = set(sorted(fresh)[max(0, room) :])
        listed = [entry for entry in contribution_list.contributions if entry.sender not in crowding]
        return [entry.sender for entry in listed if not self.learn_contribution(entry)]

    def learn_inventory(self, message: SignedMessage[Inventory], max_blobs: int) -> None:
        """`most`: as many blobs as there are to be held, as far as we know. Whoever said more over time is believed for
        what it says now."""
        sender, body = message.sender, message.body
        if self._is_newer(message):
            self.inventories[sender], self._inventory_sizes[sender] = replace(body, blobs=()), len(body.blobs)
            if body.view:
                self.in_later_view.add(sender)
        if len(body.blobs) > max_blobs:
            return
        stock = self._held_by_peer.setdefault(sender, set())
        if len(stock.union(body.blobs)) > max_blobs:
            self._forget_held_blobs(sender)
        for digest in body.blobs:
            if digest not in stock:
                stock.add(digest)
                self._holders.setdefault(digest, set()).add(sender)

    def _forget_held_blobs(self, peer: PeerId) -> None:
        for digest in self._held_by_peer[peer]:
            self._holders[digest].discard(peer)
            if not self._holders[digest]:
                del self._holders[digest]
        self._held_by_peer[peer].clear()

    def learn_acknowledgement(self, message: SignedMessage[Acknowledgement]) -> None:
        known = self._latest_acknowledgements.get(message.sender)
        if known is None or message.body.view >= known.body.view:
            self._latest_acknowledgements[message.sender] = message
        if message.body.proposal in self.proposals:
            self.acknowledgements[message.body.proposal].setdefault(message.sender, message)

    def learn_proposal(self, message: SignedMessage[Commit]) -> None:
        if message.digest in self.proposals:
            return
        own = [digest for digest, known in self.proposals.items() if known.sender == message.sender]
        loose = [digest for digest in own if not self.has_other_acknowledgers(digest)]
        if len(loose) >= MAX_PROPOSALS_PER_PEER:
            self._drop_oldest(loose)
        elif len(self.proposals) >= MAX_PROPOSALS:
            self._drop_oldest(self.proposals)
        self.proposals[message.digest] = message
        # Acknowledgements may have overtaken the proposal that they acknowledge.
        self.acknowledgements[message.digest] = {
            peer: known
            for peer, known in self._latest_acknowledgements.items()
            if known.body.proposal == message.digest
        }

    def _drop_oldest(self, digests: Iterable[Digest]) -> None:
        proposals = self.proposals
        oldest = min(digests, key=lambda digest: proposals[digest].body.view)
        del self.proposals[oldest], self.acknowledgements[oldest]
        self.certificates.pop(oldest, None)

    def learn_certificate(self, message: SignedMessage[CommitCertificate], members: Set[PeerId]) -> None:
        proposal, votes = message.body.proposal, message.body.by_sender
        if proposal not in self.proposals:
            for acknowledgement in votes.values():
                if acknowledgement.sender in members:
                    self.learn_acknowledgement(acknowledgement)
            return
        self.certificates[proposal] = message
        known = votes if votes.keys() <= members else {peer: votes[peer] for peer in votes.keys() & members}
        self.acknowledgements[proposal].update(known)

    def _is_newer(self, message: SignedMessage[Inventory]) -> bool:
        known = self.inventories.get(message.sender)
        if known is None or message.body.view != known.view:
            return known is None or message.body.view > known.view
        if message.body.roster == known.roster:
            return len(message.body.blobs) >= self._inventory_sizes[message.sender]
        return message.body.roster != NO_ROSTER

    def has_blob(self, peer: PeerId, digest: Digest) -> bool:
        return digest in self.held_digests(peer)

    def held_digests(self, peer: PeerId) -> Set[Digest]:
        """What that peer is known to hold."""
        return self.held_sizes.keys() if peer == self.me else self._held_by_peer.get(peer, frozenset())

    def has_all_parts(self, peer: PeerId, part_blobs: Iterable[PartBlob]) -> bool:
        """Of others we know no more than digests; our own vote is for what we have checked."""
        if peer == self.me:
            return self.held_parts.issuperset(part_blobs)
        stock = self.held_digests(peer)
        return all(portion.blob.digest in stock for portion in part_blobs)

    def has_local_blob(self, blob: Blob) -> bool:
        return self.held_sizes.get(blob.digest) == blob.size

    def holders(self, digest: Digest, among: Set[PeerId]) -> list[PeerId]:
        """But for us, ascending."""
        return sorted(peer for peer in self._holders.get(digest, ()) if peer in among and peer != self.me)

    def is_obtainable(
        self, contribution: SignedMessage[Contribution], parts: Iterable[int], live: frozenset[PeerId]
    ) -> bool:
        """Whether all these parts can still be had of somebody alive; its owner can always give them out."""
        if contribution.sender in live or contribution.sender == self.me:
            return True
        blobs = (contribution.body.parts[part] for part in parts)
        return all(
            self.has_local_blob(blob) or not live.isdisjoint(self._holders.get(blob.digest, ())) for blob in blobs
        )

    def obtainable_senders(self, live: frozenset[PeerId]) -> Set[PeerId]:
        """The senders of contributions of which no part is lost."""
        if self._senders <= live:
            return self._senders
        absent = [self.contributions[peer] for peer in self._senders - live]
        lost = {entry.sender for entry in absent if not self.is_obtainable(entry, range(len(entry.body.parts)), live)}
        return self._senders - lost

    def acknowledgers(self, digest: Digest) -> set[PeerId]:
        """Who is known to have acknowledged that proposal."""
        told = {peer for peer, holding in self.inventories.items() if holding.lock == digest}
        return told | self.acknowledgements[digest].keys()

    def has_other_acknowledgers(self, digest: Digest) -> bool:
        """Whether anybody but its proposer is."""
        return not self.acknowledgers(digest) <= {self.proposals[digest].sender}

    def decided_proposal(self, voter_set: VoterSet) -> SignedMessage[Commit] | None:
        """The proposal that a majority acknowledged."""
        for digest, proposal in self.proposals.items():
            if voter_set.is_quorum(self.acknowledgements[digest].keys()):
                return proposal
        return None
