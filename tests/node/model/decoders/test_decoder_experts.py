"""Mixtures of experts: the balance loss, that training spreads tokens by it, and that nobody sees it."""

import pytest
import torch
from torch import Tensor

from node.model import LanguageModel, build_compiled_model, build_model, initial_weights
from node.model.decoders.decoder import SparseMlp, balance_loss
from node.trainer.inner_step import accumulate_gradient, validation_loss
from protocol.manifest.model import ModelSection

torch.set_num_threads(1)
CONFIG = ModelSection(
    kind="qwen3-moe", vocabulary=32, width=16, layers=2, heads=4, hidden=16, context=12, experts=4, experts_per_token=2
)


def prepared(balance: float) -> LanguageModel:
    config = CONFIG.model_copy(update={"balance_loss": balance})
    model = build_model(config)
    model.load_flat(initial_weights(config, 0))
    views = model.shapes.views(model.flat)
    views["model.embed_tokens.weight"] += 0.02  # what all tokens share, by which they all prefer the first two experts
    for layer in range(config.layers):
        views[f"model.layers.{layer}.mlp.gate.weight"][:2] += 0.1
    return model


def windows(seed: int) -> Tensor:
    return torch.randint(32, (4, 13), generator=torch.Generator().manual_seed(seed))


def routers(model: LanguageModel) -> list[SparseMlp]:
    return [module for module in model.modules() if isinstance(module, SparseMlp)]


def imbalance(model: LanguageModel) -> float:
    """Return by how much the mean balance loss of new tokens is above that of an even spread, which is 2."""
    losses = []
    for seed in range(90, 98):
        model(windows(seed)[:, :-1])
        losses += [float(loss.detach()) for mlp in routers(model) if (loss := mlp.take_balance_loss()) is not None]
    return sum(losses) / len(losses) - CONFIG.experts_per_token  # type: ignore[operator]


def test_balance_loss_is_least_for_tokens_that_spread_evenly() -> None:
    even, chosen = torch.full((4, 4), 0.25), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])
    assert float(balance_loss(even, chosen)) == pytest.approx(2.0)
    peaked = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(4, 1)
    assert float(balance_loss(peaked, torch.tensor([[0, 1]] * 4))) == pytest.approx(4.0)


def test_balance_loss_agrees_with_transformers_for_one_layer() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    probabilities = logits.softmax(-1)
    ours = balance_loss(probabilities, probabilities.topk(3).indices)
    assert float(ours) == pytest.approx(float(load_balancing_loss_func((logits,), 8, 3)), rel=1e-5)


def test_balance_loss_has_a_gradient_and_is_not_shown() -> None:
    plain, balanced = prepared(0.0), prepared(1.0)
    losses = [accumulate_gradient(model, windows(0), microbatch=2) for model in (plain, balanced)]
    assert losses[0] == losses[1] == pytest.approx(validation_loss(plain, plain.flat, [windows(0)])[0], rel=1e-6)
    gradients = [model.shapes.views(model.attach_gradient()) for model in (plain, balanced)]
    name = "model.layers.1.mlp.gate.weight"
    assert not torch.allclose(gradients[0][name], gradients[1][name], rtol=0.1)
    assert all(mlp.take_balance_loss() is None for mlp in routers(balanced)), "it is taken once"


def test_compiled_model_leaves_its_experts_to_python() -> None:
    """How many tokens an expert gets differs in each pass: each would be another program."""
    left = [[hasattr(mlp.forward, "_torchdynamo_disable") for mlp in routers(model)]
            for model in (build_compiled_model(CONFIG), build_model(CONFIG))]  # fmt: skip
    assert left == [[True] * CONFIG.layers, [False] * CONFIG.layers]


def test_training_spreads_tokens_over_the_experts_and_without_the_loss_less() -> None:
    """50 steps; the control has no balance loss."""
    left = {}
    for balance in (0.0, 0.1):
        model = prepared(balance)
        assert imbalance(model) > 0.9
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(50):
            optimizer.zero_grad()
            loss = accumulate_gradient(model, windows(step % 4), microbatch=4)
            optimizer.step()
        assert loss < 3.0, "it learns"
        left[balance] = imbalance(model)
    assert left[0.1] < 0.02 < 0.05 < left[0.0], left
