"""What a simulated peer knows of the others: their heads, by records that take their time and may get lost."""

from typing import TYPE_CHECKING

from node.loop.events import SwarmChanged
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from protocol.consensus.chain import ChainHead
from protocol.identity import PeerId
from tests.simulation.virtual.disk import state_of

if TYPE_CHECKING:
    from tests.simulation.virtual.peers import SimulatedPeer


HEARTBEATS_PER_REVISION = 8  # so rarely that most peers hear of a revision by a commit


class Gossip:
    """`records`: by peer, its head and when that was heard."""

    def __init__(self, peer: "SimulatedPeer") -> None:
        self._peer = peer
        self.records: dict[PeerId, tuple[ChainHead, float]] = {}

    def broadcast(self) -> None:
        """Send our own record to all that can be reached."""
        peer, network, head = self._peer, self._peer.network, self._peer.announced_head()
        revisions = peer.log.revisions if peer.heartbeats % HEARTBEATS_PER_REVISION == 0 else ()

        def arrive() -> None:
            for other in peer.swarm.peers.values():
                is_reached = other is not peer and network.link.can_send(peer.name, other.name)
                if is_reached and network.random.random() >= network.scenario.loss:
                    other.learn(revisions)
                    other.gossip.receive(peer.name, head)

        network.schedule(network.random.uniform(0.005, network.scenario.delay), arrive)

    def receive(self, sender: PeerId, head: ChainHead) -> None:
        known, network = self.records.get(sender), self._peer.network
        if known is not None and known[0].round > head.round and known[0].tokens >= head.tokens:
            return
        self.records[sender] = (head, network.now)
        if known is None or known[0] != head or network.now - known[1] > network.scenario.expiry:
            self._peer.feed(SwarmChanged(self.snapshot()))

    def knows_fork(self) -> bool:
        """Return whether another peer is on a chain that is not ours."""
        return any(not self._peer.chain.has_head(head.digest) for head in self.snapshot().peers_by_head)

    def ended(self) -> frozenset[PeerId]:
        """Return the peers whose machines say that they run no more."""
        peer, link = self._peer, self._peer.network.link
        if not peer.network.scenario.machines_answer:
            return frozenset()
        dead = sorted(self.records.keys() & link.dead)
        return frozenset(name for name in dead if link.is_open(peer.name, name) and link.is_open(name, peer.name))

    def snapshot(self) -> SwarmSnapshot:
        peer, ended = self._peer, self.ended()
        oldest = peer.network.now - peer.network.scenario.expiry
        records = sorted(self.records.items())
        own = PeerState(peer.chain.head, state_of(peer.chain.head).digest)
        heads = {name: head for name, (head, heard) in records if heard >= oldest and name not in ended}
        others = {name: PeerState(head, state_of(head).digest) for name, head in heads.items()}
        return SwarmSnapshot({peer.name: own, **others, **dict.fromkeys(peer.swarm.strangers, own)}, ended=ended)
