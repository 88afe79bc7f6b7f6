"""Repeat the work of another peer from its work record, and return what it should have contributed."""

from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, FiniteFloat
from torch import Tensor

from node.daemon.audits.inner_state import InnerState
from node.data import Corpus
from node.model import LanguageModel
from node.simulation.virtual.trainer import VirtualTrainer
from node.step_settings import StepSettings
from optim.exchange import ContributionEncoder
from optim.round_plan import RoundPlanner
from protocol.audits import BlobName, WorkRecord
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Contribution
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest

Anchors = Mapping[int, Tensor]  # the shared vectors of rounds, one after another, weights first


class Repetition(BaseModel):
    """A contribution as it should be: the names of its parts, its counts, and the inner state after it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parts: tuple[BlobName, ...]
    tokens: int
    steps: int
    loss: FiniteFloat
    after: BlobName

    def find_difference(self, contribution: Contribution, record: WorkRecord) -> str:
        """Return the first difference to the peer's contribution; empty if every bit agrees."""
        if tuple(part.blob for part in self.parts) != contribution.parts:
            return "other values"
        if (self.tokens, self.steps) != (contribution.tokens, contribution.steps):
            return "other counts"
        if self.loss != contribution.loss:
            return "another loss"
        return "" if self.after == record.after else "another state"


class Repeater:
    """Repeats work of one run, in this process; `settings_at` returns the settings of the steps of a round."""

    def __init__(
        self,
        manifest: Manifest,
        planner: RoundPlanner,
        corpus: Corpus,
        settings_at: Callable[[int], StepSettings],
        build_model: Callable[[], LanguageModel],
    ) -> None:
        self._manifest = manifest
        self._planner = planner
        self._corpus = corpus
        self._settings_at = settings_at
        self._build_model = build_model

    def repeat(self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors) -> Repetition:
        """Repeat the work of a peer; `before` is the state before it, None for the first contribution.

        Raises:
            MalformedError: the record and the state do not fit together.
        """
        trainer = self._restore(peer, record, before, anchors)
        pending = list(record.trace.anchors)
        while True:
            made = trainer.state.counters.since_message.steps
            while pending and pending[0].steps == made:
                anchor = pending.pop(0)
                trainer.apply_known_anchor(anchor.round, [anchors[anchor.round]], anchor.outcome)
                trainer.use_settings(self._settings_at(anchor.round))
            if made >= record.trace.steps:
                break
            trainer.step()
        if pending or trainer.state.counters.round != record.round:
            raise MalformedError("a work record whose anchors do not lead to its round")
        header, payloads = trainer.make_contribution()
        trainer.state.save()
        state = InnerState.copy_of(trainer.shared_memory, header.serial)
        assert state is not None
        return Repetition(
            parts=tuple(BlobName.of(Blob.of(payload)) for payload in payloads),
            tokens=header.tokens,
            steps=header.steps,
            loss=header.loss,
            after=BlobName.of(Blob.of(*state.to_bytes())),
        )

    def _restore(self, peer: PeerId, record: WorkRecord, before: InnerState | None, anchors: Anchors) -> VirtualTrainer:
        start = record.trace.start if before is None else before.counters.round
        if start is None:
            raise MalformedError("a work record without a state before it")
        settings = self._settings_at(start)
        train = settings.train.model_copy(update={"microbatch": record.conditions.microbatch})
        trainer = VirtualTrainer(
            self._build_model(),
            self._manifest.model_copy(update={"train": train}),
            self._planner,
            self._corpus,
            ContributionEncoder(self._planner),
            peer,
        )
        if before is None:
            trainer.start(start, [anchors[start]])
        else:
            trainer.restore(before.vectors, before.counters, before.outbox)
        trainer.use_settings(settings)
        if trainer.state.counters.position != record.position:
            raise MalformedError("a work record that names another position of the text")
        return trainer
