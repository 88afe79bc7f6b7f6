"""Send and receive the messages of a virtual peer, as briefs where it has them."""

from functools import partial
from typing import TYPE_CHECKING, Any

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.briefs import BriefCache, SeenMessages, restore
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import PeerFault
from protocol.identity import PeerId
from tests.simulation.virtual.loop_driver import LoopDriver
from tests.simulation.virtual.network import Network

if TYPE_CHECKING:
    from tests.simulation.virtual.swarm import SimulatedSwarm


class Messenger(LoopDriver):
    """A peer that others can send messages to."""

    def __init__(self, name: PeerId, network: Network, swarm: "SimulatedSwarm") -> None:
        super().__init__(name, network, swarm.action_watchers)
        self.swarm = swarm
        self.forget_messages()

    def forget_messages(self) -> None:
        """Forget all messages, as a new process has."""
        self.seen = SeenMessages()
        self.brief_cache = BriefCache(self.seen)

    def hear(self, message: SignedMessage[Any]) -> None:
        """Take a message that has been opened."""
        raise NotImplementedError

    def send(self, peer: PeerId, signed: wire.Signed) -> None:
        """Send a message, as a brief where the receiver can restore it."""
        receiver, brief = self.swarm.peers[peer], self.brief_cache.brief_of(signed)
        if brief is None:
            self.send_whole(receiver, signed)
        else:
            self.network.transmit(self.name, peer, partial(receiver.receive_brief, self, brief, signed))

    def send_whole(self, receiver: "Messenger", signed: wire.Signed) -> None:
        """Send a message that has no brief, or whose brief the receiver could not restore."""
        self.network.transmit(self.name, receiver.name, partial(receiver.receive, signed))

    def receive_brief(self, sender: "Messenger", brief: wire.Brief, signed: wire.Signed) -> None:
        """Restore a message, or ask its sender for the whole one."""
        restored = restore(brief, self.seen)
        if restored is None:
            self.swarm.unresolved += 1
            sender.send_whole(self, signed)
        else:
            self.receive(restored)

    def receive(self, signed: wire.Signed) -> None:
        """Take a message from the network, and refuse it if it is malformed or forged, as a servicer does."""
        try:
            message = self.network.open(signed)
        except PeerFault as fault:
            self.swarm.rejections.append((self.name, signed.peer, fault.metric_label))
        else:
            self.seen.record(signed)
            self.hear(message)
