"""Muon: singular values near one, steps as large as AdamW's, AdamW for what is no matrix of a layer."""

import pytest
import torch
from pydantic import ValidationError

from optim.inner.adamw import AdamW
from optim.inner.base import FIRST_MOMENT, SECOND_MOMENT, InnerStep
from optim.inner.muon import Muon, orthogonalize
from optim.layout import Shape, Span

ROWS, COLUMNS = 12, 8
START, STOP = 5, 5 + ROWS * COLUMNS
NUMEL = STOP + 7


def random_values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of(
    count: int = 0, matrices: tuple[tuple[Span, Shape], ...] = (((START, STOP), (ROWS, COLUMNS)),)
) -> InnerStep:
    return InnerStep(count, 0.01, 0.9, 0.95, 0.1, ((START, STOP),), layer_matrices=matrices)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(NUMEL) for name in Muon.vectors}


@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (16, 16), (3, 12, 8)], ids=str)
def test_orthogonal_matrix_has_the_same_directions_and_equal_sizes(shape: tuple[int, ...]) -> None:
    matrix = random_values(0, *shape)
    result = orthogonalize(matrix)
    sizes = torch.linalg.svdvals(result)
    assert sizes.min() > 0.6 and sizes.max() < 1.3, sizes
    # The control: the matrix itself has directions of very different sizes.
    raw = torch.linalg.svdvals(matrix / torch.linalg.matrix_norm(matrix, keepdim=True))
    assert raw.max() / raw.min() > 3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    overlap = (left.mT @ result @ right.mT).diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(overlap, sizes.gather(-1, overlap.argsort(-1, descending=True).argsort(-1)))


def test_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalize(torch.zeros(4, 6)).any()


def test_tall_matrix_and_its_transpose_agree() -> None:
    matrix = random_values(1, 12, 8)
    torch.testing.assert_close(orthogonalize(matrix), orthogonalize(matrix.mT).mT)


def test_two_steps_by_hand() -> None:
    weights, vectors, momentum = random_values(2, NUMEL), zeros(), torch.zeros(ROWS, COLUMNS)
    expected = weights[START:STOP].view(ROWS, COLUMNS).clone()
    for count in range(2):
        gradient = random_values(3 + count, NUMEL)
        fresh = gradient[START:STOP].view(ROWS, COLUMNS).clone()
        Muon(momentum=0.5).step(weights, gradient, vectors, step_of(count))
        momentum = 0.5 * momentum + 0.5 * fresh
        expected *= 1 - 0.01 * 0.1
        expected -= 0.01 * 0.2 * ROWS**0.5 * orthogonalize(0.5 * momentum + 0.5 * fresh)
    torch.testing.assert_close(weights[START:STOP].view(ROWS, COLUMNS), expected)


def test_everything_but_matrices_of_layers_follows_adamw() -> None:
    ours, theirs = random_values(5, NUMEL), random_values(5, NUMEL)
    our_vectors, their_vectors = zeros(), zeros()
    for count in range(3):
        gradient = random_values(6 + count, NUMEL)
        Muon().step(ours, gradient.clone(), our_vectors, step_of(count))
        AdamW().step(theirs, gradient.clone(), their_vectors, step_of(count))
    rest = torch.ones(NUMEL, dtype=torch.bool)
    rest[START:STOP] = False
    torch.testing.assert_close(ours[rest], theirs[rest], rtol=0, atol=0)
    assert not torch.equal(ours[~rest], theirs[~rest])
    assert not our_vectors[SECOND_MOMENT][START:STOP].any()
    without = [tensor.clone() for tensor in (random_values(5, NUMEL), random_values(5, NUMEL))]
    Muon().step(without[0], random_values(6, NUMEL), zeros(), step_of(matrices=()))
    AdamW().step(without[1], random_values(6, NUMEL), zeros(), step_of())
    torch.testing.assert_close(*without, rtol=0, atol=0)


def test_size_of_the_gradient_changes_nothing_and_the_step_is_as_large_as_adamws() -> None:
    moves = []
    for scale in (1.0, 1000.0):
        weights = torch.zeros(NUMEL)
        Muon().step(weights, random_values(7, NUMEL) * scale, zeros(), step_of())
        moves.append(weights[START:STOP])
    torch.testing.assert_close(*moves, rtol=1e-4, atol=1e-7)
    adam = 0.2 * 0.01  # of elements that AdamW moves by a fifth of the rate
    assert 0.5 < float(moves[0].square().mean().sqrt()) / adam < 1.5


def test_experts_in_one_tensor_are_matrices_of_their_own() -> None:
    together, apart = torch.zeros(NUMEL), torch.zeros(NUMEL)
    half = START + ROWS // 2 * COLUMNS
    gradient = random_values(8, NUMEL)
    gradient[half:STOP] *= 100
    shape = (ROWS // 2, COLUMNS)
    Muon().step(together, gradient.clone(), zeros(), step_of(matrices=(((START, STOP), (2, *shape)),)))
    pieces = (((START, half), shape), ((half, STOP), shape))
    Muon().step(apart, gradient.clone(), zeros(), step_of(matrices=pieces))
    torch.testing.assert_close(together, apart)
    # The control: as one matrix the large half hides the small one.
    Muon().step(apart.zero_(), gradient.clone(), zeros(), step_of())
    assert not torch.allclose(together, apart, atol=1e-4)


def test_spectral_scaling_and_factor() -> None:
    assert Muon(scaling="spectral").step_size((16, 4)) == 2
    assert Muon(scaling="spectral").step_size((4, 16)) == 1
    weights, doubled = torch.zeros(NUMEL), torch.zeros(NUMEL)
    Muon().step(weights, random_values(9, NUMEL), zeros(), step_of())
    Muon(factor=2.0).step(doubled, random_values(9, NUMEL), zeros(), step_of())
    torch.testing.assert_close(doubled[START:STOP], 2 * weights[START:STOP])
    with pytest.raises(ValidationError, match="scaling"):
        Muon(scaling="none")  # type: ignore[arg-type]


def test_first_moment_of_matrices_is_the_momentum() -> None:
    vectors = zeros()
    Muon(momentum=0.5).step(torch.zeros(NUMEL), torch.ones(NUMEL), vectors, step_of())
    assert vectors[FIRST_MOMENT][START] == 0.5
    torch.testing.assert_close(vectors[FIRST_MOMENT][0], torch.tensor(0.1))
