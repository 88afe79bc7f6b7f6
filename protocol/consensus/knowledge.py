"""The knowledge of one peer in one round: contributions, the holders of each blob, proposals and acknowledgements.

The knowledge hardly depends on the order of messages, so duplicates and reordering cannot harm it. It is bounded for
each member: one contribution, the newest inventory and acknowledgement, a few proposals, and at most as many held blobs
as exist. A peer that has left may have contributed before, so rosters may name peers that are not members; but no more
of them than fit on a roster.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from protocol.blobs.blob import Blob
from protocol.consensus.events import Reduce
from protocol.consensus.locks import Bounds, Vote
from protocol.consensus.messages.contributions import (
    MAX_CONTRIBUTIONS,
    NO_ROSTER,
    Commit,
    Contribution,
    ContributionList,
    PartBlob,
    digest_inputs,
)
from protocol.consensus.messages.kinds import (
    Acknowledgement,
    CommitCertificate,
    Inventory,
    Justification,
    Promise,
)
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.quorum import VoterSet
from protocol.identity import PeerId

MAX_PROPOSALS = 256
MAX_PROPOSALS_PER_PEER = 4  # without those that another peer acknowledged
PartSum = tuple[int, Digest]  # a part, and the digest of its inputs


class RoundKnowledge:
    """The tables of one peer.

    `locks`, `certificates`: the newest certificate of each proposal, with acknowledgements and with confirmations.
    `promises`, `justifications`: the newest of each sender.
    """

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.contributions: dict[PeerId, SignedMessage[Contribution]] = {}
        self._senders: set[PeerId] = set()  # of the contributions
        self.held_parts: set[PartBlob] = set()
        self.held_sizes: dict[Digest, int] = {}  # of the blobs that this peer holds
        self.inventories: dict[PeerId, Inventory] = {}  # without their lists of blobs
        self._inventory_sizes: dict[PeerId, int] = {}  # the lengths of these lists
        self.in_later_view: set[PeerId] = set()  # peers that have left view 0
        self.proposals: dict[Digest, SignedMessage[Commit]] = {}
        self.acknowledgements: dict[Digest, dict[PeerId, SignedMessage[Acknowledgement]]] = {}
        self.confirmations: dict[Digest, dict[PeerId, SignedMessage[Acknowledgement]]] = {}
        self.locks: dict[Digest, SignedMessage[CommitCertificate]] = {}
        self.certificates: dict[Digest, SignedMessage[CommitCertificate]] = {}
        self.promises: dict[PeerId, SignedMessage[Promise]] = {}
        self.justifications: dict[PeerId, SignedMessage[Justification]] = {}
        self._latest_acknowledgements: dict[PeerId, SignedMessage[Acknowledgement]] = {}
        self._held_by_peer: dict[PeerId, set[Digest]] = {}
        self._holders: dict[Digest, set[PeerId]] = {}

    def add_held_parts(self, part_blobs: Iterable[PartBlob]) -> None:
        """Record parts that are in the store and valid."""
        self.held_parts.update(part_blobs)
        self.held_sizes.update((part_blob.blob.digest, part_blob.blob.size) for part_blob in part_blobs)

    def learn_contribution(self, message: SignedMessage[Contribution]) -> bool:
        """Record a contribution; return False if the sender has made another one before, which stays."""
        self._senders.add(message.sender)
        return self.contributions.setdefault(message.sender, message).digest == message.digest

    def learn_contributions(self, contribution_list: ContributionList, members: Set[PeerId]) -> list[PeerId]:
        """Record the contributions in a list of another peer.

        Returns:
            The senders that have made another contribution before.
        """
        if contribution_list.by_sender.items() <= self.contributions.items():
            return []
        room = MAX_CONTRIBUTIONS - len(self._senders - members)
        fresh = contribution_list.by_sender.keys() - self._senders - members
        surplus = set(sorted(fresh)[max(0, room) :])
        listed = [entry for entry in contribution_list.contributions if entry.sender not in surplus]
        return [entry.sender for entry in listed if not self.learn_contribution(entry)]

    def learn_inventory(self, message: SignedMessage[Inventory], max_blobs: int) -> None:
        """Record the blobs that a member holds.

        Args:
            max_blobs: the number of blobs that exist, as far as this peer knows. If the inventories of a member named
                more over time, only its newest one counts.
        """
        sender, body = message.sender, message.body
        if self._is_newer(message):
            self.inventories[sender], self._inventory_sizes[sender] = replace(body, blobs=()), len(body.blobs)
            if body.view:
                self.in_later_view.add(sender)
        if len(body.blobs) > max_blobs:
            return
        held = self._held_by_peer.setdefault(sender, set())
        if len(held.union(body.blobs)) > max_blobs:
            self._forget_held_blobs(sender)
        for digest in body.blobs:
            if digest not in held:
                held.add(digest)
                self._holders.setdefault(digest, set()).add(sender)

    def _forget_held_blobs(self, peer: PeerId) -> None:
        for digest in self._held_by_peer[peer]:
            self._holders[digest].discard(peer)
            if not self._holders[digest]:
                del self._holders[digest]
        self._held_by_peer[peer].clear()

    def learn_acknowledgement(self, message: SignedMessage[Acknowledgement]) -> None:
        """Record an acknowledgement, also one that arrives before its proposal, or a confirmation."""
        proposal = self.proposals.get(message.body.proposal)
        if proposal is not None and not message.body.is_for(proposal):
            return
        if message.body.confirms:
            if proposal is not None:
                self.confirmations[proposal.digest].setdefault(message.sender, message)
            return
        known = self._latest_acknowledgements.get(message.sender)
        if known is None or message.body.view >= known.body.view:
            self._latest_acknowledgements[message.sender] = message
        if proposal is not None:
            self.acknowledgements[proposal.digest].setdefault(message.sender, message)

    def learn_promise(self, message: SignedMessage[Promise]) -> None:
        """Record the promise of a member, unless it has made one to a later view."""
        known = self.promises.get(message.sender)
        if known is None or message.body.view >= known.body.view:
            self.promises[message.sender] = message

    def learn_justification(self, message: SignedMessage[Justification]) -> None:
        """Record why a leader may propose what it does."""
        known = self.justifications.get(message.sender)
        if known is None or message.body.view >= known.body.view:
            self.justifications[message.sender] = message

    def learn_proposal(self, message: SignedMessage[Commit]) -> None:
        """Record a proposal, and drop the oldest one where there are too many."""
        if message.digest in self.proposals:
            return
        own = [digest for digest, known in self.proposals.items() if known.sender == message.sender]
        droppable = [digest for digest in own if not self.has_other_acknowledgers(digest)]
        if len(droppable) >= MAX_PROPOSALS_PER_PEER:
            self._drop_oldest(droppable)
        elif len(self.proposals) >= MAX_PROPOSALS:
            self._drop_oldest(self.proposals)
        self.proposals[message.digest] = message
        self.confirmations[message.digest] = {}
        # Acknowledgements may have overtaken the proposal that they acknowledge.
        self.acknowledgements[message.digest] = {
            peer: known for peer, known in self._latest_acknowledgements.items() if known.body.is_for(message)
        }

    def _drop_oldest(self, digests: Iterable[Digest]) -> None:
        proposals = self.proposals
        oldest = min(digests, key=lambda digest: proposals[digest].body.view)
        del self.proposals[oldest], self.acknowledgements[oldest], self.confirmations[oldest]
        self.certificates.pop(oldest, None)
        self.locks.pop(oldest, None)

    def learn_certificate(self, message: SignedMessage[CommitCertificate], members: Set[PeerId]) -> None:
        """Record the acknowledgements or confirmations of members in a certificate."""
        proposal, votes = message.body.proposal, message.body.by_sender
        if proposal not in self.proposals:
            for acknowledgement in votes.values():
                if acknowledgement.sender in members:
                    self.learn_acknowledgement(acknowledgement)
            return
        if not next(iter(votes.values())).body.is_for(self.proposals[proposal]):
            return
        confirms = message.body.confirms
        (self.certificates if confirms else self.locks)[proposal] = message
        known = votes if votes.keys() <= members else {peer: votes[peer] for peer in votes.keys() & members}
        (self.confirmations if confirms else self.acknowledgements)[proposal].update(known)

    def _is_newer(self, message: SignedMessage[Inventory]) -> bool:
        known = self.inventories.get(message.sender)
        if known is None or message.body.view != known.view:
            return known is None or message.body.view > known.view
        if message.body.roster == known.roster:
            return len(message.body.blobs) >= self._inventory_sizes[message.sender]
        return message.body.roster != NO_ROSTER

    def has_blob(self, peer: PeerId, digest: Digest) -> bool:
        """Return whether a peer is known to hold a blob."""
        return digest in self.held_digests(peer)

    def held_digests(self, peer: PeerId) -> Set[Digest]:
        """Return the digests of the blobs that a peer is known to hold."""
        return self.held_sizes.keys() if peer == self.me else self._held_by_peer.get(peer, frozenset())

    def has_all_parts(self, peer: PeerId, part_blobs: Iterable[PartBlob]) -> bool:
        """Return whether a peer holds all these parts.

        Only digests are known of other peers. Of this peer only checked parts count, because its vote depends on them.
        """
        if peer == self.me:
            return self.held_parts.issuperset(part_blobs)
        held = self.held_digests(peer)
        return all(part_blob.blob.digest in held for part_blob in part_blobs)

    def has_local_blob(self, blob: Blob) -> bool:
        """Return whether this peer holds a blob of that digest and size."""
        return self.held_sizes.get(blob.digest) == blob.size

    def holders(self, digest: Digest, among: Set[PeerId]) -> list[PeerId]:
        """Return the other peers in `among` that hold a blob, in ascending order."""
        return sorted(peer for peer in self._holders.get(digest, ()) if peer in among and peer != self.me)

    def is_obtainable(
        self, contribution: SignedMessage[Contribution], parts: Iterable[int], live: frozenset[PeerId]
    ) -> bool:
        """Return whether a live peer can still give out all these parts; the owner always can."""
        if contribution.sender in live or contribution.sender == self.me:
            return True
        blobs = (contribution.body.parts[part] for part in parts)
        return all(
            self.has_local_blob(blob) or not live.isdisjoint(self._holders.get(blob.digest, ())) for blob in blobs
        )

    def obtainable_senders(self, live: frozenset[PeerId]) -> Set[PeerId]:
        """Return the senders of contributions of which no part is lost."""
        if self._senders <= live:
            return self._senders
        absent = [self.contributions[peer] for peer in self._senders - live]
        lost = {entry.sender for entry in absent if not self.is_obtainable(entry, range(len(entry.body.parts)), live)}
        return self._senders - lost

    def is_lock(self, digest: Digest) -> bool:
        """Return whether a member says that a proposal binds it, or has acknowledged it."""
        acknowledged = (message.body.proposal for message in self._latest_acknowledgements.values())
        confirmed = (message.body.bounds.confirmed for message in self.promises.values())
        return (
            digest in acknowledged
            or any(vote is not None and vote.proposal == digest for vote in confirmed)
            or any(inventory.lock == digest for inventory in self.inventories.values())
        )

    def acknowledgers(self, digest: Digest) -> set[PeerId]:
        """Return the peers that are known to have acknowledged a proposal."""
        locked = {peer for peer, inventory in self.inventories.items() if inventory.lock == digest}
        return locked | self.acknowledgements[digest].keys()

    def has_other_acknowledgers(self, digest: Digest) -> bool:
        """Return whether a peer other than its proposer acknowledged a proposal."""
        return not self.acknowledgers(digest) <= {self.proposals[digest].sender}

    def decided_proposal(self, voter_set: VoterSet) -> SignedMessage[Commit] | None:
        """Return the proposal that is decided."""
        for digest, proposal in self.proposals.items():
            if voter_set.is_decided(self.acknowledgements[digest].keys(), self.confirmations[digest].keys()):
                return proposal
        return None

    def knows_bounds(self, bounds: Bounds, view: int, voter_set: VoterSet) -> bool:
        """Return whether a promise to a view names earlier proposals that are known here, the confirmed one locked."""
        named = [vote for vote in (bounds.acknowledged, bounds.confirmed) if vote is not None]
        for vote in named:
            proposal = self.proposals.get(vote.proposal)
            if proposal is None or Vote.of(proposal) != vote or vote.view >= view:
                return False
        lock = bounds.confirmed
        return lock is None or voter_set.was_quorum(self.acknowledgements[lock.proposal].keys())


class Sums:
    """The sums that a peer has requested from its driver in one round; owned by the round state."""

    def __init__(self) -> None:
        self._requested: list[PartSum] = []  # the index is the request id of the Reduce
        self._results: dict[PartSum, Blob] = {}

    def record(self, request_id: int, blob: Blob) -> None:
        """Record the answer to a request."""
        self._results[self._requested[request_id]] = blob

    def result(self, part: int, inputs: Digest) -> Blob | None:
        """Return the sum of one part of these inputs, if it is computed."""
        return self._results.get((part, inputs))

    def request(
        self, part: int, contributions: tuple[SignedMessage[Contribution], ...], knowledge: RoundKnowledge
    ) -> Reduce | None:
        """Return a request for a sum, once this peer holds that part of all contributions; each one only once."""
        wanted = part, digest_inputs(entry.digest for entry in contributions)
        part_blobs = [entry.body.part_blobs[part] for entry in contributions]
        if wanted in self._requested or not knowledge.has_all_parts(knowledge.me, part_blobs):
            return None
        self._requested.append(wanted)
        return Reduce(part, len(self._requested) - 1, contributions)
