"""The blobs of a simulated peer: those that outlive its process, and those on their way to it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.blobs.blob import Blob
from protocol.conduct import Proof
from protocol.consensus.chain import ChainHead, ChainLog
from protocol.consensus.events import VoteRecord
from protocol.consensus.messages.contributions import PartBlob
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.identity import PeerId
from protocol.steering import SignedRevision
from tests.simulation.work_accounting import SavedWork

if TYPE_CHECKING:
    from tests.simulation.virtual.peers import SimulatedPeer

RETRY_SECONDS = 0.2


def state_of(head: ChainHead) -> Blob:
    """Return the outer state of all honest peers at a head; in groups it stands for one that each has for itself."""
    return Blob.of(b"state" + head.digest)


@dataclass
class Disk:
    """`store`: blobs of its own, and those that a vote requires."""

    store: set[Digest]
    head: ChainHead
    log: ChainLog
    progress: SavedWork
    vote: VoteRecord | None = None
    revisions: tuple[SignedRevision, ...] = ()
    proofs: tuple[SignedMessage[Proof], ...] = ()

    def last_vote(self) -> VoteRecord | None:
        """Return what a process that starts reads."""
        return self.vote

    def save_vote(self, vote: VoteRecord, store: set[Digest]) -> None:
        """Write a vote, after what it requires of the blobs in memory."""
        self.persist_required_blobs(vote, store)
        self.vote = vote

    def persist_required_blobs(self, vote: VoteRecord, store: set[Digest]) -> None:
        self.store |= {blob.digest for blob in vote.required_blobs} & store


class BlobTransfers:
    """Asks one source after the other for each blob, until it comes or is not wanted any more."""

    def __init__(self, peer: "SimulatedPeer") -> None:
        self._peer = peer
        self._sources: dict[PartBlob, tuple[PeerId, ...]] = {}

    def request(self, part_blob: PartBlob, sources: tuple[PeerId, ...]) -> None:
        is_new = part_blob not in self._sources
        self._sources[part_blob] = sources
        if is_new:
            self._try(part_blob, 0)

    def cancel_all_but(self, kept: Iterable[PartBlob]) -> None:
        self._sources = {part: self._sources[part] for part in kept if part in self._sources}

    def _try(self, part_blob: PartBlob, attempt: int) -> None:
        if part_blob not in self._sources:
            return
        peer = self._peer
        sources = self._sources[part_blob] or tuple(peer.swarm.peers)
        source = sources[attempt % len(sources)]
        is_here = part_blob.blob.digest in peer.store
        delay = 0.0 if is_here else peer.network.random.uniform(0.02, peer.network.scenario.transfer)
        peer.after(delay, lambda: self._on_end(part_blob, source, attempt))

    def _on_end(self, part_blob: PartBlob, source: PeerId, attempt: int) -> None:
        peer, digest = self._peer, part_blob.blob.digest
        if part_blob not in self._sources or part_blob.blob in peer.swarm.invented_blobs:
            return
        link = peer.network.link
        is_connected = link.can_send(peer.name, source) and link.can_send(source, peer.name)
        holder = peer.swarm.peers.get(source)  # a stranger holds nothing
        if digest in peer.store or (is_connected and holder is not None and holder.serves(digest)):
            peer.on_blob(part_blob)
        else:
            if is_connected and holder is not None:
                peer.on_denial(part_blob, source)
            peer.after(RETRY_SECONDS, lambda: self._try(part_blob, attempt + 1))
