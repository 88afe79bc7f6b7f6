"""Messages and adoptions against computations by hand: nothing that was trained is lost or counted twice."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from node.arena import Arena
from node.model import Llama, initial_weights, shape_table
from node.trainer.inner import InnerOptimizer
from node.trainer.inner_state import InnerState, Work
from optim.method import Method, Sender
from optim.recipes import compose
from protocol.manifest import Model, Train

torch.set_num_threads(1)
MODEL = Model(vocabulary=32, width=16, layers=2, heads=4, hidden=24, context=12)
TRAIN = Train(batch_tokens=24, learning_rate=1e-2)
NUMEL = shape_table(MODEL).numel
Make = Callable[[str], InnerState]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(NUMEL, 8 * NUMEL)
    made.anchor(0).copy_(initial_weights(MODEL, 0))
    yield made
    made.close()


@pytest.fixture
def make(arena: Arena) -> Make:
    def build(recipe: str) -> InnerState:
        model = Llama(MODEL)
        state = InnerState(model, InnerOptimizer(model, TRAIN), Sender(method_of(recipe), NUMEL, 3), arena)
        if not state.restore():
            state.start(0)
        return state

    return build


def method_of(recipe: str) -> Method:
    return compose(recipe, {})


def weights(state: InnerState) -> Tensor:
    return state._vectors()["weights"]


def train(state: InnerState, seed: int, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights(state).add_(torch.randn(NUMEL, generator=generator), alpha=1e-2)
    for _ in range(steps):
        state.count_step(24, 3.0, state.counters.position + 2)


def decoded(arena: Arena, sizes: tuple[int, ...], recipe: str) -> Tensor:
    """What the others read out of the outbox."""
    method, out, start = method_of(recipe), [], 0
    for size, (first, last) in zip(sizes, method.bounds(NUMEL, 3), strict=True):
        out.append(method.codec.decode(bytes(arena.outbox[start : start + size]), last - first))
        start += size
    return torch.cat(out)


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_message_carries_the_progress_and_the_residual_the_rest(make: Make, arena: Arena, recipe: str) -> None:
    state = make(recipe)
    train(state, 1)
    delta = arena.anchor(0) - weights(state)
    message = state.message()
    assert (message.round, message.tokens, message.steps, message.loss) == (0, 48, 2, 3.0)
    torch.testing.assert_close(decoded(arena, message.sizes, recipe) + state.residual, delta, atol=1e-6, rtol=1e-5)
    assert torch.equal(state.reference, weights(state))


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_included_keeps_what_was_trained_meanwhile(make: Make, arena: Arena, recipe: str) -> None:
    state = make(recipe)
    train(state, 1)
    state.message()
    at_message, residual = weights(state).clone(), state.residual.clone()
    train(state, 2)
    meanwhile = weights(state) - at_message
    arena.anchor(1).copy_(initial_weights(MODEL, 1))
    state.adopt(1, "included")
    torch.testing.assert_close(weights(state), arena.anchor(1) + meanwhile)
    assert torch.equal(state.reference, arena.anchor(1))
    assert torch.equal(state.residual, residual)
    assert (state.counters.round, state.counters.outstanding) == (1, None)
    train(state, 3)
    assert state.message().tokens == 96, "48 since the message, 48 since the adoption"


@pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])
def test_excluded_takes_the_message_back(make: Make, arena: Arena, recipe: str) -> None:
    """What others were sent and dropped is all in the residual again: conservation to rounding."""
    decay = method_of(recipe).feedback.decay
    state = make(recipe)
    train(state, 1)
    first_delta = arena.anchor(0) - weights(state)
    message = state.message()
    lost = decoded(arena, message.sizes, recipe)
    naive = state.residual.clone()  # the control: forgetting the message's fate
    arena.anchor(1).copy_(initial_weights(MODEL, 1))
    state.adopt(1, "excluded")
    torch.testing.assert_close(state.residual, first_delta, atol=1e-6, rtol=1e-5)
    assert float((naive - first_delta).norm()) > 0.1 * float(lost.norm())
    train(state, 2)
    second_delta = arena.anchor(1) - weights(state)
    again = state.message()
    assert (again.tokens, again.steps, again.round) == (96, 4, 1)
    total = decoded(arena, again.sizes, recipe) + state.residual
    torch.testing.assert_close(total, decay * first_delta + second_delta, atol=1e-6, rtol=1e-5)


def test_adoption_without_a_message_carries_progress_over(make: Make, arena: Arena) -> None:
    state = make("diloco")
    train(state, 1)
    progress = weights(state) - arena.anchor(0)
    arena.anchor(1).copy_(initial_weights(MODEL, 1))
    state.adopt(1, "none")
    torch.testing.assert_close(weights(state) - arena.anchor(1), progress, atol=1e-6, rtol=1e-5)
    assert state.message().tokens == 48


def test_an_undecided_message_stays_on_its_way(make: Make, arena: Arena) -> None:
    state = make("diloco")
    train(state, 1)
    delta = arena.anchor(0) - weights(state)
    state.message()
    arena.anchor(1).copy_(arena.anchor(0))
    state.adopt(1, "none")
    assert state.counters.outstanding is not None
    state.adopt(1, "excluded")
    assert state.counters.outstanding is None
    torch.testing.assert_close(state.residual, delta, atol=1e-6, rtol=1e-5)


def test_the_same_adoption_said_twice_changes_nothing(make: Make, arena: Arena) -> None:
    state = make("diloco")
    train(state, 1)
    state.message()
    arena.anchor(1).copy_(initial_weights(MODEL, 1))
    state.adopt(1, "excluded")
    train(state, 2)
    before = [vector.clone() for vector in state._vectors().values()]
    state.adopt(1, "excluded")
    assert all(torch.equal(one, two) for one, two in zip(before, state._vectors().values(), strict=True))


def test_two_messages_at_once_are_refused(make: Make) -> None:
    state = make("diloco")
    train(state, 1)
    state.message()
    with pytest.raises(ValueError, match="on its way"):
        state.message()


def test_a_snapshot_restores_every_bit(make: Make, arena: Arena) -> None:
    state = make("sparseloco")
    train(state, 1)
    state.message()
    train(state, 2)
    state.save()
    second = make("sparseloco")
    assert second.counters == state.counters
    assert all(torch.equal(one, two) for one, two in zip(_all(state), _all(second), strict=True))
    arena.anchor(1).copy_(initial_weights(MODEL, 1))
    for each in (state, second):
        each.adopt(1, "excluded")
    assert all(torch.equal(one, two) for one, two in zip(_all(state), _all(second), strict=True))


def test_work_adds_up() -> None:
    total = Work(tokens=10, steps=1, loss=4.0) + Work(tokens=30, steps=3, loss=4.0)
    assert (total.tokens, total.steps, total.mean_loss) == (40, 4, 2.0)
    assert Work().mean_loss == 0.0


def _all(state: InnerState) -> list[Tensor]:
    return list(state._vectors().values())
