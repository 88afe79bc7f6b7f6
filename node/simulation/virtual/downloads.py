"""Move blobs between virtual peers, each from one source at a time."""

from collections.abc import Set
from functools import partial
from typing import TYPE_CHECKING

from protocol.consensus.messages.contributions import PartBlob
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId

if TYPE_CHECKING:
    from node.simulation.virtual.peer import VirtualPeer

RETRY_SECONDS = 0.2  # until the next attempt for a blob that no peer has


class VirtualDownloads:
    """The blobs that a peer waits for; a started transfer completes even if its round is over by then."""

    def __init__(self, peer: "VirtualPeer") -> None:
        self._peer = peer
        self._sources: dict[PartBlob, tuple[PeerId, ...]] = {}

    @property
    def awaited(self) -> Set[Digest]:
        return {part_blob.blob.digest for part_blob in self._sources}

    def request(self, part_blob: PartBlob, sources: tuple[PeerId, ...]) -> None:
        """Request a blob, or update the sources of one that is already under way."""
        is_new = part_blob not in self._sources
        self._sources[part_blob] = sources
        if is_new:
            self._choose_source(part_blob)

    def _choose_source(self, part_blob: PartBlob) -> None:
        """Choose the holder whose uplink is free first, because a daemon asks several at once."""
        peer, blob = self._peer, part_blob.blob
        network, peers = peer.swarm.network, peer.swarm.peers
        found = (peers[name] for name in self._sources[part_blob] if name in peers)
        holders = [other for other in found if other.is_alive and blob.digest in other.held_since]
        if not holders:
            return self._on_no_holder(part_blob)
        source = min(holders, key=lambda other: network.backlog_seconds(other.slot))
        on_arrival = peer.if_alive(partial(self._on_arrival, part_blob, source))
        network.send_blob(source.slot, peer.slot, blob.size, on_arrival)

    def _on_no_holder(self, part_blob: PartBlob) -> None:
        sources = self._sources.pop(part_blob)
        if self._peer.on_no_holder(part_blob):
            self._sources[part_blob] = sources
            self._peer.call_later(RETRY_SECONDS, partial(self._choose_source, part_blob))

    def _on_arrival(self, part_blob: PartBlob, source: "VirtualPeer") -> None:
        if not source.is_alive:
            return self._choose_source(part_blob)
        del self._sources[part_blob]
        self._peer.on_blob(part_blob)
