"""Exact steps with a server that gives plausible results which are wrong, and owners that audit a share of them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from node.loop.stage_events import StageAction
from node.loop.stage_loop import EXACT_PAUSE, StageLoop
from node.loop.stage_modes import ExactMode
from node.simulation.virtual.stage import Computation, StageProcess
from protocol.identity import PeerId
from protocol.pipeline import owner_events, server_events
from protocol.pipeline.exact import StepAgreement
from protocol.pipeline.messages import Input
from protocol.pipeline.microbatch import OwnerSettings
from protocol.pipeline.results import contradictions
from tests.protocol.pipeline.virtual.exact_world import ExactWorld, SumTrainer
from tests.protocol.pipeline.virtual.faulty_world import FaultyTrainer, Peer
from tests.protocol.pipeline.virtual.scenario import ACTIVATION, Scenario, blob_of

COUNT = 8
Lie = Literal["activations", "gradients", "audits"]


class LyingTrainer(SumTrainer):
    """Returns other values of the right size, for passes of one kind."""

    world: "AuditedWorld"

    def compute(self, order: server_events.Compute, inputs: Mapping[Input, object]) -> Computation:
        done, task = super().compute(order, inputs), order.task
        kind: Lie = "activations" if task.direction == "forward" else "gradients"
        if done.blob is None or self.world.lie != ("audits" if task.replay else kind):
            return done
        self.world.lies.append(self.world.clock.now)
        return replace(done, blob=blob_of(task.key, f"a lie of {self.peer.name} {task.direction}", ACTIVATION))


class AuditedWorld(ExactWorld):
    """Four servers of the middle stage, the first of which are the `liars`."""

    def __init__(self, lie: Lie, share: float, liars: int = 1, seed: int = 2) -> None:
        self.lie, self.share = lie, share
        self.liars = frozenset(f"server-1-{number}" for number in range(liars))
        self.lies: list[float] = []  # when they were computed
        self.excluded: dict[PeerId, float] = {}
        self.avoided: set[PeerId] = set()
        super().__init__(Scenario(speeds=((8.0,) * 2, (8.0,) * 4, (8.0,) * 2), in_flight=4), seed, COUNT)

    def build_loop(self, peer: Peer) -> StageLoop:
        settings = OwnerSettings(
            peer.name,
            self.scenario.in_flight,
            activation_bytes=ACTIVATION,
            round_pause=EXACT_PAUSE,
            audit_share=self.share,
        )
        agreement = StepAgreement(peer.name, self.runs, peer.stage, self.step_count)
        return self.build_stage_loop(peer, settings, ExactMode(agreement, peer.stage, sequences=1))

    def start_process(self, peer: Peer, loop: StageLoop, trainer: FaultyTrainer) -> None:
        is_liar = peer.name in self.liars
        super().start_process(peer, loop, LyingTrainer(peer, self, 0) if is_liar else trainer)

    def is_seen(self, name: PeerId, other: Peer) -> bool:
        return super().is_seen(name, other) and other.name not in self.excluded

    def voters(self, stage: int) -> frozenset[PeerId]:
        return frozenset(peer.name for peer in self.peers.values() if peer.stage == stage)

    def on_report(self, process: StageProcess, action: StageAction) -> None:
        """Exclude whom the signed results prove guilty, as each node does that sees them."""
        super().on_report(process, action)
        if not isinstance(action, owner_events.ResultsDiffer):
            return
        self.avoided |= action.wrong
        for found in contradictions(self.runs[action.stage], action.results):
            if found.proves(self.voters(action.stage)) and found.liar not in self.excluded:
                self.excluded[found.liar] = self.clock.now
                self.publish()

    def counted(self, name: str) -> int:
        return sum(getattr(peer.owner.counts, name) for peer in self.peers.values() if peer.name not in self.liars)
