"""All virtual peers of one run, from the first round to its target."""

import hashlib
import random
from collections.abc import Callable, Iterable

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.daemon.replica import OuterState
from node.data import Corpus
from node.model import shape_table
from node.program import decay_of, program_of, round_settings
from node.simulation.clock import VirtualClock
from node.simulation.directory import Directory
from node.simulation.learner import Learner
from node.simulation.ledger import Ledger
from node.simulation.liars import LyingSender
from node.simulation.links import Links
from node.simulation.notary import Notary
from node.simulation.peer import VirtualPeer
from node.simulation.setting import Setting
from node.simulation.vault import Vault
from optim.exchange import Sender
from optim.method import Method
from protocol import murmur_pb2 as wire
from protocol.errors import MurmurError
from protocol.identity import Identity, PeerId
from protocol.rounds.chain import Head
from protocol.rounds.statements import Digest, Terms

MAX_TOKENS = 1 << 40  # of one contribution
STUCK_EXCHANGES = 20  # so many exchange timeouts without a decision, and nothing will come of it


class Swarm:
    """`method` on `corpus` under `setting`; `reached` hears of each new head once, `stepped` of each inner step."""

    def __init__(
        self, setting: Setting, method: Method, corpus: Corpus, reached: Callable[["Swarm", VirtualPeer], None],
        counted: Callable[[], None],
    ) -> None:  # fmt: skip
        manifest = setting.manifest
        self.setting = setting
        self.method = method
        self._corpus = corpus
        self._reached = reached
        self._counted = counted
        self.random = random.Random(f"murmur simulation {manifest.run.seed}")
        self.run_id = manifest.run_id
        self.clock = VirtualClock()
        self.links = Links(self.clock, setting.bandwidths, setting.latency)
        self.ledger = Ledger()
        self._build_round()
        self.directory = Directory(
            self.clock, setting.latency, setting.peers, manifest.membership.expiry, self._refresh_all
        )
        self.peers: dict[PeerId, VirtualPeer] = {}
        self._incarnations = [0] * setting.peers
        self._heads: dict[Digest, float] = {}  # and when each was first reached
        self._decided_at = 0.0
        self._done = False

    def _build_round(self) -> None:
        manifest, method = self.setting.manifest, self.method
        self.program = program = program_of(manifest, method)
        shapes = shape_table(manifest.model)
        self.numel = shapes.numel
        self.terms = Terms(method.name, shapes.hash(), program.max_parts, MAX_TOKENS, program.max_part_bytes)
        self.notary = Notary(self.terms)
        initial = OuterState.initial(self.setting.weights(), method)
        replicas = self.setting.peers if method.topology.kind == "groups" else 1
        self.vault = Vault(program, decay_of(manifest.train), initial, replicas)
        self.round_settings = round_settings(manifest, program)

    def run(self) -> None:
        """Raises MurmurError when the run cannot come to its target under this setting."""
        peers = [self._new_peer(slot) for slot in range(self.setting.peers)]
        self.directory.begin({peer.name: peer.chain.head for peer in peers})
        for peer in peers:
            peer.learner = self.new_learner(peer)
            peer.begin()
        patience = self._patience()
        if not self.clock.run(lambda: self._done or self.clock.now > self._decided_at + patience) or not self._done:
            raise MurmurError(
                f"no round was decided for {patience:.0f} virtual seconds; allow more bandwidth or speed, "
                "a longer round.exchange_timeout, or less churn"
            )

    def _patience(self) -> float:
        training = 2 * self.method.schedule.inner_steps / min(self.setting.speeds)
        return training + STUCK_EXCHANGES * self.round_settings(0).whole_exchange

    @property
    def alive(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers.values() if peer.alive]

    def steps_to_target(self, tokens: int) -> int:
        """Inner steps that each living peer would have to make from `tokens` on."""
        each = self.setting.manifest.train.batch_tokens * max(1, len(self.alive))
        return max(1, -(-(self.setting.target_tokens - tokens) // each))

    def new_learner(self, peer: VirtualPeer) -> Learner:
        sender = self._sender(peer.slot)
        return Learner(
            self.setting.model(), self.setting.manifest, self.program, self._corpus, sender, peer.name,
            peer.applied[0].shared(self.method), peer.chain.round,
        )  # fmt: skip

    def _sender(self, slot: int) -> Sender:
        liars = self.setting.liars
        if liars is not None and slot < liars.count(self.setting.peers):
            return LyingSender(self.program, liars.kind, self.setting.manifest.run.seed + slot)
        return Sender(self.program)

    def say(self, sender: VirtualPeer, receivers: Iterable[PeerId], signed: wire.Signed) -> None:
        by_slot = {self.peers[name].slot: self.peers[name] for name in receivers if name in self.peers}

        def deliver(slot: int) -> None:
            by_slot[slot].receive(signed)

        self.links.say(sender.slot, by_slot, signed.ByteSize(), deliver)

    def stepped(self, peer: VirtualPeer) -> None:
        self.ledger.steps += 1
        self.ledger.busy_seconds[peer.slot] += 1 / self.setting.speeds[peer.slot]
        self._counted()

    def arrived(self, peer: VirtualPeer) -> None:
        """A peer stands on a new head."""
        head = peer.chain.head
        self.directory.publish(peer.name, head)
        if head.digest not in self._heads:
            self._heads[head.digest] = self.clock.now
            self._first_arrival(peer, head)
        self._done = all(other.is_done for other in self.alive)

    def _first_arrival(self, peer: VirtualPeer, head: Head) -> None:
        took, self._decided_at = self.clock.now - self._decided_at, self.clock.now
        self._reached(self, peer)
        self.notary.forget_before(min(other.chain.round for other in self.alive) - 8)
        if self.setting.churn and not peer.is_done:
            self._churn(took)

    def _churn(self, seconds: float) -> None:
        """Those that died in the round before come back; others die at some time in this one."""
        alive = {peer.slot: peer for peer in self.alive}
        for slot in range(self.setting.peers):
            if slot not in alive:
                self._new_peer(slot)
        wanted = int(self.setting.churn * self.setting.peers + self.random.random())
        for victim in self.random.sample(sorted(alive), min(wanted, (len(alive) - 1) // 2)):
            self.clock.after(self.random.random() * seconds, alive[victim].die)

    def _new_peer(self, slot: int) -> VirtualPeer:
        """Each time with another key: a newcomer that knows nothing."""
        self._incarnations[slot] += 1
        peer = VirtualPeer(peer_name(slot, self._incarnations[slot]), slot, self)
        self.peers = {name: other for name, other in self.peers.items() if other.alive or other.slot != slot}
        self.peers[peer.name] = peer
        return peer

    def _refresh_all(self) -> None:
        for peer in self.alive:
            peer.refresh()


def identity_of(slot: int, incarnation: int = 1) -> Identity:
    """Always the same; a peer's data depend on it."""
    secret = hashlib.sha256(f"murmur simulated peer {slot} {incarnation}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(secret))


def peer_name(slot: int, incarnation: int = 1) -> PeerId:
    return identity_of(slot, incarnation).peer_id
