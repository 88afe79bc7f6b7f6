"""Messages and adoptions against computations by hand: nothing that was trained is lost or counted twice."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from node.model import initial_weights
from node.trainer.counters import StepTotals
from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from optim.compose import compose
from optim.inner.base import FIRST_MOMENT, GRADIENT_SUM, SECOND_MOMENT
from optim.recipes import RECIPES
from tests.node.trainer.state_harness import MODEL, NUMEL, StateHarness, copy_arena, decoded
from tests.optim.fake_peers import Tables

Make = Callable[..., StateHarness]
each_synchronous = pytest.mark.parametrize("recipe", ["diloco", "sparseloco"])


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[StateHarness] = []

    def build(recipe: str, tables: Tables | None = None) -> StateHarness:
        made.append(StateHarness(recipe, tables))
        return made[-1]

    yield build
    for bench in made:
        bench.close()


@each_synchronous
def test_message_carries_the_progress_and_the_residual_the_rest(make: Make, recipe: str) -> None:
    bench = make(recipe)
    bench.train(1)
    delta = bench.anchor - bench.weights
    message = bench.state.make_contribution()
    assert (message.round, message.tokens, message.steps, message.loss) == (0, 48, 2, 3.0)
    torch.testing.assert_close(decoded(bench) + bench.state.residual, delta, atol=1e-6, rtol=1e-5)
    assert torch.equal(bench.state.reference, bench.weights)


def test_who_makes_fewer_steps_trains_at_the_rates_of_the_others(make: Make) -> None:
    bench = make("sparseloco")
    steps = bench.state.plan.steps
    bench.train(1)
    made = bench.state.counters.step
    bench.state.make_contribution()
    assert bench.state.counters.began == bench.optimizer.age_at_join == steps - made
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "included")
    for _ in range(steps):
        bench.train(1)
    bench.state.make_contribution()
    assert bench.state.counters.began == steps - made, "all steps and more: nothing to make up for"


def test_snapshot_has_the_exact_step_with_its_round_whenever_the_trainer_dies(make: Make) -> None:
    bench = make("diloco")
    bench.state.start(0, exact_step=5)
    started = bench.state.vectors.read()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "none", exact_step=6)
    applied = bench.state.vectors.read()
    assert started is not None and (started.round, started.exact_step) == (0, 5)
    assert applied is not None and (applied.round, applied.exact_step) == (1, 6)


@each_synchronous
def test_included_keeps_what_was_trained_meanwhile(make: Make, recipe: str) -> None:
    bench = make(recipe)
    bench.train(1)
    bench.state.make_contribution()
    residual = bench.state.residual.clone()
    meanwhile = bench.train(2)
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "included")
    base = bench.anchor - bench.program.method.adoption.unsent * residual
    torch.testing.assert_close(bench.weights, base + meanwhile)
    assert torch.equal(bench.state.reference, base)
    assert torch.equal(bench.state.residual, residual)
    assert (bench.state.counters.round, bench.state.counters.outstanding) == (1, None)
    bench.train(3)
    assert bench.state.make_contribution().tokens == 96, "48 since the message, 48 since the adoption"


@each_synchronous
def test_excluded_takes_the_message_back(make: Make, recipe: str) -> None:
    """What others were sent and dropped is all in the residual again: conservation to rounding."""
    bench = make(recipe)
    decay = bench.program.method.feedback.decay
    bench.train(1)
    first_delta = bench.anchor - bench.weights
    bench.state.make_contribution()
    lost = decoded(bench)
    naive = bench.state.residual.clone()  # the control: forgetting the message's fate
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "excluded")
    torch.testing.assert_close(bench.state.residual, first_delta, atol=1e-6, rtol=1e-5)
    assert float((naive - first_delta).norm()) > 0.1 * float(lost.norm())
    bench.train(2)
    second_delta = bench.state.reference - bench.weights
    again = bench.state.make_contribution()
    assert (again.tokens, again.steps, again.round) == (96, 4, 1)
    total = decoded(bench) + bench.state.residual
    torch.testing.assert_close(total, decay * first_delta + second_delta, atol=1e-6, rtol=1e-5)


def settled(bench: StateHarness, fate: ContributionOutcome) -> tuple[ContributionHeader, list[bytes]]:
    """A message of two steps, and its fate."""
    bench.train(1)
    message, payloads = bench.state.make_contribution(), bench.payloads()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, fate)
    return message, payloads


@each_synchronous
@pytest.mark.parametrize("is_another_on_its_way", [False, True])
@pytest.mark.parametrize(("first", "second"), [("included", "excluded"), ("excluded", "included")])
def test_another_chain_has_another_fate(
    make: Make, recipe: str, is_another_on_its_way: bool, first: ContributionOutcome, second: ContributionOutcome
) -> None:
    """Told so afterwards, what is to be sent is the same as if that had been its fate from the beginning."""
    late, early = make(recipe), make(recipe)
    message, payloads = settled(late, first)
    settled(early, second)
    if is_another_on_its_way:
        for bench in (late, early):
            bench.train(2)
            bench.state.make_contribution()
    naive = to_be_sent(late)
    for _ in range(2):  # said twice
        late.state.revise_outcome(message, second, lambda: payloads)
    torch.testing.assert_close(to_be_sent(late), to_be_sent(early), atol=1e-6, rtol=1e-5)
    assert float((naive - to_be_sent(early)).norm()) > 1e-3
    assert late.state.counters.unreported.tokens == (48 if second == "excluded" else 0)
    late.state.revise_outcome(replaced(message, 9), first, lambda: payloads)
    torch.testing.assert_close(to_be_sent(late), to_be_sent(early), atol=1e-6, rtol=1e-5)


def to_be_sent(bench: StateHarness) -> Tensor:
    on_its_way = decoded(bench) if bench.state.counters.outstanding else 0.0
    return bench.state.residual + on_its_way


def replaced(message: ContributionHeader, serial: int) -> ContributionHeader:
    """One that this state has never made."""
    return message.model_copy(update={"serial": serial})


def test_where_a_message_is_gone_it_is_not_given_back_and_nothing_is_sent_twice(make: Make) -> None:
    bench = make("sparseloco")
    message, _ = settled(bench, "included")
    left = bench.state.residual.clone()
    assert bench.state.revise_outcome(message, "excluded", list)
    assert torch.equal(bench.state.residual, left) and float(left.norm()) > 0
    assert not bench.state.revise_outcome(message, "lost", list)
    assert float(bench.state.residual.norm()) == 0 and bench.state.counters.unreported == StepTotals()


def test_adoption_without_a_message_carries_progress_over(make: Make) -> None:
    bench = make("diloco")
    progress = bench.train(1)
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "none")
    torch.testing.assert_close(bench.weights - bench.anchor, progress, atol=1e-6, rtol=1e-5)
    assert bench.state.make_contribution().tokens == 48


def test_a_part_of_what_is_unsent_is_trained_from_and_counts_once(make: Make) -> None:
    """The weights begin nearer to the own progress; what is sent and left over stays what it was without."""
    usual, ahead = make("sparseloco"), make("sparseloco", {"adoption": {"unsent": 0.5}})
    for bench in (usual, ahead):
        settled(bench, "included")
    residual = ahead.state.residual.clone()
    assert torch.equal(residual, usual.state.residual) and float(residual.norm()) > 0
    torch.testing.assert_close(usual.weights - ahead.weights, 0.5 * residual, atol=1e-6, rtol=1e-5)
    loan = ahead.anchor - ahead.weights  # control: measured from the anchor, this would be sent as progress
    assert float(loan.norm()) > 0.1 * float(residual.norm())
    decay = ahead.program.method.feedback.decay
    for bench in (usual, ahead):
        bench.state.make_contribution()  # nothing was trained: what was left, and no more
        torch.testing.assert_close(decoded(bench) + bench.state.residual, decay * residual, atol=1e-6, rtol=1e-5)


def test_an_undecided_message_stays_on_its_way(make: Make) -> None:
    bench = make("diloco")
    bench.train(1)
    delta = bench.anchor - bench.weights
    bench.state.make_contribution()
    bench.share(1, bench.anchor.clone())
    bench.state.apply_anchor(1, "none")
    assert bench.state.counters.outstanding is not None
    bench.state.apply_anchor(1, "excluded")
    assert bench.state.counters.outstanding is None
    torch.testing.assert_close(bench.state.residual, delta, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("adoption", [{"kind": "carry", "keep": 0.0}, {"kind": "mix", "alpha": 0.25}])
def test_a_fate_that_comes_after_its_anchor_gives_nothing_up_again(make: Make, adoption: dict[str, object]) -> None:
    """What was trained since the anchor is no older for a fate that was told late: no round lies in between."""
    bench = make("averaging", {"adoption": adoption})
    bench.train(1)
    bench.state.make_contribution()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "none")
    bench.train(2)
    before, residual = bench.weights.clone(), bench.state.residual.clone()
    bench.state.apply_anchor(1, "included")
    torch.testing.assert_close(bench.weights, before, atol=1e-6, rtol=1e-5)
    assert torch.equal(bench.state.residual, residual) and bench.state.counters.outstanding is None


def test_the_same_adoption_said_twice_changes_nothing(make: Make) -> None:
    bench = make("diloco")
    bench.train(1)
    bench.state.make_contribution()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "excluded")
    bench.train(2)
    before = _all(bench)
    bench.state.apply_anchor(1, "excluded")
    assert _equal(before, _all(bench))


def test_anchor_of_another_chain_is_applied_although_its_round_is_the_same(make: Make) -> None:
    bench = make("diloco")
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "none")
    bench.train(2)
    progress = bench.weights - initial_weights(MODEL, 1)
    bench.share(1, initial_weights(MODEL, 2))
    bench.state.apply_anchor(1, "none")
    torch.testing.assert_close(bench.weights, initial_weights(MODEL, 1) + progress)  # the control: it looks known
    bench.state.apply_anchor(1, "none", is_other_chain=True)
    torch.testing.assert_close(bench.weights, initial_weights(MODEL, 2) + progress, atol=1e-6, rtol=1e-5)


def test_two_messages_at_once_are_refused(make: Make) -> None:
    bench = make("diloco")
    bench.train(1)
    bench.state.make_contribution()
    with pytest.raises(ValueError, match="outstanding"):
        bench.state.make_contribution()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_snapshot_restores_every_bit_and_goes_on_the_same(make: Make, recipe: str) -> None:
    bench = make(recipe)
    for vector in bench.optimizer.vectors.values():
        vector.copy_(torch.rand(vector.numel(), generator=torch.Generator().manual_seed(7)) * 1e-3)
    bench.train(1)
    bench.state.make_contribution()
    bench.train(2)
    bench.state.save()
    second = StateHarness(recipe, arena=copy_arena(bench.arena))
    assert second.state.counters == bench.state.counters
    assert _equal(_all(bench), _all(second))
    others = [torch.rand(NUMEL)] * (len(compose(recipe).signal.shared_names) - 1)
    payloads = []
    for each in (bench, second):
        each.share(1, initial_weights(MODEL, 1), *others)
        each.state.apply_anchor(1, "excluded")  # reads the outbox that both have
    for each in (bench, second):
        each.train(3)
        each.state.make_contribution()
        payloads.append(each.payloads())
    assert payloads[0] == payloads[1]
    assert _equal(_all(bench), _all(second)) and bench.state.counters == second.state.counters


def test_a_gradient_is_sent_and_gathered_anew_and_the_weights_follow_the_anchor(make: Make) -> None:
    bench = make("data-parallel")
    gathered = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    bench.optimizer.vectors[GRADIENT_SUM].copy_(gathered)
    for _ in range(4):
        bench.state.count_step(24, 3.0, 0)
    bench.state.make_contribution()
    torch.testing.assert_close(decoded(bench), gathered / 4)
    assert not bench.optimizer.vectors[GRADIENT_SUM].any()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "included")
    assert torch.equal(bench.weights, bench.anchor)


def test_moments_go_over_in_the_rounds_that_sent_them_and_stay_otherwise(make: Make) -> None:
    bench = make("des-loc", {"signal": {"first_every": 2, "second_every": 2}})
    own = {name: torch.rand(NUMEL) for name in (FIRST_MOMENT, SECOND_MOMENT)}
    for name, vector in own.items():
        bench.optimizer.vectors[name].copy_(vector)
    bench.state.make_contribution()
    bench.share(1, initial_weights(MODEL, 1))
    bench.state.apply_anchor(1, "included")
    for name, vector in own.items():
        torch.testing.assert_close(bench.optimizer.vectors[name], vector)
    bench.state.make_contribution()
    agreed = {name: torch.rand(NUMEL) for name in own}
    bench.share(2, initial_weights(MODEL, 2), *agreed.values())
    bench.state.apply_anchor(2, "included")
    for name, vector in agreed.items():
        torch.testing.assert_close(bench.optimizer.vectors[name], vector, atol=1e-6, rtol=1e-5)


def test_a_fragments_message_begins_its_own_values_anew_and_no_others(make: Make) -> None:
    bench = make("averaging", {"schedule": {"inner_steps": 4, "fragments": 2}, "codec": {"kind": "none"}})
    bench.train(1)
    delta = bench.anchor - bench.weights
    bench.state.make_contribution()
    mask = torch.zeros(NUMEL, dtype=torch.bool)
    for start, stop in bench.program.plan(0).spans:
        mask[start:stop] = True
    assert torch.equal(decoded(bench)[mask], delta[mask]) and not decoded(bench)[~mask].any()
    assert torch.equal(bench.state.reference[mask], bench.weights[mask])
    assert torch.equal(bench.state.reference[~mask], bench.anchor[~mask])
    agreed = bench.anchor.clone()
    agreed[mask] += 1.0  # a round moves the values that it sent
    before = bench.weights.clone()
    bench.share(1, agreed)
    bench.state.apply_anchor(1, "included")
    torch.testing.assert_close(bench.weights[mask], agreed[mask])
    torch.testing.assert_close(bench.weights[~mask], before[~mask])


def test_work_adds_up() -> None:
    total = StepTotals(tokens=10, steps=1, loss=4.0) + StepTotals(tokens=30, steps=3, loss=4.0)
    assert (total.tokens, total.steps, total.mean_loss) == (40, 4, 2.0)
    assert StepTotals().mean_loss == 0.0


def _all(bench: StateHarness) -> list[Tensor]:
    return [vector.clone() for vector in bench.vectors.values()]


def _equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))
