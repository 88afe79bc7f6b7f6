"""The loss in chunks against the ordinary one: equal loss and gradients, without the memory for all logits."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from node.model import LanguageModel, build_model, initial_weights, interface
from node.trainer.inner_step import accumulate_gradient, validation_loss
from protocol.manifest.model import ModelSection

TOKENS, WIDTH, VOCABULARY = 40, 8, 64
SHAPE = ModelSection(vocabulary=48, width=16, layers=1, heads=2, hidden=24, context=12)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the chunks of this file's tiny batches smaller than the batches."""
    monkeypatch.setattr(interface, "CHUNK_VALUES", {"cpu": 7 * VOCABULARY})
    monkeypatch.setattr(interface, "MIN_CHUNK_TOKENS", 7)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=generator)


def plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(0.25 * loss, leaves)


def test_loss_and_gradients_are_those_of_all_logits_at_once() -> None:
    hidden, weight, targets = inputs()
    expected, found = plain_loss(hidden, weight, targets), interface.output_loss(hidden, weight, targets)
    assert type(found.grad_fn) is not type(expected.grad_fn), "in chunks"
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(gradients(found, hidden, weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_token_that_is_ignored_has_no_loss_and_no_gradient() -> None:
    hidden, weight, targets = inputs()
    whole = interface.output_loss(hidden, weight, targets).item()
    targets[:9] = targets[20] = interface.IGNORED
    expected, found = plain_loss(hidden, weight, targets), interface.output_loss(hidden, weight, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6) and found.item() != pytest.approx(whole, rel=1e-6)
    of_hidden, of_weight = gradients(found, hidden, weight)
    for ours, theirs in zip((of_hidden, of_weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    assert not of_hidden[:9].any() and of_hidden[9:20].all()


def test_gradients_of_bf16_products_are_as_close_to_the_exact_ones_as_the_ordinary_ones() -> None:
    hidden, weight, targets = inputs()
    exact = gradients(plain_loss(hidden, weight, targets), hidden, weight)
    with torch.autocast("cpu", torch.bfloat16):
        ordinary = gradients(plain_loss(hidden, weight, targets), hidden, weight)
        found = gradients(interface.output_loss(hidden, weight, targets), hidden, weight)
    for ours, theirs, true in zip(found, ordinary, exact, strict=True):
        assert ours.dtype == torch.float32
        assert 0 < torch.dist(ours, true) < 1.1 * torch.dist(theirs, true)


def test_gradients_have_one_use() -> None:
    hidden, weight, targets = inputs()
    loss = interface.output_loss(hidden, weight, targets)
    torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, (hidden, weight))


def test_validation_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs()
    monkeypatch.setattr(interface, "_add_product", lambda *_: pytest.fail("a gradient"))
    with torch.no_grad():
        found = interface.output_loss(hidden, weight, targets)
    assert found.item() == pytest.approx(plain_loss(hidden, weight, targets).item(), rel=1e-6)
    with pytest.raises(pytest.fail.Exception):  # control: a training step needs one
        interface.output_loss(hidden, weight, targets)


def gradient_of(model: LanguageModel, windows: Tensor) -> tuple[float, Tensor]:
    model.load_flat(initial_weights(model.config, 1))
    loss = accumulate_gradient(model, windows, len(windows))
    assert model.flat_gradient is not None
    return loss, model.flat_gradient


@pytest.mark.parametrize("tied", [True, False])
def test_model_has_the_same_gradient_in_chunks(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPE.model_copy(update={"tied": tied})
    windows = torch.randint(shape.vocabulary, (4, shape.context + 1), generator=torch.Generator().manual_seed(2))
    loss, found = gradient_of(build_model(shape), windows)
    checked, _ = validation_loss(build_model(shape), initial_weights(shape, 1), [windows])
    monkeypatch.setattr(interface, "MIN_CHUNK_TOKENS", 1000)
    expected_loss, expected = gradient_of(build_model(shape), windows)
    assert loss == pytest.approx(expected_loss, rel=1e-6) and checked == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(found, expected), "two ways"


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the elements of the largest tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(each.numel() for each in tree_leaves(made) if isinstance(each, Tensor))])
        return made


def test_logits_of_all_tokens_are_never_in_memory() -> None:
    hidden, weight, targets = inputs()
    with LargestTensor() as found:  # type: ignore[no-untyped-call]
        gradients(interface.output_loss(hidden, weight, targets), hidden, weight)
    assert found.numel == max(7 * VOCABULARY, weight.numel())
    with LargestTensor() as found:  # type: ignore[no-untyped-call]  # control
        gradients(plain_loss(hidden, weight, targets), hidden, weight)
    assert found.numel == TOKENS * VOCABULARY
