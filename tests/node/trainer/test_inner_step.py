"""Gradients in pieces, and the validation loss."""

import pytest
import torch

from node.model import Llama, initial_weights
from node.trainer.inner_step import accumulate_gradient, validation_loss
from tests.node.simulation.virtual_swarm import MODEL


def prepared(seed: int = 0) -> Llama:
    model = Llama(MODEL)
    model.load_flat(initial_weights(MODEL, seed))
    return model


def windows(count: int) -> torch.Tensor:
    return torch.randint(0, 32, (count, MODEL.context + 1), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("microbatch", [1, 4, 5])
def test_pieces_add_up_to_the_whole_gradient(microbatch: int) -> None:
    whole, pieces, data = prepared(), prepared(), windows(10)
    loss = accumulate_gradient(whole, data, 10)
    assert accumulate_gradient(pieces, data, microbatch) == pytest.approx(loss, abs=1e-5)
    assert whole.flat.grad is not None and pieces.flat.grad is not None
    torch.testing.assert_close(pieces.flat.grad, whole.flat.grad, atol=1e-6, rtol=1e-4)


def test_a_gradient_may_be_taken_elsewhere_and_leaves_the_weights_as_they_were() -> None:
    model, elsewhere, data = prepared(0), prepared(1), windows(6)
    before = model.flat.detach().clone()
    loss = accumulate_gradient(model, data, 4, elsewhere.flat.detach())
    expected = accumulate_gradient(elsewhere, data, 4)
    assert loss == expected and torch.equal(model.flat.detach(), before)
    assert model.flat.grad is not None and elsewhere.flat.grad is not None
    assert torch.equal(model.flat.grad, elsewhere.flat.grad)
    here = prepared(0)
    accumulate_gradient(here, data, 4)
    assert here.flat.grad is not None and not torch.equal(model.flat.grad, here.flat.grad)


def test_a_second_call_adds_to_the_gradient() -> None:
    model, data = prepared(), windows(4)
    accumulate_gradient(model, data, 4)
    assert model.flat.grad is not None
    once = model.flat.grad.clone()
    accumulate_gradient(model, data, 4)
    torch.testing.assert_close(model.flat.grad, 2 * once)


def test_validation_is_the_mean_over_tokens_and_leaves_the_model_alone() -> None:
    model, other = prepared(0), prepared(1)
    before = model.flat.detach().clone()
    data = windows(5)
    loss, tokens = validation_loss(model, other.flat.detach(), [data[:4], data[4:]])
    with torch.no_grad():
        expected = float(other(data[:, :-1], data[:, 1:]))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert tokens == 5 * MODEL.context
    assert torch.equal(model.flat.detach(), before)
