"""A module of the user: its parameters become views of the run's vector, or each difference is named."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from murmuration.own_model import OwnModel
from node.model import build_model, initial_weights, model_family, shapes_of
from protocol.errors import UsageError
from protocol.manifest.run import Manifest
from tests.swarm.process_swarm import manifest_with

MANIFEST = manifest_with()


def transformers_model(manifest: Manifest = MANIFEST) -> nn.Module:
    config = AutoConfig.for_model(**model_family(manifest.model).hugging_face_config(manifest.model))
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def test_weights_of_the_run_reach_transformers_model_and_its_steps_reach_the_vector() -> None:
    ours, theirs = build_model(MANIFEST.model), transformers_model()
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    own = OwnModel(theirs, MANIFEST)
    weights = initial_weights(MANIFEST.model, 0)
    ours.load_flat(weights)
    own.load_flat(weights)
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(theirs(input_ids=tokens).logits, ours(tokens), atol=1e-5, rtol=1e-4)
    theirs(input_ids=tokens, labels=tokens).loss.backward()
    expected = {
        name: value.detach() - 0.1 * value.grad for name, value in theirs.named_parameters() if value.grad is not None
    }
    optimizer.step()
    family = model_family(MANIFEST.model)
    for name, view in shapes_of(MANIFEST).views(own.flat).items():
        torch.testing.assert_close(view, expected[family.hugging_face_name(name)])
    assert not torch.equal(own.flat, weights)


def test_our_own_module_has_the_runs_names() -> None:
    model = build_model(MANIFEST.model)
    model.load_flat(initial_weights(MANIFEST.model, 1))
    assert torch.equal(OwnModel(model, MANIFEST).flat, initial_weights(MANIFEST.model, 1))


def test_each_difference_is_named() -> None:
    other = transformers_model(
        MANIFEST.model_copy(update={"model": MANIFEST.model.model_copy(update={"hidden": MANIFEST.model.hidden * 2})})
    )
    with pytest.raises(UsageError, match=r"^the model is not the run's: model\.layers\.0\.mlp\..*has shape"):
        OwnModel(other, MANIFEST)
    with pytest.raises(UsageError, match=r"is missing; .*and \d+ more$"):
        OwnModel(nn.Linear(3, 3), MANIFEST)
    extended = transformers_model()
    extended.extra = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"extra\.weight is not in the run"):
        OwnModel(extended, MANIFEST)
    with pytest.raises(UsageError, match=r"is torch\.bfloat16 instead of float32 \(use autocast"):
        OwnModel(transformers_model().bfloat16(), MANIFEST)


class Wrapped(nn.Module):
    """Holds a model as DistributedDataParallel does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


def test_compiled_and_wrapped_models_are_taken_as_the_models_in_them() -> None:
    model = build_model(MANIFEST.model)
    model.load_flat(initial_weights(MANIFEST.model, 1))
    compiled: Any = torch.compile(model)
    for wrapped in (Wrapped(model), compiled, Wrapped(compiled)):
        assert torch.equal(OwnModel(wrapped, MANIFEST).flat, initial_weights(MANIFEST.model, 1))
    with pytest.raises(UsageError, match="is missing"):
        OwnModel(nn.ModuleDict({"module": model, "more": nn.Linear(2, 2)}), MANIFEST)
