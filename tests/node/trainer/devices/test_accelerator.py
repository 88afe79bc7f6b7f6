"""What is different where the model lies on an accelerator. Skipped where there is none."""

from types import SimpleNamespace

import pytest
import torch

from node.model import build_model, initial_weights
from node.model.products import has_fp8
from node.trainer.devices.device import is_out_of_memory, limit_memory
from node.trainer.inner_step import accumulate_gradient
from node.trainer.ipc.channel import ContributionOutcome
from node.trainer.ipc.shared_memory import SharedLayout, SharedMemory
from optim.inner.base import WEIGHTS
from tests.node.trainer.state_harness import MODEL, StateHarness

there_is_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator here")
CONTENTS = SharedLayout(anchor_numel=5000, vectors=((WEIGHTS, 5000),), contribution_bytes=100)


@pytest.mark.parametrize(("code", "is_pinned"), [(0, True), (1, False)])
def test_all_of_the_arena_is_locked_or_said_not_to_be(
    monkeypatch: pytest.MonkeyPatch, code: int, is_pinned: bool
) -> None:
    asked: list[tuple[int, int]] = []
    launched: list[tuple[int, str]] = []

    def register(address: int, size: int, flags: int) -> int:
        asked.append((address, size))
        return code

    def launch(size: int, device: str) -> None:
        launched.append((size, device))
        raise RuntimeError("that an accelerator tells late")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", launch)
    arena = SharedMemory.create(CONTENTS)
    try:
        arena.pin()
        assert arena.is_pinned is is_pinned
        first = arena.anchor(0).data_ptr() - CONTENTS.offset(0)
        assert asked == [(first, CONTENTS.total_bytes)]
        assert launched == ([] if is_pinned else [(1, "cuda")]), "what was refused is not raised by the next step"
    finally:
        arena.close()


@there_is_one
@pytest.mark.parametrize("recipe", ["frugal", "diloco", "streaming-diloco", "local-adam", "co2"])
@pytest.mark.parametrize("fate", ["included", "excluded"])
def test_a_state_there_is_the_one_on_a_processor(recipe: str, fate: ContributionOutcome) -> None:
    benches = [StateHarness(recipe, device=device) for device in ("cpu", "cuda")]
    try:
        assert benches[1].arena.is_pinned
        for bench in benches:
            for number in range(4):
                bench.train(seed=number)
                bench.state.make_contribution()
                bench.train(seed=number + 10)
                bench.share(number + 1, bench.anchor + 0.01)
                bench.state.apply_anchor(number + 1, fate)
            bench.state.save()
        restored = StateHarness(recipe, arena=benches[1].arena)
        for name, vector in benches[0].vectors.items():
            found = benches[1].vectors[name].cpu()
            assert torch.equal(found, vector), name
            assert torch.equal(restored.vectors[name], found), "as it was saved"
    finally:
        for bench in benches:
            bench.close()


@there_is_one
def test_a_gradient_there_is_the_one_on_a_processor_but_for_its_16_bits() -> None:
    windows = torch.randint(MODEL.vocabulary, (6, MODEL.context + 1), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for device in ("cpu", "cuda"):
        model = build_model(MODEL, device)
        model.load_flat(initial_weights(MODEL, 0))
        losses.append(accumulate_gradient(model, windows, microbatch=4))
        assert model.flat_gradient is not None
        gradients.append(model.flat_gradient.cpu())
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) > 0.999


@there_is_one
def test_a_gradient_in_fp8_is_near_the_one_in_bf16() -> None:
    if not has_fp8(torch.device("cuda")):
        pytest.skip("this card has no fp8")
    shape = MODEL.model_copy(update={"width": 64, "heads": 4, "kv_heads": 4, "hidden": 128})
    windows = torch.randint(shape.vocabulary, (6, shape.context + 1), generator=torch.Generator().manual_seed(0))
    gradients = []
    for in_fp8 in (False, True):
        model = build_model(shape, "cuda")
        if in_fp8:
            model.multiply_in_fp8()
        model.load_flat(initial_weights(shape, 0))
        accumulate_gradient(model, windows, microbatch=4)
        assert model.flat_gradient is not None
        gradients.append(model.flat_gradient.cpu())
    assert 0.98 < float(torch.cosine_similarity(gradients[0], gradients[1], dim=0)) < 1 - 1e-6


@there_is_one
def test_what_goes_beyond_the_memory_that_it_may_take_is_known_as_such() -> None:
    device = torch.device("cuda")
    try:
        limit_memory(1 << 30, device)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(2 << 30, dtype=torch.uint8, device=device)
        assert is_out_of_memory(caught.value)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
