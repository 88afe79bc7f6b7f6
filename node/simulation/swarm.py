"""All virtual peers of one run, from the first round to its target."""

import hashlib
import random
from collections.abc import Callable, Iterable
from functools import cached_property

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.daemon.state.outer_state import OuterState
from node.data import Corpus
from node.from_manifest import build_program, rate_of_outer_steps, round_settings_by_number, topology_class
from node.loop.events import SwarmChanged
from node.loop.steering import unsteered
from node.model import shape_table
from node.simulation.accounting import Accounting
from node.simulation.adversary import Espionage, LyingEncoder, ObservedEncoder
from node.simulation.config import SimulationConfig
from node.simulation.fake_signer import FakeSigner
from node.simulation.lying_trainers import trainer_class
from node.simulation.shared_compute import SharedCompute
from node.simulation.virtual.audits import SwarmAudits
from node.simulation.virtual.gossip import VirtualGossip
from node.simulation.virtual.network import VirtualClock, VirtualNetwork
from node.simulation.virtual.peer import VirtualPeer
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import step_settings
from optim.exchange import ContributionEncoder
from optim.method import Method
from protocol import murmur_pb2 as wire
from protocol.consensus.chain import ChainHead
from protocol.consensus.messages.contributions import MAX_MULTIPLE, Commit, ContributionLimits
from protocol.consensus.messages.signed import Digest
from protocol.errors import MurmurError
from protocol.identity import Identity, PeerId
from protocol.manifest.sections import TargetSection
from protocol.pipeline.stage import stage_run_id

MAX_STALLED_EXCHANGES = 20  # give up after this many exchange timeouts without a decision


class VirtualSwarm:
    """Runs `method` on `corpus` with all virtual peers of `config`.

    `on_first_arrival` is called when a first peer reaches a new head, `on_step` after each inner step.
    """

    def __init__(
        self,
        config: SimulationConfig,
        method: Method,
        corpus: Corpus,
        on_first_arrival: Callable[["VirtualSwarm", VirtualPeer], None],
        on_step: Callable[[], None],
        clock: VirtualClock | None = None,
    ) -> None:
        manifest = config.manifest
        self.config = config
        self.method = method
        self._corpus = corpus
        self._on_first_arrival = on_first_arrival
        self._count_step = on_step
        self.random = random.Random(f"murmur simulation {manifest.run.seed}")
        self.run_id = stage_run_id(manifest.run_id, config.cut.stages, config.cut.stage)
        self.clock = clock or VirtualClock()
        self.network = VirtualNetwork(self.clock, config.bandwidths, config.latency)
        self.accounting = Accounting()
        self._build_shared_parts()
        self.audits = SwarmAudits(self, corpus) if manifest.audits.share else None
        self.gossip = VirtualGossip(
            self.clock, config.latency, config.peers, manifest.membership.expiry, self._refresh_all
        )
        self.peers: dict[PeerId, VirtualPeer] = {}
        self._incarnations = [0] * config.peers
        self._first_arrivals: dict[Digest, float] = {}  # when a peer first reached each head
        self._decided_at = 0.0
        self.is_done = False
        self._espionage = Espionage()

    def _build_shared_parts(self) -> None:
        manifest, method = self.config.manifest, self.method
        target = TargetSection(tokens=self.config.target_tokens, keepers=0)
        self.manifest_with_target = manifest.model_copy(update={"target": target})
        self.planner = program = build_program(self.manifest_with_target, method, self.config.cut)
        shapes = shape_table(manifest.model, self.config.cut)
        self.numel = shapes.numel
        most = MAX_MULTIPLE * program.max_steps * manifest.train.batch_tokens
        bounds, audited = (program.max_parts, most, program.max_part_bytes), bool(manifest.audits.share)
        self.limits = ContributionLimits(method.name, shapes.hash(), *bounds, audited=audited)
        self.fake_signer = FakeSigner(self.limits)
        initial = OuterState.initial(self.config.start_weights(), method)
        replicas = 1 if topology_class(method).has_shared_state else self.config.peers
        rate = rate_of_outer_steps(unsteered(self.manifest_with_target), program)
        self.compute = SharedCompute(program, rate, initial, replicas)
        steering = unsteered(manifest)  # its run id decides on groups, as among real peers
        self.round_settings = round_settings_by_number(steering, program, checks_sums=False)  # methods are compared

    def run(self) -> None:
        """Run to the target. Raises MurmurError if no round is decided for too long."""
        self.start()
        self.clock.run(lambda: self.is_done or self.is_stalled)
        self.require_done()

    def start(self) -> None:
        """Let all peers join."""
        peers = [self._new_peer(slot) for slot in range(self.config.peers)]
        self.gossip.start_with({peer.peer_id: peer.chain.head for peer in peers})
        for peer in peers:
            peer.start()

    def require_done(self) -> None:
        """Raise MurmurError unless the target is reached."""
        if not self.is_done:
            raise MurmurError(
                f"no round was decided for {self._max_stall_seconds:.0f} virtual seconds; allow more bandwidth or "
                "speed, a longer round.exchange_timeout, or less churn"
            )

    @cached_property
    def _max_stall_seconds(self) -> float:
        training = 2 * self.method.schedule.inner_steps / min(self.config.speeds)
        return training + MAX_STALLED_EXCHANGES * self.round_settings(0).exchange_seconds

    @property
    def live_peers(self) -> list[VirtualPeer]:
        return [peer for peer in self.peers.values() if peer.is_alive]

    def steps_to_target(self, tokens: int) -> int:
        """Return the inner steps that each living peer still has to make after `tokens` tokens."""
        tokens_per_step = self.config.manifest.train.batch_tokens * max(1, len(self.live_peers))
        return max(1, -(-(self.config.target_tokens - tokens) // tokens_per_step))

    @property
    def is_stalled(self) -> bool:
        """Return whether no round was decided for too long."""
        return self.clock.now > self._decided_at + self._max_stall_seconds

    def new_trainer(self, peer: VirtualPeer) -> VirtualTrainer:
        """Start a trainer at the peer's head."""
        kind = trainer_class(self.config.adversaries, peer.slot, self.config.peers)
        trainer = kind(
            self.config.build_model(),
            self.config.manifest,
            self.planner,
            self._corpus_of(peer.slot),
            self._new_encoder(peer.slot),
            peer.peer_id,
        )
        trainer.start(peer.chain.round, peer.applied_state[0].shared_vectors(self.method))
        trainer.use_settings(step_settings(self.manifest_with_target, peer.chain.round, peer.chain.tokens))
        return trainer

    def _new_encoder(self, slot: int) -> ContributionEncoder:
        liars = self.config.adversaries
        if liars is None:
            return ContributionEncoder(self.planner)
        if liars.has(slot, self.config.peers):
            return LyingEncoder(self.planner, liars.kind, self.config.manifest.run.seed + slot, self._espionage)
        return ObservedEncoder(self.planner, slot, self._espionage)

    def _corpus_of(self, slot: int) -> Corpus:
        """Return the text of a peer: all of it, or a part of its own."""
        return self._corpus.part(slot, self.config.peers) if self.config.unequal else self._corpus

    def send(self, sender: VirtualPeer, receivers: Iterable[PeerId], signed: wire.Signed) -> None:
        """Send a signed message over the virtual network."""
        by_slot = {self.peers[name].slot: self.peers[name] for name in receivers if name in self.peers}

        def deliver(slot: int) -> None:
            by_slot[slot].receive(signed)

        self.network.send_message(sender.slot, by_slot, signed.ByteSize(), deliver)

    def begin_step(self, peer: VirtualPeer) -> None:
        """Let the peer make an inner step after the time that it takes."""
        peer.call_later(1 / self.config.speeds[peer.slot], peer.on_step)

    def training_seconds(self, peer: VirtualPeer, steps: int) -> float:
        """Return the virtual seconds that the peer needed for its first `steps` inner steps."""
        return steps / self.config.speeds[peer.slot]

    def on_contribution(self, peer: VirtualPeer, round_number: int) -> None:
        """Take note of a contribution that a trainer has made."""

    def on_anchor(self, peer: VirtualPeer) -> None:
        """Take note of an anchor that a trainer has taken over."""

    def hurry(self, peer: VirtualPeer) -> None:
        """Take note that a round waits for the peer's contribution."""

    def on_death(self, peer: VirtualPeer) -> None:
        """Note that a peer has died."""
        self.accounting.record_death(peer.peer_id)
        self.gossip.remove(peer.peer_id)

    def record_commit(self, commit: Commit) -> None:
        """Record a commit that a peer has applied; if only dead peers knew another one, it takes its place."""
        known = self.accounting.commits.get(commit.base, commit)
        if known.content_digest != commit.content_digest and not any(_may_hold(one, known) for one in self.live_peers):
            self.accounting.withdraw(commit.base)
        self.accounting.record_commit(commit)

    def on_step(self, peer: VirtualPeer) -> None:
        """Count an inner step of the peer."""
        self.accounting.steps += 1
        self.accounting.busy_seconds[peer.slot] += 1 / self.config.speeds[peer.slot]
        self._count_step()

    def on_new_head(self, peer: VirtualPeer) -> None:
        """Publish the new head of a peer, and record it if the peer is the first to reach it."""
        head = peer.chain.head
        self.gossip.publish(peer.peer_id, head)
        if head.digest not in self._first_arrivals:
            self._first_arrivals[head.digest] = self.clock.now
            self._record_first_arrival(peer, head)
        self.check_end()

    def check_end(self) -> None:
        """Notice that every live peer has reached the target, or came after it."""
        self.is_done = all(other.is_done for other in self.live_peers)

    def _record_first_arrival(self, peer: VirtualPeer, head: ChainHead) -> None:
        seconds, self._decided_at = self.clock.now - self._decided_at, self.clock.now
        self.accounting.left_out.update(peer.applied_state[0].left_out)
        self._on_first_arrival(self, peer)
        self.fake_signer.forget_before(min(other.chain.round for other in self.live_peers) - 8)
        if self.config.churn and not peer.is_done:
            self._replace_and_kill(seconds)

    def _replace_and_kill(self, seconds: float) -> None:
        """Replace the peers that died in the previous round, and kill others at random times of this one."""
        alive = {peer.slot: peer for peer in self.live_peers}
        for slot in range(self.config.peers):
            if slot not in alive:
                self.clock.schedule(self.gossip.delay, self._new_peer(slot).start)
        deaths = int(self.config.churn * self.config.peers + self.random.random())
        for victim in self.random.sample(sorted(alive), min(deaths, (len(alive) - 1) // 2)):
            self.clock.schedule(self.random.random() * seconds, alive[victim].die)

    def _new_peer(self, slot: int) -> VirtualPeer:
        """Create a peer with a new key and no state."""
        self._incarnations[slot] += 1
        peer = VirtualPeer(simulated_peer_id(slot, self._incarnations[slot]), slot, self)
        self.peers = {name: other for name, other in self.peers.items() if other.is_alive or other.slot != slot}
        self.peers[peer.peer_id] = peer
        return peer

    def _refresh_all(self) -> None:
        for peer in self.live_peers:
            peer.post(SwarmChanged(self.gossip.snapshot))


def _may_hold(peer: VirtualPeer, commit: Commit) -> bool:
    """Return whether a commit is in a peer's chain, as far as its log goes back."""
    known = [entry.body for entry in peer.chain.log.commits if entry.body.round == commit.round]
    return peer.chain.round > commit.round and all(one.content_digest == commit.content_digest for one in known)


def simulated_identity(slot: int, incarnation: int = 1) -> Identity:
    """Return the deterministic identity of a peer; its training data depends on it."""
    secret = hashlib.sha256(f"murmur simulated peer {slot} {incarnation}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(secret))


def simulated_peer_id(slot: int, incarnation: int = 1) -> PeerId:
    return simulated_identity(slot, incarnation).peer_id
