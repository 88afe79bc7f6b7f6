"""The inner optimizer against its formula and against torch's AdamW over separate parameters."""

import pytest
import torch

from node.from_manifest import learning_rate_scale
from node.model import LanguageModel, build_model, initial_weights
from node.trainer.inner_step import InnerOptimizer
from optim.compose import INNER_RULES
from optim.inner.adamw import AdamW
from optim.inner.base import FIRST_MOMENT, GRADIENT_SUM, InnerStep, InnerUpdateRule
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import TrainSection

torch.set_num_threads(1)
MODEL = ModelSection(vocabulary=32, width=16, layers=2, heads=4, hidden=24, context=12)
TRAIN = TrainSection(batch_tokens=24, learning_rate=1e-2, clip=0.5)


def prepared(train: TrainSection = TRAIN, inner: InnerUpdateRule | None = None) -> tuple[LanguageModel, InnerOptimizer]:
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, 0))
    return model, InnerOptimizer(model, train, inner or AdamW())


def set_gradient(model: LanguageModel, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    model.attach_gradient().copy_(torch.randn(model.flat.shape, generator=generator) * scale)


def test_steps_equal_torch_over_separate_parameters() -> None:
    model, optimizer = prepared()
    parameters = {name: view.clone().requires_grad_() for name, view in model.shapes.views(model.flat).items()}
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": TRAIN.weight_decay},
            {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=TRAIN.learning_rate,
        betas=(TRAIN.beta1, TRAIN.beta2),
    )
    for step in range(5):
        set_gradient(model, step)
        assert model.flat_gradient is not None
        for name, gradient in model.shapes.views(model.flat_gradient.clone()).items():
            parameters[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters.values(), TRAIN.clip)
        reference.step()
        assert optimizer.step(step)
    for name, view in model.shapes.views(model.flat).items():
        torch.testing.assert_close(view, parameters[name].detach(), atol=1e-6, rtol=1e-5)


def test_moments_carried_over_go_on_to_the_bit() -> None:
    model, optimizer = prepared()
    other, second = prepared()
    for step in range(3):
        set_gradient(model, step)
        optimizer.step(step)
    other.load_flat(model.flat)
    for name, vector in optimizer.vectors.items():
        second.vectors[name].copy_(vector)
    for each, stepped in ((model, optimizer), (other, second)):
        set_gradient(each, 99)
        stepped.step(3)
    assert torch.equal(model.flat, other.flat)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, optimizer = prepared()
    before = model.flat.clone()
    set_gradient(model, 0)
    assert model.flat_gradient is not None
    model.flat_gradient[5] = bad
    assert optimizer.step(0) is None
    assert torch.equal(model.flat, before)
    assert not optimizer.vectors[FIRST_MOMENT].any()


def test_a_step_without_gradient_is_a_mistake() -> None:
    _, optimizer = prepared()
    with pytest.raises(ValueError, match="backward"):
        optimizer.step(0)


class Recording(InnerUpdateRule):
    """Notes what it is given."""

    vectors = (GRADIENT_SUM,)

    def __init__(self) -> None:
        self.steps: list[tuple[InnerStep, torch.Tensor]] = []

    def step(self, weights: torch.Tensor, gradient: torch.Tensor, vectors: object, step: InnerStep) -> None:
        self.steps.append((step, gradient.clone()))


def test_the_inner_part_gets_the_rate_of_the_step_and_a_clipped_gradient() -> None:
    train = TrainSection(
        batch_tokens=24, learning_rate=1e-2, clip=0.5, warmup_steps=4, decay_steps=100, final_share=0.1
    )
    inner = Recording()
    model, optimizer = prepared(train, inner)
    for count in (0, 7, 200):
        set_gradient(model, count)
        assert optimizer.step(count)
    layout = model.shapes.layout
    for (step, gradient), count in zip(inner.steps, (0, 7, 200), strict=True):
        assert step.count == count and step.rate == pytest.approx(1e-2 * learning_rate_scale(train, count))
        assert (step.beta1, step.beta2, step.weight_decay) == (train.beta1, train.beta2, train.weight_decay)
        assert tuple(step.matrix_spans) == layout.matrix_spans
        assert float(gradient.norm()) == pytest.approx(0.5, rel=1e-5)
    set_gradient(model, 1, scale=1e-6)
    optimizer.step(0)
    assert model.flat_gradient is not None and torch.equal(inner.steps[-1][1], model.flat_gradient), (
        "a small one is left alone"
    )


@pytest.mark.parametrize("kind", INNER_RULES)
def test_every_inner_part_keeps_its_vectors_on_the_models_device(kind: str) -> None:
    inner = INNER_RULES[kind]()
    model, optimizer = prepared(inner=inner)
    assert tuple(optimizer.vectors) == INNER_RULES[kind].vectors
    for step in range(4):
        place = optimizer.lookahead_weights(step)
        assert place is None or place.shape == model.flat.shape
        set_gradient(model, step)
        assert optimizer.step(step)
        optimizer.clear_gradient()
    for name, vector in optimizer.vectors.items():
        assert vector.numel() == inner.vector_numel(name, model.shapes.layout) and vector.device == model.flat.device
    assert torch.isfinite(model.flat).all() and model.flat_gradient is None


def test_a_newcomer_warms_up_to_the_rate_that_the_others_have() -> None:
    train = TrainSection(batch_tokens=24, learning_rate=1e-2, warmup_steps=4, decay_steps=100, final_share=0.0)
    assert learning_rate_scale(train, 50, 0) == pytest.approx(learning_rate_scale(train, 10, 40))
    assert learning_rate_scale(train, 0, 50) == pytest.approx(0.2 * 0.5)
    assert learning_rate_scale(train, 0, 0) == pytest.approx(0.2), "the control: as if the run had just begun"


def test_matrices_of_layers_exclude_embedding_output_and_norms() -> None:
    model, _ = prepared()
    named = dict(zip(model.shapes.layout.spans, model.shapes.names, strict=True))
    names = [named[span] for span, _ in model.layer_matrices]
    assert len(names) == 2 * 7, "q, k, v, o, gate, up and down of each layer"
    assert not any("embed" in name or "norm" in name or "head" in name for name in names)
    recording = Recording()
    model, optimizer = prepared(inner=recording)
    set_gradient(model, 0)
    optimizer.step(0)
    assert tuple(recording.steps[0][0].layer_matrices) == model.layer_matrices


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", {0: 1.0, 50: 0.55, 100: 0.1, 150: 0.1}),
        ("linear", {0: 1.0, 50: 0.55, 75: 0.325, 100: 0.1, 150: 0.1}),
        ("wsd", {0: 1.0, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1, 150: 0.1}),
    ],
)
def test_schedules_by_hand(schedule: str, expected: dict[int, float]) -> None:
    table = {"batch_tokens": 24, "learning_rate": 1e-2, "decay_steps": 100, "final_share": 0.1, "schedule": schedule}
    train = TrainSection.model_validate(table)
    for step, scale in expected.items():
        assert learning_rate_scale(train, step) == pytest.approx(scale), step
