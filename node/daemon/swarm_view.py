"""The directory as a participant sees it: who trains, who stands where, and who may be asked."""

import random
from collections.abc import Mapping

from node.loop.swarm_snapshot import PeerState, SwarmSnapshot
from node.monitoring.status import StatusSource
from protocol.blobs.blob import DIGEST_BYTES
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages import Digest
from protocol.identity import PeerId
from protocol.membership.directory import PeerDirectory
from protocol.membership.peer_table import MembershipEvent, PeerJoined, PeerLeft
from protocol.murmur_pb2 import PeerRecord
from protocol.transport.nat import is_relay_only, relays_of

MAX_LEFT_PEERS = 4096


class SwarmView:
    """The node's directory as one replica sees it: everything that a replica asks about peers passes here.

    A peer record names one head, so the replicas of a node will need one entry each in it; this is the place to choose
    the entry of our run. `has_contacts`: whether somebody was named whom we can ask for the run.
    """

    def __init__(self, directory: PeerDirectory, status: StatusSource, has_contacts: bool, rng: random.Random) -> None:
        self._directory = directory
        self._status = status
        self.has_contacts = has_contacts
        self._rng = rng
        self._left_peers: dict[PeerId, None] = {}  # the longest gone first
        self._has_met_trainer = False  # whether another trainer was ever seen
        directory.subscribe(self)

    def other_records(self) -> dict[PeerId, PeerRecord]:
        """Of all live peers but ourselves, in random order: nobody is asked first by everybody."""
        others = [(peer, record) for peer, record in self._directory.live().items() if peer != self._directory.peer_id]
        self._rng.shuffle(others)
        return dict(others)

    def trainers(self) -> list[PeerId]:
        """All that train, whatever their round, ourselves among them."""
        return [peer for peer, record in self._directory.live().items() if record.role == "trainer"]

    def other_trainers(self) -> list[PeerId]:
        return [peer for peer in self.trainers() if peer != self._directory.peer_id]

    def unreachable_peers(self) -> frozenset[PeerId]:
        """Who is hidden behind a router as we are, so that only small things pass; empty where nobody could carry."""
        live = self._directory.live()
        own = live.get(self._directory.peer_id)
        if own is None or not is_relay_only(own.addresses):
            return frozenset()
        unseen = frozenset(peer for peer, record in live.items() if is_relay_only(record.addresses))
        return unseen if self._reachable_trainers(live) else frozenset()

    def relay_candidates(self, owner: PeerId) -> list[PeerId]:
        """Who may carry from a hidden peer to us: first those that it keeps a connection with, as they relay to it."""
        live = self._directory.live()
        relays = relays_of(live[owner].addresses) if owner in live else ()
        return sorted(self._reachable_trainers(live), key=lambda peer: (peer not in relays, hash((owner, peer))))

    def _reachable_trainers(self, live: Mapping[PeerId, PeerRecord]) -> list[PeerId]:
        """Trainers that others can call."""
        trainers = ((peer, record.addresses) for peer, record in live.items() if record.role == "trainer")
        return [peer for peer, addresses in trainers if addresses and not is_relay_only(addresses)]

    def is_isolated(self) -> bool:
        """Whether no other trainer is in reach, though there are some, as far as we know: we met them, or were sent."""
        return not self.other_trainers() and (self._has_met_trainer or self.has_contacts)

    def is_trainer(self, peer: PeerId) -> bool:
        record = self._directory.live().get(peer)
        return record is not None and record.role == "trainer"

    def snapshot(self) -> SwarmSnapshot:
        """Return what is known now of all live peers, in random order: not all peers ask the same one first."""
        live = list(self._directory.live().items())
        self._rng.shuffle(live)
        return SwarmSnapshot({peer: peer_state(record) for peer, record in live}, frozenset(self._left_peers))

    def is_our_turn_to_evaluate(self, round_number: int) -> bool:
        """Whether it is our turn to measure the anchor of that round: the trainers that do not rest take turns."""
        live = self._directory.live()
        trainers = sorted(peer for peer in self.trainers() if not live[peer].resting)
        return bool(trainers) and trainers[round_number % len(trainers)] == self._directory.peer_id

    def announce_head(self, head: ChainHead, state: Digest) -> None:
        self._directory.publish(
            urgent=True, round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state,
            **self._status.status().record_fields(),
        )  # fmt: skip

    def publish_progress(self) -> None:
        """Renew what our record says of our work. With each new head that goes out too: so it adds up by rounds."""
        self._directory.publish(urgent=False, **self._status.status().record_fields())

    def all_have_round(self, number: int) -> bool:
        """Return whether every live trainer has as many rounds."""
        trainers = [record for record in self.other_records().values() if record.role == "trainer"]
        return all(record.round >= number for record in trainers)

    def on_membership_event(self, event: MembershipEvent) -> None:
        if isinstance(event, PeerJoined):
            self._left_peers.pop(event.peer, None)
            self._has_met_trainer = self._has_met_trainer or event.record.role == "trainer"
        elif isinstance(event, PeerLeft) and event.reason == "left":
            self._left_peers[event.peer] = None
            if len(self._left_peers) > MAX_LEFT_PEERS:
                del self._left_peers[next(iter(self._left_peers))]


def peer_state(record: PeerRecord) -> PeerState:
    """Return what a checked record says of its peer."""
    has_head = len(record.digest) == DIGEST_BYTES
    return PeerState(
        ChainHead(record.round, record.digest, record.chain_tokens) if has_head else None,
        record.state_digest,
        is_trainer=record.role == "trainer",
        is_resting=record.resting,
    )
