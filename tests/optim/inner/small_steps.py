"""Steps of a small model, for the tests of inner optimizers."""

import torch

from optim.inner.inner import Inner, Step

NUMEL = 30


def step_at(count: int) -> Step:
    return Step(count, 0.01, 0.9, 0.95, 0.1, ((0, 10),))


def draw(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def fresh(inner: Inner) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(inner.size_of(name, NUMEL)) for name in inner.vectors}
