"""The trainer of a virtual peer, with the same state, optimizer and encoder as a trainer process."""

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
    """Makes inner steps and contributions for one virtual peer after `start`."""

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
        """Begin at the anchor after `round_number` rounds."""
        self._shared_memory.write_anchor(round_number, shared)
        self.state.start(round_number)

    def must_wait(self) -> bool:
        return must_wait(self.state.counters, self.state.plan)

    def may_apply_anchor(self) -> bool:
        return may_apply_anchor(self.state.counters, self.state.plan)

    def is_contribution_due(self, max_steps: int, now: float) -> bool:
        """Return whether to make a contribution now; `max_steps` steps bring the run to its target."""
        counters, plan = self.state.counters, self.state.plan
        seconds = self._contribution_timer.seconds(counters.since_message.steps, now)
        steps = self.step_target.steps_due(min(plan.steps, max_steps), counters.round)
        return is_contribution_due(counters, steps, plan.method.schedule, seconds)

    def step(self) -> None:
        """Make one inner step. Raises MurmurError if its gradient is not finite."""
        step = self.state.counters.step
        windows, at_weights = self._batches.next_batch(self._sequences), self._optimizer.lookahead_weights(step)
        loss = accumulate_gradient(self._model, windows, self._train.microbatch, at_weights)
        norm = self._optimizer.step(step)
        self._optimizer.clear_gradient()
        if norm is None:
            raise MurmurError("a simulated peer's gradient is not finite; lower train.learning_rate")
        self.state.count_step(self._train.batch_tokens, loss, self._batches.position)

    def make_contribution(self) -> tuple[ContributionHeader, list[bytes]]:
        """Make a contribution; returns its header and its parts."""
        header = self.state.make_contribution()
        return header, [bytes(part) for part in self._shared_memory.contribution_parts(header.sizes)]

    def apply_anchor(
        self,
        round_number: int,
        shared: list[Tensor],
        outcome: ContributionOutcome,
        revised: Iterable[SettledContribution],
        read_payloads: Callable[[Sequence[Blob]], list[bytes]],
    ) -> None:
        """Apply a new anchor; `revised` are earlier contributions whose outcome changed with a switch of chains."""
        self._shared_memory.write_anchor(round_number, shared)
        self.state.apply_anchor(round_number, outcome)
        for entry in revised:
            self.state.revise_outcome(
                entry.contribution.header, entry.outcome, partial(read_payloads, entry.contribution.parts)
            )
