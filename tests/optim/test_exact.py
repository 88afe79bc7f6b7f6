"""The method of exact steps: sums in fp64 give the same bits for every partition, and other methods are refused."""

import itertools

import numpy as np
import pytest
import torch

from optim.aggregation.base import WeightedPayload
from optim.compose import compose
from optim.errors import CodecError, UnknownOption
from optim.exact import ExactSum, Float64Sum, exact_method

NUMEL, COUNT = 5000, 6


def merge(parts: list[list[np.ndarray]], clip: float = 1e9) -> np.ndarray:
    codec = Float64Sum()
    payloads = [codec.encode_sum(np.sum([g.astype(np.float64) for g in part], axis=0)) for part in parts]
    members = [WeightedPayload(codec, payload, NUMEL, 1.0) for payload in payloads]
    return ExactSum(count=COUNT, clip=clip).combine(members)


def test_every_partition_gives_the_same_bits() -> None:
    chance = np.random.default_rng(0)
    gradients = [(chance.standard_normal(NUMEL) * 1e-3).astype(np.float32) for _ in range(COUNT)]
    whole = merge([gradients])
    for order in itertools.islice(itertools.permutations(gradients), 0, 720, 119):
        assert np.array_equal(merge([list(order[:2]), list(order[2:])]), whole)
    single = [np.sum(part, axis=0, dtype=np.float32) for part in (gradients[:2], gradients[2:])]
    control = (single[0] + single[1]) / np.float32(COUNT)
    assert not np.array_equal(control, whole), "control: fp32 sums depend on the partition"
    assert np.allclose(control, whole)


def test_mean_is_clipped_as_a_whole() -> None:
    gradients = [np.full(NUMEL, 3.0, np.float32) for _ in range(COUNT)]
    assert np.linalg.norm(merge([gradients[:1], gradients[1:]], clip=0.5)) == pytest.approx(0.5, rel=1e-5)


def test_sums_of_nothing_take_two_bytes_and_wrong_ones_are_refused() -> None:
    codec = Float64Sum()
    assert len(codec.encode_nothing()) == 2 and not codec.decode(codec.encode_nothing(), 3).any()
    assert torch.equal(codec.decode(codec.encode(torch.tensor([1.0, -2.0])), 2), torch.tensor([1.0, -2.0]))
    for value in (np.nan, np.inf, 1e30):
        with pytest.raises(CodecError):
            codec.encode_sum(np.array([value]))
    with pytest.raises(CodecError):
        codec.decode_sum(codec.encode_sum(np.zeros(3)), 2)


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        ("diloco", "schedule.inner_steps"),
        ("distro", "schedule.inner_steps"),
        ("backup-workers", "schedule.quorum"),
        ("qsdp", "codec.kind"),
        ("demo", "codec.kind"),
    ],
)
def test_methods_that_do_not_exchange_every_gradient_whole_are_refused(recipe: str, key: str) -> None:
    with pytest.raises(UnknownOption, match=key):
        exact_method(compose(recipe), COUNT, 1.0)
    exact_method(compose("data-parallel"), COUNT, 1.0)
