"""A stage's trainer computes the same gradient as a trainer of the whole model, through slots of shared memory."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.data import BatchReader, Corpus
from node.data.corpus import TokenArray
from node.ipc.activation_memory import ActivationMemory, SlotSizes
from node.ipc.stage_messages import ComputeStage, DrawMicrobatch, StageComputed
from node.model import LanguageModel, build_model, cut_of, initial_weights
from node.trainer.inner_step import accumulate_gradient
from node.trainer.stage_work import StageWork, stage_train
from protocol.manifest import Manifest
from protocol.manifest_pipeline import PipelineSection
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST

torch.set_num_threads(1)
STAGES, MICROBATCHES = 2, 3
SERIAL = 7


@pytest.fixture
def corpus() -> Corpus:
    row = np.random.default_rng(0).integers(0, 16, 5000, dtype=np.uint8)
    return Corpus(TokenArray([row]), TokenArray([row[:100]]), 16)


def pipeline_manifest(activations: str = "fp32") -> Manifest:
    model = MANIFEST.model.model_copy(update={"layers": 3, "tied": False})
    table = PipelineSection.model_validate({"stages": STAGES, "microbatch": 2, "activations": activations})
    train = MANIFEST.train.model_copy(update={"batch_tokens": MICROBATCHES * table.microbatch * model.context})
    return MANIFEST.model_copy(update={"model": model, "pipeline": table, "train": train})


class Pipeline:
    """Both stages in one process; each has its own memory, and results are copied as a daemon would."""

    def __init__(self, manifest: Manifest, corpus: Corpus) -> None:
        self.manifest = manifest
        model, table = manifest.model, manifest.pipeline
        self.sizes = SlotSizes(
            activation_bytes=table.activation_bytes(model.context, model.width),
            activations=4,
            token_bytes=4 * table.microbatch * (model.context + 1),
            tokens=1,
        )
        self.tokens = self.sizes.activations
        self.models: list[LanguageModel] = []
        self.memories: list[ActivationMemory] = []
        self.stages: list[StageWork] = []
        for number in range(STAGES):
            of_stage = StageManifest.of(manifest, number)
            stage = build_model(model, cut=cut_of(of_stage))
            stage.load_flat(initial_weights(model, manifest.run.seed, cut_of(of_stage)))
            memory = ActivationMemory.create(self.sizes)
            reader = BatchReader(corpus, model.context, manifest.run.seed, "owner")
            self.models.append(stage)
            self.memories.append(memory)
            self.stages.append(StageWork(of_stage, stage, memory, reader))

    def copy(self, source: int, target: int, slot: int) -> None:
        self.memories[target].slot(slot)[:] = self.memories[source].slot(slot)

    def run(self, adds: bool = True) -> float:
        """Send one microbatch forward and back; slot 0 has the activation, slot 1 its gradient."""
        drawn = self.stages[0].draw(DrawMicrobatch(serial=SERIAL, slot=self.tokens))
        assert drawn.serial == SERIAL
        self.copy(0, 1, self.tokens)
        self.compute(0, is_backward=False, adds=False, tokens=self.tokens, output=0)
        self.copy(0, 1, 0)
        done = self.compute(1, is_backward=True, adds=adds, activation=0, tokens=self.tokens, output=1)
        self.copy(1, 0, 1)
        self.compute(0, is_backward=True, adds=adds, tokens=self.tokens, gradient=1, loss=done.loss)
        assert done.loss is not None
        return done.loss

    def compute(self, stage: int, **values: Any) -> StageComputed:
        done = self.stages[stage].compute(ComputeStage(task=1, **values))
        assert not done.fault
        return done


def whole_gradient(manifest: Manifest, corpus: Corpus) -> tuple[float, Tensor]:
    model = build_model(manifest.model)
    model.load_flat(initial_weights(manifest.model, manifest.run.seed))
    reader = BatchReader(corpus, manifest.model.context, manifest.run.seed, "owner")
    sequences = manifest.pipeline.microbatch * MICROBATCHES
    loss = accumulate_gradient(model, reader.next_batch(sequences), manifest.pipeline.microbatch)
    return loss, model.attach_gradient()


def test_step_of_all_stages_has_the_gradient_of_the_whole_model(corpus: Corpus) -> None:
    manifest = pipeline_manifest()
    pipeline = Pipeline(manifest, corpus)
    for _ in range(MICROBATCHES):
        pipeline.run()
    totals = [stage.take() for stage in pipeline.stages]
    loss, gradient = whole_gradient(manifest, corpus)
    joined = torch.cat([model.attach_gradient() for model in pipeline.models])
    torch.testing.assert_close(joined, gradient, rtol=1e-5, atol=1e-8)
    tokens = MICROBATCHES * manifest.pipeline.microbatch * manifest.model.context
    assert [count for count, _ in totals] == [tokens] * STAGES
    assert [mean for _, mean in totals] == [pytest.approx(loss)] * STAGES
    assert all(stage.is_between_steps for stage in pipeline.stages)


def test_repeated_computation_gives_the_same_result_and_adds_nothing(corpus: Corpus) -> None:
    pipeline = Pipeline(pipeline_manifest("bf16"), corpus)
    pipeline.run(adds=False)
    assert all(stage.is_between_steps for stage in pipeline.stages)
    assert not any(model.attach_gradient().any() for model in pipeline.models)
    pipeline.run()
    assert all(model.attach_gradient().any() for model in pipeline.models), "the control: it adds otherwise"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_input_that_is_not_finite_is_refused_before_anything_is_added(corpus: Corpus, value: float) -> None:
    pipeline = Pipeline(pipeline_manifest(), corpus)
    pipeline.run()
    before = pipeline.models[1].attach_gradient().clone()
    torch.frombuffer(pipeline.memories[1].slot(0), dtype=torch.float32)[3] = value
    command = ComputeStage(task=1, is_backward=True, adds=True, activation=0, tokens=pipeline.tokens, output=1)
    assert pipeline.stages[1].compute(command).fault == "not finite"
    assert torch.equal(pipeline.models[1].attach_gradient(), before)


def test_stages_share_the_limit_of_the_gradients_norm() -> None:
    assert 4 * stage_train(MANIFEST.train, 4).clip ** 2 == pytest.approx(MANIFEST.train.clip**2)
