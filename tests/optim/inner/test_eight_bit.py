"""AdamW with 8-bit moments: codes, the two ways to compute a step, and rounding whose mean is right."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from optim.compose import compose, with_small_memory
from optim.errors import UnknownOption
from optim.inner.adamw import AdamW
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, InnerStep
from optim.inner.eight_bit import (
    FIRST_CODES,
    SECOND_CODES,
    SECOND_SCALES,
    EightBitAdamW,
    decode_first,
    encode_first,
)
from optim.layout import Layout
from optim.recipes import RECIPES

LAYOUT = Layout(((300, 10), (77,), (5, 5)))  # blocks that are not whole, and a vector between matrices
NUMEL = LAYOUT.numel
ALL_CODES = torch.arange(256, dtype=torch.uint8)
NEAREST = EightBitAdamW(rounding="nearest")


class TorchSteps(EightBitAdamW):
    """Steps as on an accelerator."""

    _step_by_kernel = EightBitAdamW._step_by_torch


def values(seed: int) -> Tensor:
    """Return values of which some are a million times larger than others."""
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    return noise * torch.logspace(-6, 0, NUMEL)


def zeros(rule: EightBitAdamW) -> dict[str, Tensor]:
    return {name: torch.zeros(rule.vector_numel(name, LAYOUT), dtype=rule.vector_dtype(name)) for name in rule.vectors}


def step_of(count: int, beta2: float = 0.95) -> InnerStep:
    return InnerStep(count, 0.01, 0.9, beta2, 0.1, LAYOUT.matrix_spans)


def test_codes_decode_to_themselves() -> None:
    first, second = decode_first(ALL_CODES), NEAREST.decode_second(ALL_CODES)
    codes = encode_first(first, None)
    assert torch.equal(codes[1:128], ALL_CODES[1:128]) and torch.equal(codes[129:], ALL_CODES[129:])
    assert not first[0] and not first[128]
    assert torch.equal(NEAREST.encode_second(second, None), ALL_CODES)
    assert second[0] > 0 and second[255] == 1 and first[127] == 1 and first[255] == -1


@pytest.mark.parametrize("rule", [EightBitAdamW(), TorchSteps()])
def test_steps_in_parts_have_the_bits_of_whole_ones(rule: EightBitAdamW) -> None:
    results = []
    for size in (NUMEL, 700):
        weights, vectors = values(0), zeros(rule)
        for count in range(3):
            step, gradient = step_of(count), values(count + 1)
            parts = [slice(0, NUMEL)] if size == NUMEL else list(rule.parts(NUMEL, step, size))
            assert sum(part.stop - part.start for part in parts) == NUMEL
            for part in parts:
                own, within = rule.part_of(part, vectors, step)
                rule.step(weights[part], gradient[part], own, within)
        results.append({"weights": weights, **vectors})
    assert len(parts) == 8, "matrices of 3,000 and 25 values, in pieces of two blocks, and the vector between them"
    for name, whole in results[0].items():
        assert torch.equal(results[1][name], whole), name


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_kernel_and_torch_make_the_same_steps(rounding: str) -> None:
    rules: tuple[EightBitAdamW, ...] = tuple(
        kind(rounding=rounding)  # type: ignore[arg-type]
        for kind in (EightBitAdamW, TorchSteps)
    )
    weights, vectors = [values(0), values(0)], [zeros(rule) for rule in rules]
    for count in range(5):
        for index, rule in enumerate(rules):
            rule.step(weights[index], values(1 + count), vectors[index], step_of(count))
    # A product and a sum are rounded once or twice, so a few codes are neighbours.
    assert (weights[0] - weights[1]).abs().max() < 1e-3
    for name in (FIRST_CODES, SECOND_CODES):
        assert (vectors[0][name] != vectors[1][name]).float().mean() < 0.01


@pytest.mark.parametrize("rule", [NEAREST, EightBitAdamW()], ids=["nearest", "stochastic"])
def test_steps_stay_near_those_of_adamw(rule: EightBitAdamW) -> None:
    weights, vectors = values(0), zeros(rule)
    exact, moments = values(0), {FIRST_MOMENT: torch.zeros(NUMEL), SECOND_MOMENT: torch.zeros(NUMEL)}
    for count in range(20):
        rule.step(weights, values(1 + count), vectors, step_of(count))
        AdamW().step(exact, values(1 + count), moments, step_of(count))
    moved = (exact - values(0)).norm()
    assert (weights - exact).norm() < 0.1 * moved
    start, stop = LAYOUT.matrix_spans[0][1], LAYOUT.matrix_spans[1][0]
    torch.testing.assert_close(weights[start:stop], exact[start:stop])  # vectors keep fp32 moments


def decayed_second_moment(rule: EightBitAdamW) -> float:
    """Return the mean second moment after 1000 steps without gradients, relative to that before.

    The first value of each block keeps its gradient and so the scale; it does not count.
    """
    vectors, weights, gradient = zeros(rule), torch.zeros(NUMEL), torch.ones(NUMEL)
    gradient[::256] = 2.0
    for count in range(20):
        rule.step(weights, gradient.clone(), vectors, step_of(count, 0.5))
    before = second_moment(vectors)
    gradient.fill_(0.0)
    gradient[::256] = 2.0
    for count in range(20, 1020):
        rule.step(weights, gradient.clone(), vectors, step_of(count, 0.999))
    return float(second_moment(vectors) / before)


def second_moment(vectors: Mapping[str, Tensor]) -> Tensor:
    codes = EightBitAdamW.decode_second(vectors[SECOND_CODES][:2560]).view(-1, 256)
    return (codes * vectors[SECOND_SCALES][:10, None])[:, 1:].mean()


def test_small_changes_of_a_moment_count_on_average() -> None:
    """The control: rounded to the nearest, a second moment that should shrink by 0.1 % a step never does."""
    assert decayed_second_moment(EightBitAdamW()) == pytest.approx(0.999**1000, rel=0.05)
    assert decayed_second_moment(NEAREST) == 1.0


def test_noise_depends_on_step_and_place_alone() -> None:
    found = []
    for _ in range(2):
        vectors = zeros(EightBitAdamW())
        EightBitAdamW().step(values(0), values(1), vectors, step_of(3))
        found.append(vectors[SECOND_CODES])
    other = zeros(EightBitAdamW())
    EightBitAdamW().step(values(0), values(1), other, step_of(4))
    assert torch.equal(*found) and not torch.equal(found[0], other[SECOND_CODES])


REFUSED = {"muloco", "local-adam", "des-loc", "mt-dao", "adloco", "distro", "gossip-adam"} | {
    *("adaptive-braking", "spike-compensation", "weight-prediction")
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_with_adamw_inside_work_with_little_memory(recipe: str) -> None:
    method = compose(recipe)
    if recipe in REFUSED:
        with pytest.raises(UnknownOption, match=f"recipe {recipe}.*; leave memory = .small. out"):
            with_small_memory(method)
        return
    for number in {0, method.breakpoints[-1]}:
        small = with_small_memory(method).at_round(number)
        assert small.has_small_memory
        if isinstance(method.inner, AdamW):
            assert small.inner == EightBitAdamW()
        assert small.codec == method.at_round(number).codec and small.update == method.at_round(number).update
