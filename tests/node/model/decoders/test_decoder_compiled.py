"""The compiled model computes what the plain one does, up to bf16's rounding, and is compiled once for its shape."""

import shutil

import pytest
import torch

from node.model import LanguageModel, build_compiled_model, build_model, has_compiler, initial_weights, interface
from node.model.decoders.decoder import CompiledCausalAttention
from node.trainer.inner_step import accumulate_gradient, validation_loss
from protocol.manifest.model import ModelSection

pytestmark = pytest.mark.slow

SHAPE = ModelSection(vocabulary=32, width=16, layers=1, heads=4, kv_heads=2, hidden=24, context=12, document_end=3)
ROUNDING = 0.02
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute the loss of 48 tokens in three chunks."""
    monkeypatch.setattr(interface, "CHUNK_VALUES", {"cpu": 1})
    monkeypatch.setattr(interface, "MIN_CHUNK_TOKENS", 20)


def windows_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE.vocabulary, (4, SHAPE.context + 1), generator=generator)


def gradient_of(model: LanguageModel, windows: torch.Tensor) -> tuple[float, torch.Tensor]:
    weights = initial_weights(SHAPE, 3)
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3))
    model.load_flat(weights + 0.1 * noise)  # far from uniform, so that attention matters
    loss = accumulate_gradient(model, windows, microbatch=4)
    assert model.flat_gradient is not None
    return loss, model.flat_gradient


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(found - wanted) / torch.linalg.vector_norm(wanted))


@needs_compiler
def test_the_compiled_model_is_the_plain_one_up_to_rounding() -> None:
    windows = windows_of(0)
    expected, wanted = gradient_of(build_model(SHAPE), windows)
    loss, gradient = gradient_of(build_compiled_model(SHAPE), windows)
    assert abs(loss / expected - 1) < ROUNDING
    assert distance(gradient, wanted) < ROUNDING
    seeing = build_compiled_model(SHAPE)
    for module in seeing.modules():
        if isinstance(module, CompiledCausalAttention):
            module.future.zero_()  # control: a model that sees the future is told apart
    assert distance(gradient_of(seeing, windows)[1], wanted) > ROUNDING


@needs_compiler
def test_a_second_model_of_the_shape_is_not_compiled_anew() -> None:
    gradient_of(build_compiled_model(SHAPE), windows_of(0))
    with torch.compiler.set_stance("fail_on_recompile"):
        second = build_compiled_model(SHAPE)
        gradient_of(second, windows_of(1))
        with pytest.raises(RuntimeError):  # control: another batch is another program
            validation_loss(second, initial_weights(SHAPE, 0), [windows_of(2)[:3]])


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    there = {"clang++"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in there else None)
    assert has_compiler()
    there.clear()
    assert not has_compiler()
    there.add("own")
    monkeypatch.setenv("CXX", "own")
    assert has_compiler()
