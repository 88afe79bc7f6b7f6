"""Gradients in pieces, and the validation loss."""

import pytest
import torch

from node.model import LanguageModel, build_model, initial_weights
from node.trainer.inner_step import accumulate_gradient, validation_loss
from tests.node.simulation.virtual_swarm import MODEL


def prepared(seed: int = 0) -> LanguageModel:
    model = build_model(MODEL)
    model.load_flat(initial_weights(MODEL, seed))
    return model


def windows(count: int) -> torch.Tensor:
    return torch.randint(0, 32, (count, MODEL.context + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("microbatch", [1, 4, 5])
def test_pieces_add_up_to_the_whole_gradient(microbatch: int) -> None:
    whole, pieces, data = prepared(), prepared(), windows(10)
    loss = accumulate_gradient(whole, data, 10)
    assert accumulate_gradient(pieces, data, microbatch) == pytest.approx(loss, abs=1e-5)
    assert whole.flat_gradient is not None and pieces.flat_gradient is not None
    torch.testing.assert_close(pieces.flat_gradient, whole.flat_gradient, atol=1e-6, rtol=1e-4)


def test_a_gradient_may_be_taken_elsewhere_and_leaves_the_weights_as_they_were() -> None:
    model, elsewhere, data = prepared(0), prepared(1), windows(6)
    before = model.flat.clone()
    loss = accumulate_gradient(model, data, 4, elsewhere.flat)
    expected = accumulate_gradient(elsewhere, data, 4)
    assert loss == expected and torch.equal(model.flat, before)
    assert model.flat_gradient is not None and elsewhere.flat_gradient is not None
    assert torch.equal(model.flat_gradient, elsewhere.flat_gradient)
    here = prepared(0)
    accumulate_gradient(here, data, 4)
    assert here.flat_gradient is not None and not torch.equal(model.flat_gradient, here.flat_gradient)


def test_a_second_call_adds_to_the_gradient() -> None:
    model, data = prepared(), windows(4)
    accumulate_gradient(model, data, 4)
    assert model.flat_gradient is not None
    once = model.flat_gradient.clone()
    accumulate_gradient(model, data, 4)
    torch.testing.assert_close(model.flat_gradient, 2 * once)


def test_validation_is_the_mean_over_tokens_and_leaves_the_model_alone() -> None:
    model, other = prepared(0), prepared(1)
    before = model.flat.clone()
    data = windows(5)
    loss, tokens = validation_loss(model, other.flat, [data[:4], data[4:]])
    with torch.no_grad():
        expected = float(other(data[:, :-1], data[:, 1:]))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert tokens == 5 * MODEL.context
    assert torch.equal(model.flat, before)
