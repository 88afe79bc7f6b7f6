"""The trainer of a virtual peer, with the same state, optimizer and encoder as a trainer process."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from node.data import BatchReader, Corpus
from node.loop.contributions import SettledContribution
from node.model import LanguageModel
from node.step_settings import StepSettings
from node.trainer.counters import Counters
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient
from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from node.trainer.live import live_vectors
from node.trainer.schedule import ContributionTimer, StepTarget, is_contribution_due, may_apply_anchor, must_wait
from node.trainer.state import TrainerState
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.errors import MurmurError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.manifest.sections import TrainSection


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
        self._manifest = manifest
        self._corpus = corpus
        self._peer_id = peer_id
        self._sequences = manifest.train.batch_tokens // manifest.model.context
        self._optimizer = InnerOptimizer(model, manifest.train, planner.method.inner)
        self.shared_memory = SharedMemory.create(SharedLayout.of(planner))
        self.shared_memory.close()  # the memory stays; a thousand peers would use up the descriptors
        self._model = model
        self.step_target = StepTarget()
        self._contribution_timer = ContributionTimer()
        self.state = TrainerState(
            live_vectors(model, self._optimizer, has_open_gradient=manifest.pipeline.is_cut),
            self._optimizer,
            planner,
            encoder,
            self.shared_memory,
        )
        self._open_batches(0)

    def _open_batches(self, position: int) -> None:
        model, seed = self._manifest.model, self._manifest.run.seed
        self._batches = BatchReader(self._corpus, model.context, seed, self._peer_id, position)

    @property
    def train(self) -> TrainSection:
        """Return the settings of the optimizer."""
        return self._optimizer.train

    @train.setter
    def train(self, train: TrainSection) -> None:
        self._optimizer.train = train

    def use_settings(self, settings: StepSettings) -> None:
        """Make the next inner steps with these settings."""
        self._optimizer.train = settings.train
        self._batches.weights = settings.weights

    def start(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Begin at the anchor after `round_number` rounds."""
        self.shared_memory.write_anchor(round_number, shared)
        self.state.start(round_number)

    def restore(self, vectors: Mapping[str, Tensor], counters: Counters, outbox: bytes) -> None:
        """Continue from the inner state of a trainer right after a contribution."""
        self.shared_memory.write_snapshot(vectors, counters.model_dump(mode="json"))
        self.shared_memory.contribution_buffer[: len(outbox)] = outbox
        self.state.restore()
        self._open_batches(counters.position)

    def must_wait(self) -> bool:
        return must_wait(self.state.counters, self.state.plan)

    def may_apply_anchor(self) -> bool:
        return may_apply_anchor(self.state.counters, self.state.plan)

    def is_contribution_due(self, max_steps: int, now: float) -> bool:
        """Return whether to make a contribution now; `max_steps` steps bring the run to its target."""
        counters, plan = self.state.counters, self.state.plan
        seconds = self._contribution_timer.seconds(counters.since_message.steps, counters.step, now)
        steps = min(max_steps, self.step_target.steps_due(plan.steps, counters.round))
        return is_contribution_due(counters, steps, plan.method.schedule, seconds)

    def step(self) -> None:
        """Make one inner step. Raises MurmurError if its gradient is not finite."""
        step = self.state.counters.step
        windows, at_weights = self._next_windows(), self._optimizer.lookahead_weights(step)
        loss = accumulate_gradient(self._model, windows, self._manifest.train.microbatch, at_weights)
        norm = self.state.take_step(self._manifest.train.batch_tokens, loss, self._batches.position)
        self._optimizer.clear_gradient()
        if norm is None:
            raise MurmurError("a simulated peer's gradient is not finite; lower train.learning_rate")

    def _next_windows(self) -> Tensor:
        return self._batches.next_batch(self._sequences)

    def make_contribution(self) -> tuple[ContributionHeader, list[bytes]]:
        """Make a contribution; returns its header and its parts."""
        header = self.state.make_contribution()
        return header, [bytes(part) for part in self.shared_memory.contribution_parts(header.sizes)]

    def apply_known_anchor(self, round_number: int, shared: Sequence[Tensor], outcome: ContributionOutcome) -> None:
        """Apply a new anchor."""
        self.shared_memory.write_anchor(round_number, shared)
        self.state.apply_anchor(round_number, outcome, is_other_chain=round_number <= self.state.counters.round)

    def apply_anchor(
        self,
        round_number: int,
        shared: list[Tensor],
        outcome: ContributionOutcome,
        revised: Iterable[SettledContribution],
        read_payloads: Callable[[Sequence[Blob]], list[bytes]],
    ) -> None:
        """Apply a new anchor; `revised` are earlier contributions whose outcome changed with a switch of chains."""
        self.apply_known_anchor(round_number, shared, outcome)
        for entry in revised:
            self.state.revise_outcome(
                entry.contribution.header, entry.outcome, partial(read_payloads, entry.contribution.parts)
            )
