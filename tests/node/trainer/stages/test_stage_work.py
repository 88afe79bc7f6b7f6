"""A stage's trainer computes the same gradient as a trainer of the whole model, through slots of shared memory."""

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from node.data import BatchReader, Corpus
from node.data.corpus import TokenArray
from node.injected_faults import TEST_RUN, VARIABLE
from node.model import LanguageModel, build_model, cut_of, initial_weights
from node.trainer.inner_step import accumulate_gradient
from node.trainer.ipc.activation_memory import ActivationMemory, SlotSizes
from node.trainer.ipc.stage_messages import ComputeStage, DrawMicrobatch, StageComputed
from node.trainer.stages import stage_work
from node.trainer.stages.faulty_stage import build_stage_work
from node.trainer.stages.stage_work import StageWork, stage_train
from protocol.manifest.run import Manifest
from protocol.manifest.sections import PipelineSection
from protocol.pipeline.stage import StageManifest
from tests.node.small_run import MANIFEST

torch.set_num_threads(1)
STAGES, MICROBATCHES = 2, 3
SERIAL = 7


@pytest.fixture
def corpus() -> Corpus:
    row = np.random.default_rng(0).integers(0, 16, 5000, dtype=np.uint8)
    return Corpus.of(TokenArray([row]), TokenArray([row[:100]]), 16)


def pipeline_manifest(activations: str = "fp32", subspace: int | None = None) -> Manifest:
    model = MANIFEST.model.model_copy(update={"width": 16, "layers": 3, "tied": False, "subspace": subspace})
    table = PipelineSection.model_validate({"stages": STAGES, "microbatch": 2, "activations": activations})
    train = MANIFEST.train.model_copy(update={"batch_tokens": MICROBATCHES * table.microbatch * model.context})
    return MANIFEST.model_copy(update={"model": model, "pipeline": table, "train": train})


class Pipeline:
    """Both stages in one process; each has its own memory, and results are copied as a daemon would."""

    def __init__(self, manifest: Manifest, corpus: Corpus) -> None:
        self.manifest = manifest
        model, table = manifest.model, manifest.pipeline
        self.sizes = SlotSizes(
            activation_bytes=table.activation_bytes(model.context, model.stream_width),
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
    torch.testing.assert_close(joined, gradient, rtol=1e-5, atol=1e-7)
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


@pytest.mark.parametrize("subspace", [None, 8])
@pytest.mark.parametrize(("activations", "limit"), [("fp32", 2e-6), ("bf16", 1e-2), ("int8", 3e-2)])
def test_formats_change_the_gradient_by_less_than_a_lost_microbatch(
    corpus: Corpus, activations: str, limit: float, subspace: int | None
) -> None:
    """Compare with the limits of the design; a lost microbatch is far above all of them, which is the control."""
    manifest = pipeline_manifest(activations, subspace)
    pipeline, incomplete = Pipeline(manifest, corpus), Pipeline(manifest, corpus)
    for _ in range(MICROBATCHES):
        pipeline.run()
    for _ in range(MICROBATCHES - 1):
        incomplete.run()
    loss, gradient = whole_gradient(manifest, corpus)

    def error(found: Pipeline) -> float:
        totals = [stage.take() for stage in found.stages]
        assert totals[0][1] == totals[1][1] == pytest.approx(loss, rel=2e-2)
        joined = torch.cat([model.attach_gradient() for model in found.models])
        return float((joined - gradient).norm() / gradient.norm())

    assert error(pipeline) < limit < 0.1 < error(incomplete)


@pytest.mark.parametrize(
    ("activations", "offset", "garbage"),
    [
        ("fp32", 12, struct.pack("<f", math.nan)),
        ("fp32", 12, struct.pack("<f", -math.inf)),
        ("bf16", 8, struct.pack("<f", math.nan)[2:]),
        ("int8", 2, struct.pack("<f", math.inf)[2:]),
        ("int8", 2, struct.pack("<f", -1.0)[2:]),
        ("int8", 0, bytes([99])),
    ],
)
def test_malformed_input_is_refused_before_anything_is_added(
    corpus: Corpus, activations: str, offset: int, garbage: bytes
) -> None:
    pipeline = Pipeline(pipeline_manifest(activations), corpus)
    pipeline.run()
    before = pipeline.models[1].attach_gradient().clone()
    command = ComputeStage(task=1, is_backward=True, adds=True, activation=0, tokens=pipeline.tokens, output=1)
    slot = pipeline.memories[1].slot(0)
    good, slot[offset : offset + len(garbage)] = bytes(slot), garbage
    assert pipeline.stages[1].compute(command).fault == "wrong input"
    assert torch.equal(pipeline.models[1].attach_gradient(), before)
    slot[:] = good
    assert not pipeline.stages[1].compute(command).fault, "the control: the same input without the garbage"
    assert not torch.equal(pipeline.models[1].attach_gradient(), before)


def test_gradient_that_overflows_adds_nothing(corpus: Corpus) -> None:
    """Without this check one microbatch with large values costs a stage its whole step."""
    pipeline = Pipeline(pipeline_manifest(), corpus)
    pipeline.run()
    first, model = pipeline.stages[0], pipeline.models[0]
    before, ledger = model.attach_gradient().clone(), first.ledger.copy()
    torch.frombuffer(pipeline.memories[0].slot(1), dtype=torch.float32).fill_(3e38)
    command = ComputeStage(task=1, is_backward=True, adds=True, tokens=pipeline.tokens, gradient=1, owner="a", serial=9)
    assert first.compute(command).fault == "overflow"
    assert torch.equal(model.attach_gradient(), before) and first.ledger == ledger
    first._differentiate(command)
    assert not model.attach_gradient().isfinite().all(), "the control: the gradient without the check"


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize("stage", range(STAGES))
def test_token_outside_of_the_vocabulary_is_refused(corpus: Corpus, stage: int, token: int) -> None:
    """An embedding without this check would end the trainer, on any stranger's word."""
    pipeline = Pipeline(pipeline_manifest(subspace=8), corpus)
    pipeline.run()
    command = ComputeStage(
        task=1, is_backward=True, adds=True, activation=0, tokens=pipeline.tokens, gradient=1, output=2
    )
    assert not pipeline.stages[stage].compute(command).fault, "the control"
    torch.frombuffer(pipeline.memories[stage].slot(pipeline.tokens), dtype=torch.int32)[5] = token
    assert pipeline.stages[stage].compute(command).fault == "wrong input"


def test_stages_share_the_limit_of_the_gradients_norm() -> None:
    assert 4 * stage_train(MANIFEST.train, 4).clip ** 2 == pytest.approx(MANIFEST.train.clip**2)


@pytest.mark.parametrize(("faults", "copies"), [("adds=always", 2), ("slow=1", 1)])
def test_injected_fault_adds_a_repeated_gradient_of_an_exact_step_again(
    faults: str, copies: int, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: under another fault a repeated computation adds nothing. The ledger has it once in any case."""
    monkeypatch.setenv(VARIABLE, faults)
    manifest = pipeline_manifest()
    table = manifest.pipeline.model_copy(update={"mode": "exact"})
    run = manifest.run.model_copy(update={"name": TEST_RUN})
    pipeline = Pipeline(manifest, corpus)
    stage = StageManifest.of(manifest.model_copy(update={"pipeline": table, "run": run}), 1)
    reader = BatchReader(corpus, manifest.model.context, manifest.run.seed, "owner")
    work = build_stage_work(stage, pipeline.models[1], pipeline.memories[1], reader, is_restarted=False)
    pipeline.run(adds=False)  # fills the slots
    sums = []
    for adds in (True, False):
        command: dict[str, Any] = {"activation": 0, "tokens": pipeline.tokens, "output": 1, "number": 0, "round": 0}
        assert not work.compute(ComputeStage(task=1, is_backward=True, adds=adds, **command)).fault
        assert work.exact is not None and list(work.exact.ledger) == [0]
        sums.append(work.exact.total.copy())
    assert sums[0].any() and np.array_equal(sums[1], copies * sums[0])


def test_gradient_far_above_the_median_is_scaled_down_and_no_other_changes(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited, control = Pipeline(pipeline_manifest(), corpus), Pipeline(pipeline_manifest(), corpus)
    for _ in range(10):
        limited.run()
    added, before = [], limited.models[0].attach_gradient().clone()
    for pipeline in (limited, control):
        if pipeline is control:
            monkeypatch.setattr(stage_work, "MIN_NORMS", 10**9)
            for _ in range(10):
                pipeline.run()
            assert torch.equal(before, pipeline.models[0].attach_gradient())
        before = pipeline.models[0].attach_gradient().clone()
        torch.frombuffer(pipeline.memories[0].slot(1), dtype=torch.float32).mul_(1000)
        done = pipeline.compute(0, is_backward=True, adds=True, tokens=pipeline.tokens, gradient=1)
        assert done.clipped == (pipeline is limited)
        added.append(float((pipeline.models[0].attach_gradient() - before).norm()))
    usual = sorted(limited.stages[0]._norms)[5]
    assert added[0] == pytest.approx(5 * usual, rel=0.3) and added[1] > 100 * usual
