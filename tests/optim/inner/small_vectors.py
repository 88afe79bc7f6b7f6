"""Steps and vectors of a small model, for the tests of inner optimizers."""

import torch

from optim.inner.base import InnerStep, InnerUpdateRule
from optim.layout import Layout

LAYOUT = Layout(((2, 5), (20,)))
NUMEL = LAYOUT.numel


def make_step(count: int) -> InnerStep:
    return InnerStep(count, 0.01, 0.9, 0.95, 0.1, ((0, 10),))


def random_values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def zero_vectors(inner: InnerUpdateRule) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros(inner.vector_numel(name, LAYOUT), dtype=inner.vector_dtype(name)) for name in inner.vectors
    }
