"""Recomputed activations: the same gradient to the last bit, and less memory until the backward pass."""

from typing import get_args

import pytest
import torch

from node.model import LanguageModel, build_model, initial_weights
from node.model.interface import Recompute
from node.trainer.inner_step import accumulate_gradient, validation_loss
from protocol.manifest.model import ModelSection

LLAMA = ModelSection(vocabulary=32, width=64, layers=2, heads=4, kv_heads=2, hidden=96, context=48)
KINDS = {
    "llama": LLAMA,
    "wide": LLAMA.model_copy(update={"width": 256, "hidden": 520}),  # rows are shared, not copied
    "qwen3": LLAMA.model_copy(update={"kind": "qwen3"}),
    "qwen3-moe": LLAMA.model_copy(update={"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2, "hidden": 24}),
    "subspace": LLAMA.model_copy(update={"subspace": 8, "tied": False}),
}
every_kind = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


def prepared(config: ModelSection, recompute: Recompute) -> LanguageModel:
    model = build_model(config)
    model.recompute = recompute
    model.load_flat(initial_weights(config, 5))
    return model


def windows_of(config: ModelSection) -> torch.Tensor:
    return torch.randint(config.vocabulary, (3, config.context + 1), generator=torch.Generator().manual_seed(5))


@every_kind
def test_gradient_has_the_same_bits(config: ModelSection) -> None:
    """So have the tokens of each expert, which are counted once."""
    found: dict[Recompute, tuple[float, torch.Tensor, tuple[int, ...]]] = {}
    for recompute in get_args(Recompute):
        model = prepared(config, recompute)
        for _ in range(2):
            loss = accumulate_gradient(model, windows_of(config), 2)
        assert model.flat_gradient is not None
        found[recompute] = loss, model.flat_gradient, model.take_routed_tokens()
    for loss, gradient, routed in found.values():
        assert loss == found["none"][0] and torch.equal(gradient, found["none"][1]) and routed == found["none"][2]
        assert sum(routed) == 2 * 3 * config.context * config.layers * (config.experts_per_token or 0)


def kept_bytes(config: ModelSection, recompute: Recompute) -> int:
    """Return the bytes that a forward pass has allocated and not freed."""
    model, windows = prepared(config, recompute), windows_of(config)
    model.attach_gradient()
    with torch.profiler.profile(profile_memory=True) as profiled:
        loss = model(windows[:, :-1], windows[:, 1:])
    assert loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in profiled.events() or [])


def test_less_is_kept() -> None:
    deep = LLAMA.model_copy(update={"layers": 8})
    everything, products, inputs = (kept_bytes(deep, recompute) for recompute in get_args(Recompute))
    assert inputs < 0.5 * products < 0.5 * 0.6 * everything, (everything, products, inputs)


def test_validation_runs_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = prepared(LLAMA, "full"), windows_of(LLAMA)
    monkeypatch.setattr("node.model.interface.checkpoint", lambda *_, **__: pytest.fail("checkpointed"))
    loss, _ = validation_loss(model, model.flat, [windows])
    assert loss > 0
    with pytest.raises(pytest.fail.Exception):  # control
        accumulate_gradient(model, windows, 2)
