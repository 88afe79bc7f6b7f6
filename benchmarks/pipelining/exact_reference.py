"""The steps of an exact pipeline in one process, one microbatch after the other, without peers, failures or rounds.

It uses the code of the trainers for each microbatch and that of the daemons for each step. The runs of real processes
must have the same weights, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from node.daemon.checkpoints.checkpoint import load_newest
from node.daemon.stages.activations import slot_sizes
from node.daemon.state.outer_state import OuterState
from node.data import BatchReader, Corpus, open_corpus
from node.from_manifest import build_program, learning_rate_scale
from node.model import build_model, cut_of, initial_weights
from node.model.families import shapes_of
from node.run_dir import RunDir
from node.trainer.ipc.activation_memory import ActivationMemory
from node.trainer.ipc.stage_messages import ComputeStage, DrawMicrobatch
from node.trainer.stages.stage_work import EXACT_READER, StageWork
from optim.exact import Doubles, Float64Sum
from optim.exchange import Aggregator
from optim.method import SMALL_SLOTS, STEPS_MADE
from protocol.manifest.reading import load_manifest
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import StageManifest

ACTIVATION_IN, ACTIVATION_OUT, GRADIENT_IN, GRADIENT_OUT = range(4)


@dataclass(frozen=True)
class SavedStage:
    """The newest state of a stage in the folder of a node; `steps` led to it."""

    stage: int
    steps: int
    anchor: Tensor


def read_stages(folder: Path) -> list[SavedStage]:
    """Return the newest states of all nodes in a folder."""
    manifest = load_manifest(folder / "run.toml")
    return [_read_stage(manifest, RunDir(path.parent)) for path in sorted(folder.glob("*/checkpoints"))]


def _read_stage(manifest: Manifest, node: RunDir) -> SavedStage:
    stage = node.read_stage()
    assert stage is not None
    of_stage = StageManifest.of(manifest, stage)
    checkpoint, _ = load_newest(node.checkpoints, of_stage.run_id, shapes_of(of_stage))
    assert checkpoint is not None
    return SavedStage(stage, int(checkpoint.outer[STEPS_MADE]), checkpoint.anchor)


class Stage:
    """One stage: its work, its outer state, and its slots."""

    def __init__(self, manifest: StageManifest, corpus: Corpus) -> None:
        self.manifest = manifest
        self.planner = build_program(manifest)
        self._aggregator = Aggregator(self.planner)
        self.model = build_model(manifest.model, cut=cut_of(manifest))
        weights = initial_weights(manifest.model, manifest.run.seed, cut_of(manifest))
        self.state = OuterState.initial(weights, self.planner.method)
        sizes = slot_sizes(manifest).model_copy(update={"activations": 4, "tokens": 1})
        self.memory, self.tokens = ActivationMemory.create(sizes), sizes.activations
        reader = BatchReader(corpus, manifest.model.context, manifest.run.seed, EXACT_READER)
        self.work = StageWork(manifest, self.model, self.memory, reader)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Load the weights of a step."""
        self.model.load_flat(self.state.anchor)
        self.work.begin_step(step)

    def compute(self, step: int, number: int, is_backward: bool, loss: float | None = None) -> float | None:
        """Run one pass of a microbatch; a backward pass adds its gradient."""
        cut = cut_of(self.manifest)
        output = GRADIENT_OUT if is_backward else ACTIVATION_OUT
        has_output = not cut.has_embedding if is_backward else not cut.has_head
        computed = self.work.compute(
            ComputeStage(
                task=0,
                is_backward=is_backward,
                adds=is_backward,
                activation=None if cut.has_embedding else ACTIVATION_IN,
                tokens=self.tokens if cut.has_embedding or cut.has_head else None,
                gradient=GRADIENT_IN if is_backward and not cut.has_head else None,
                output=output if has_output else None,
                loss=loss,
                number=number,
                round=step,
            )
        )
        assert not computed.fault, computed.fault
        return computed.loss

    def apply(self, step: int) -> None:
        """Make the step with the sum of all its gradients."""
        plan, exact = self.planner.plan(step), self.work.exact
        assert exact is not None and exact.ledger.is_complete and isinstance(plan.codecs[0], Float64Sum)
        small = {name: slot.clone() for name, slot in self.state.slots.items() if name in SMALL_SLOTS}
        merged = self._aggregator.merge(step, [exact.encode(plan.codecs[0])], [1.0], small).vector
        decay = learning_rate_scale(self.manifest.train, self.planner.steps_before(step))
        anchor, slots = self.planner.apply_outer_step(
            plan, self.state.anchor, {**self.state.slots, **small}, merged, decay, [1.0]
        )
        self.state = OuterState(anchor, slots)


class SingleProcess:
    """All stages of a run in one process."""

    def __init__(self, manifest: Manifest, base: Path) -> None:
        torch.set_num_threads(1)
        corpus = open_corpus(manifest.data, base)
        self.stages = [Stage(StageManifest.of(manifest, number), corpus) for number in range(manifest.pipeline.stages)]
        self._sequences = manifest.pipeline.microbatch
        self._step = 0
        self.count = manifest.pipeline.step_microbatches(manifest.train.batch_tokens, manifest.model.context)

    def run(self, steps: int) -> list[Tensor]:
        """Make that many more steps; return the weights of the stages."""
        first, self._step = self._step, self._step + steps
        for step in range(first, self._step):
            for number in range(self.count):
                self._send(step, number)
            for stage in self.stages:
                stage.apply(step)
                stage.begin(step + 1)
        return [stage.state.anchor for stage in self.stages]

    def sums(self, step: int, numbers: Sequence[int]) -> list[Doubles]:
        """Return the sums of some microbatches' gradients by stage, at the weights of the open step."""
        for number in numbers:
            self._send(step, number)
        totals = []
        for stage in self.stages:
            assert stage.work.exact is not None
            totals.append(stage.work.exact.total.copy())
            stage.begin(step)
        return totals

    def _send(self, step: int, number: int) -> None:
        """Send a microbatch forward through all stages, and back."""
        first, last = self.stages[0], self.stages[-1]
        window = (step * self.count + number) * self._sequences
        first.work.draw(DrawMicrobatch(serial=0, slot=first.tokens, window=window))
        last.memory.slot(last.tokens)[:] = first.memory.slot(first.tokens)
        for stage, following in zip(self.stages, self.stages[1:], strict=False):
            stage.compute(step, number, is_backward=False)
            following.memory.slot(ACTIVATION_IN)[:] = stage.memory.slot(ACTIVATION_OUT)
        loss = last.compute(step, number, is_backward=True)
        for following, stage in zip(self.stages[::-1], self.stages[-2::-1], strict=False):
            stage.memory.slot(GRADIENT_IN)[:] = following.memory.slot(GRADIENT_OUT)
            stage.compute(step, number, is_backward=True, loss=loss)
