"""The inner step, optimizers, codecs and generation on a card that is not there: devices mixed, and waits for it.

Each result is that of a CPU, and a control shows that the pretended card refuses what a card refuses.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from node.model import build_model, initial_weights
from node.model.adapter import compress, expand
from node.model.generate import Sampling, complete
from node.model.interface import StochasticRounding
from node.model.weight_files import read_frozen
from node.trainer.inner_step import InnerOptimizer, accumulate_gradient, validation_loss
from node.trainer.ipc.shared_memory import SharedMemory
from optim.codecs.int8_on_device import decode_int8, encode_int8
from optim.compose import INNER_RULES
from optim.rollouts import POLICY_LOSSES, SumTest, gumbel_noise, margins_of
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import FrozenType, TrainSection
from tests.node.model.test_adapter import manifest_of, random_factors
from tests.node.trainer.state_harness import StateHarness
from tests.pretend_card import CardTensor, WrongDevice, pretended_card

SIZES = {"vocabulary": 32, "width": 16, "layers": 2, "heads": 4, "hidden": 32, "context": 12}
MOE = {"kind": "qwen3-moe", "experts": 4, "experts_per_token": 2}
SHAPES = {
    "llama": ModelSection.model_validate(SIZES),
    "documents": ModelSection.model_validate(SIZES | {"document_end": 0}),
    "qwen3": ModelSection.model_validate(SIZES | {"kind": "qwen3", "kv_heads": 2}),
    "olmo2": ModelSection.model_validate(SIZES | {"kind": "olmo2"}),
    "experts": ModelSection.model_validate(SIZES | MOE),
    "subspace": ModelSection.model_validate(SIZES | {"subspace": 8, "tied": False}),
}
SHAPE = SHAPES["llama"]
TRAIN = TrainSection(batch_tokens=24, learning_rate=1e-2)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The places that have waited for the pretended card."""
    with pretended_card(monkeypatch) as waits:
        yield waits


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def windows_of(count: int, shape: ModelSection = SHAPE) -> Tensor:
    return torch.randint(shape.vocabulary, (count, shape.context + 1), generator=torch.Generator().manual_seed(0))


def held(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, CardTensor)
    return tensor.held.detach().clone()


def gradient_on(device: str, shape: ModelSection, microbatch: int = 2) -> tuple[float, Tensor]:
    model = build_model(shape, device)
    model.load_flat(initial_weights(shape, 0))
    loss = accumulate_gradient(model, windows_of(4, shape), microbatch)
    assert model.flat_gradient is not None
    return loss, model.flat_gradient


def test_pretended_card_refuses_what_a_card_refuses(waits: list[str]) -> None:
    there, here = torch.zeros(3, device="cuda"), torch.ones(3)
    with pytest.raises(WrongDevice, match="of a card and of main memory"):
        there + here
    with pytest.raises(WrongDevice, match="of a card and of main memory"):
        torch.cat((there, here))
    with pytest.raises(WrongDevice, match="generator of another device"):
        there.random_(0, 5, generator=torch.Generator())
    assert there.device.type == "cuda" and there.is_cuda and not waits
    for read in (float, lambda values: values.tolist(), lambda values: values.cpu(), bool):
        read(there[0] + 1)
    assert len(waits) == 4, "each of them waits"
    there.copy_(here)
    assert torch.equal(held(there + torch.ones(())), 2 * here), "a single number may be anywhere"


@pytest.mark.parametrize("name", SHAPES)
def test_gradient_is_that_of_a_cpu_and_no_microbatch_waits(waits: list[str], name: str) -> None:
    shape, counts = SHAPES[name], []
    expected_loss, expected = gradient_on("cpu", shape)
    for microbatch in (4, 2, 1):
        waits.clear()
        loss, gradient = gradient_on("cuda", shape, microbatch)
        counts.append(Counter(waits)["inner_step.py:accumulate_gradient"])
        assert loss == pytest.approx(expected_loss, rel=2e-2), "products in bf16"
        if name != "experts":  # bf16 sends some tokens to other experts
            assert float(torch.cosine_similarity(held(gradient), expected, dim=0)) > 0.99
        elsewhere = set(waits) - {"inner_step.py:accumulate_gradient", "interface.py:load_flat"}
        assert elsewhere <= {"decoder.py:forward", "decoder.py:__init__", "subspace.py:__init__"}, elsewhere
        assert ("decoder.py:forward" in elsewhere) == (name == "experts"), "sizes of the groups of tokens"
    assert counts == [2, 2, 2], "the batch goes there, and its loss comes back"


@pytest.mark.parametrize("kind", INNER_RULES)
def test_step_of_every_inner_optimizer_is_that_of_a_cpu(waits: list[str], kind: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        model = build_model(SHAPE, device)
        model.load_flat(initial_weights(SHAPE, 0))
        optimizer = InnerOptimizer(model, TRAIN, INNER_RULES[kind]())
        for step in range(3):
            model.attach_gradient()
            assert model.flat_gradient is not None
            model.flat_gradient.copy_(draw(model.flat.numel(), seed=step) / 100)
            waits.clear()
            optimizer.step(step)
        found.append(model.flat if device == "cpu" else held(model.flat))
    if kind not in ("growing-batch",):
        assert set(waits) <= {"inner_step.py:gradient_norm"}, "the norm decides whether the step is made"
    tolerance = 2e-3 if kind == "muon" else 2e-6  # orthogonal matrices are computed in bf16 there
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["adamw", "adamw-8bit"])
def test_weights_in_bf16_are_rounded_by_noise_of_the_card(waits: list[str], kind: str) -> None:
    model = build_model(SHAPE, "cuda")
    model.keep_bf16()
    model.load_flat(initial_weights(SHAPE, 0))
    before = held(model.flat)
    optimizer = InnerOptimizer(model, TRAIN, INNER_RULES[kind]())
    accumulate_gradient(model, windows_of(4), 2)
    assert optimizer.step(0) is not None
    after = held(model.flat)
    assert after.dtype == torch.bfloat16 and not torch.equal(after, before)
    rounding, values = StochasticRounding(torch.device("cuda"), seed=0), torch.full((1000,), 1 + 2**-10)
    out = torch.zeros(1000, dtype=torch.bfloat16, device="cuda")
    rounding.copy(values, out)
    assert float(held(out).float().mean()) == pytest.approx(1 + 2**-10, abs=5e-4)


def test_validation_reads_each_batch_once(waits: list[str]) -> None:
    batches = [windows_of(2), windows_of(3)]
    model, flat = build_model(SHAPE, "cuda"), initial_weights(SHAPE, 0) * 20  # far from those of the model
    found = validation_loss(model, flat, batches)
    expected = validation_loss(build_model(SHAPE), flat, batches)
    assert found[1] == expected[1] and found[0] == pytest.approx(expected[0], rel=1e-2)


def test_activations_in_int8_are_the_bytes_of_a_cpu(waits: list[str]) -> None:
    values = draw(3, 200)
    payload = encode_int8(values.to("cuda"))
    assert torch.equal(held(payload), encode_int8(values))
    assert torch.equal(held(decode_int8(payload, 600)), decode_int8(encode_int8(values), 600))


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "nf4"])
def test_frozen_matrix_is_expanded_without_a_wait(waits: list[str], kind: FrozenType) -> None:
    matrix = draw(8, 100)
    held_there = tuple(each.to("cuda") for each in compress(matrix, kind))
    waits.clear()
    assert torch.equal(held(expand(held_there, torch.float32)), expand(compress(matrix, kind), torch.float32))
    assert not waits


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_gradient_of_an_adapter_is_that_of_a_cpu(waits: list[str], tmp_path: Path, base: str) -> None:
    manifest = manifest_of(tmp_path, base=base)
    found = []
    for device in ("cpu", "cuda"):
        model = build_model(manifest.model, device, frozen=read_frozen(manifest.model, tmp_path))
        model.load_flat(random_factors(manifest))
        waits.clear()
        accumulate_gradient(model, windows_of(4, manifest.model), 2)
        assert model.flat_gradient is not None
        found.append(model.flat_gradient)
    assert float(torch.cosine_similarity(held(found[1]), found[0], dim=0)) > 0.98
    assert set(waits) == {"inner_step.py:accumulate_gradient"}


def test_texts_are_those_of_a_cpu(waits: list[str]) -> None:
    prompts = [[5, 6, 7], [1], [9, 8, 7, 6, 5]]
    written = []
    for device in ("cpu", "cuda"):
        model = build_model(SHAPE, device)
        model.load_flat(initial_weights(SHAPE, 0) * 20)  # far from ties
        written.append(complete(model, prompts, 20, Sampling(0.8, top_k=8, seed=3), torch.arange(32), frozenset({2})))
    assert [each.tokens for each in written[0]] == [each.tokens for each in written[1]]


def test_claims_of_texts_and_losses_of_policies_stay_on_the_card(waits: list[str]) -> None:
    logits, ids, tokens = draw(7, 32).to("cuda"), torch.arange(32, device="cuda"), torch.arange(7, device="cuda")
    margins = margins_of(logits, 1.0, 11, tokens, ids)
    assert torch.equal(held(margins), margins_of(held(logits), 1.0, 11, torch.arange(7), torch.arange(32)))
    SumTest.calibrate(margins).accepts(margins)
    keys = torch.arange(3, device="cuda")
    here = torch.arange(3)
    assert torch.equal(held(gumbel_noise(keys, keys, ids)), gumbel_noise(here, here, torch.arange(32)))
    now, then, advantages = (draw(9, seed=seed).to("cuda") for seed in range(3))
    for loss in POLICY_LOSSES.values():
        found, _ = loss(now, then, advantages)
        assert float(found) == pytest.approx(float(loss(held(now), held(then), held(advantages))[0]), rel=1e-5)


@pytest.mark.parametrize("recipe", ["frugal", "diloco", "local-adam", "gossip-adam"])
def test_state_there_is_the_one_on_a_processor(monkeypatch: pytest.MonkeyPatch, waits: list[str], recipe: str) -> None:
    monkeypatch.setattr(SharedMemory, "pin", lambda _: None)
    benches = [StateHarness(recipe, device=device) for device in ("cpu", "cuda")]
    try:
        for bench in benches:
            for number in range(2):
                bench.train(seed=number)
                bench.state.make_contribution()
                bench.share(number + 1, bench.anchor + 0.01)
                bench.state.apply_anchor(number + 1, "excluded")
            bench.state.save()
        for name, vector in benches[0].vectors.items():
            found = benches[1].vectors[name]
            assert torch.equal(held(found) if isinstance(found, CardTensor) else found, vector), name
    finally:
        for bench in benches:
            bench.close()
