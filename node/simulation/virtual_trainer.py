"""The trainer's side of a virtual peer: the same inner state, optimizer and sender as a trainer process has."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from torch import Tensor

from node.data import BatchReader, Corpus
from node.ipc.channel import ContributionHeader, ContributionOutcome
from node.ipc.shared_memory import SharedLayout, SharedMemory
from node.loop.contributions import SettledContribution
from node.model import LanguageModel
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.schedule import ContributionTimer, StepTarget, is_contribution_due, may_apply_anchor, must_wait
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.errors import MurmurError
from protocol.identity import PeerId
from protocol.manifest import Manifest


class VirtualTrainer:
    """Takes inner steps for one virtual peer, once it is started."""

    def __init__(
        self,
        model: LanguageModel,
        manifest: Manifest,
        planner: RoundPlanner,
        corpus: Corpus,
        encoder: ContributionEncoder,
        peer_id: PeerId,
    ) -> None:
        self._train = manifest.train
        self._sequences = manifest.train.batch_tokens // manifest.model.context
        self._optimizer = InnerOptimizer(model, manifest.train, planner.method.inner)
        self._shared_memory = SharedMemory.create(SharedLayout.of(planner))
        self._shared_memory.close()  # the memory stays; a thousand peers would use up the descriptors
        self._model = model
        self.step_target = StepTarget()
        self._contribution_timer = ContributionTimer()
        self.state = TrainerState(model, self._optimizer, planner, encoder, self._shared_memory)
        self._batches = BatchReader(corpus, manifest.model.context, manifest.run.seed, peer_id)

    def start(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Begin at the anchor after that many rounds."""
        self._shared_memory.write_anchor(round_number, shared)
        self.state.start(round_number)

    def must_wait(self) -> bool:
        return must_wait(self.state.counters, self.state.plan)

    def may_apply_anchor(self) -> bool:
        return may_apply_anchor(self.state.counters, self.state.plan)

    def is_contribution_due(self, max_steps: int, now: float) -> bool:
        """`most_steps`: so many bring the run to its target."""
        counters, plan = self.state.counters, self.state.plan
        seconds = self._contribution_timer.seconds(counters.since_message.steps, now)
        steps = self.step_target.steps_due(min(plan.steps, max_steps), counters.round)
        return is_contribution_due(counters, steps, plan.method.schedule, seconds)

    def step(self) -> None:
        step = self.state.counters.step
        windows, place = self._batches.next_batch(self._sequences), self._optimizer.lookahead_weights(step)
        loss = accumulate_gradient(self._model, windows, self._train.microbatch, place)
        applied = self._optimizer.step(step)
        self._optimizer.clear_gradient()
        if not applied:
            raise MurmurError("a simulated peer's gradient is not finite; lower train.learning_rate")
        self.state.count_step(self._train.batch_tokens, loss, self._batches.position)

    def make_contribution(self) -> tuple[ContributionHeader, list[bytes]]:
        message = self.state.make_contribution()
        return message, [bytes(part) for part in self._shared_memory.contribution_parts(message.sizes)]

    def apply_anchor(
        self,
        round_number: int,
        shared: list[Tensor],
        outcome: ContributionOutcome,
        revised: Iterable[SettledContribution],
        read_payloads: Callable[[Sequence[Blob]], list[bytes]],
    ) -> None:
        """`revised`: earlier messages, whose fate is another on the chain that was taken over."""
        self._shared_memory.write_anchor(round_number, shared)
        self.state.apply_anchor(round_number, outcome)
        for entry in revised:
            self.state.revise_outcome(
                entry.contribution.header, entry.outcome, partial(read_payloads, entry.contribution.parts)
            )
