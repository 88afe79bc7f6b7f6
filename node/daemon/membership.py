"""The directory as a participant sees it: who trains, who stands where, and who may be asked."""

import random
from collections.abc import Callable, Mapping

from node.daemon.catch_up import ahead
from protocol.identity import PeerId
from protocol.membership.directory import Event, Joined, Left
from protocol.membership.gossip import Directory
from protocol.membership.own_record import FieldValue
from protocol.murmur_pb2 import PeerRecord
from protocol.network.reach import carriers_of, is_hidden
from protocol.rounds.chain import Chain, Head
from protocol.rounds.events import Live
from protocol.rounds.statements import Digest

MAX_DEPARTED = 4096


class Members:
    """`has_contacts`: whether somebody was named whom we can ask for the run. `progress`: of our own work."""

    def __init__(
        self, directory: Directory, chain: Chain, has_contacts: bool, rng: random.Random,
        progress: Callable[[], Mapping[str, FieldValue]] = dict,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._chain = chain
        self.has_contacts = has_contacts
        self._rng = rng
        self._progress = progress
        self._departed: dict[PeerId, None] = {}  # the longest gone first
        self._met = False  # whether another trainer was ever seen
        directory.subscribe(self._note)

    def records(self) -> dict[PeerId, PeerRecord]:
        """Of all live peers but ourselves, in random order: nobody is asked first by everybody."""
        others = [(peer, record) for peer, record in self._directory.live().items() if peer != self._directory.peer_id]
        self._rng.shuffle(others)
        return dict(others)

    def trainers(self) -> list[PeerId]:
        """All that train, whatever their round, ourselves among them."""
        return [peer for peer, record in self._directory.live().items() if record.role == "trainer"]

    def other_trainers(self) -> list[PeerId]:
        return [peer for peer in self.trainers() if peer != self._directory.peer_id]

    def beyond(self) -> frozenset[PeerId]:
        """Who is hidden behind a router as we are, so that only small things pass; empty where nobody could carry."""
        live = self._directory.live()
        own = live.get(self._directory.peer_id)
        if own is None or not is_hidden(own.addresses):
            return frozenset()
        unseen = frozenset(peer for peer, record in live.items() if is_hidden(record.addresses))
        return unseen if self._callable(live) else frozenset()

    def between(self, owner: PeerId) -> list[PeerId]:
        """Who may carry from a hidden peer to us: first those that it keeps a connection with, as they relay to it."""
        live = self._directory.live()
        relays = carriers_of(live[owner].addresses) if owner in live else ()
        return sorted(self._callable(live), key=lambda peer: (peer not in relays, hash((owner, peer))))

    def _callable(self, live: Mapping[PeerId, PeerRecord]) -> list[PeerId]:
        """Trainers that others can call."""
        trainers = ((peer, record.addresses) for peer, record in live.items() if record.role == "trainer")
        return [peer for peer, addresses in trainers if addresses and not is_hidden(addresses)]

    def is_alone(self) -> bool:
        """Whether no other trainer is in reach, though there are some, as far as we know: we met them, or were sent."""
        return not self.other_trainers() and (self._met or self.has_contacts)

    def is_trainer(self, peer: PeerId) -> bool:
        record = self._directory.live().get(peer)
        return record is not None and record.role == "trainer"

    def at_this_round(self) -> Live:
        """Who takes part in the round that follows our head: those who stand there, and those about to arrive."""
        last = self._chain.since(max(0, self._chain.round - 1)) or ()
        near = {self._chain.digest, *(commit.body.base for commit in last)}
        live = self._directory.live()
        peers = {peer for peer, record in live.items() if record.role == "trainer" and record.digest in near}
        resting = frozenset(peer for peer in peers if live[peer].resting)
        passed = frozenset(peer for there in ahead(self._chain.head, live).values() for peer in there)
        return Live(frozenset(peers | {self._directory.peer_id}), frozenset(self._departed), resting, passed)

    def evaluates(self, number: int) -> bool:
        """Whether it is our turn to measure the anchor of that round: the trainers that do not rest take turns."""
        live = self._directory.live()
        trainers = sorted(peer for peer in self.trainers() if not live[peer].resting)
        return bool(trainers) and trainers[number % len(trainers)] == self._directory.peer_id

    def holders(self, head: Head, other_than: Digest) -> list[PeerId]:
        """Who stands at `head` with the state that most of them have, of those that are not ours."""
        by_state: dict[Digest, list[PeerId]] = {}
        for peer, record in self.records().items():
            if record.digest == head.digest and record.state_digest not in (b"", other_than):
                by_state.setdefault(record.state_digest, []).append(peer)
        return min(by_state.items(), key=lambda entry: (-len(entry[1]), entry[0]), default=(b"", []))[1]

    def announce_head(self, head: Head, state: Digest) -> None:
        self._directory.publish(
            urgent=True, round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state,
            **self._progress(),
        )  # fmt: skip

    def _note(self, event: Event) -> None:
        if isinstance(event, Joined):
            self._departed.pop(event.peer, None)
            self._met = self._met or event.record.role == "trainer"
        elif isinstance(event, Left) and event.reason == "left":
            self._departed[event.peer] = None
            if len(self._departed) > MAX_DEPARTED:
                del self._departed[next(iter(self._departed))]
