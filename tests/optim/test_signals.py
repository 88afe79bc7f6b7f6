"""The vectors that each signal measures, shares and sends."""

import pytest
import torch
from pydantic import ValidationError

from optim.compose import INNER_RULES, SIGNALS
from optim.errors import UnknownOption
from optim.inner.base import FIRST_MOMENT, GRADIENT_SUM, SECOND_MOMENT, WEIGHTS
from optim.schedules.exchange_schedule import EverySteps
from optim.signals import (
    MAX_PERIOD,
    Gradient,
    Momentum,
    PseudoGradient,
    PseudoGradientAndAnchor,
    Signal,
    SignalInputs,
    Weights,
    WeightsAndMoments,
)
from tests.optim.fake_peers import LAYOUT, NUMEL, random_values

SHARED = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT)


def progress(steps: int = 4) -> SignalInputs:
    """Return inputs in which every vector is different."""
    own = {name for inner in INNER_RULES.values() for name in inner.vectors}
    return SignalInputs(
        live={name: random_values(place) for place, name in enumerate(SHARED)},
        reference={name: random_values(10 + place) for place, name in enumerate(SHARED)},
        anchor={name: random_values(20 + place) for place, name in enumerate(SHARED)},
        inner_state={name: random_values(30 + place) for place, name in enumerate(sorted(own))},
        steps=steps,
    )


def test_pseudo_gradient_points_uphill() -> None:
    given = progress()
    measured = PseudoGradient().measure(given)
    assert torch.equal(measured, given.reference[WEIGHTS] - given.live[WEIGHTS])


def test_inner_state_is_the_difference_of_three_vectors() -> None:
    given = progress()
    for name, measured in zip(SHARED, torch.split(WeightsAndMoments().measure(given), NUMEL), strict=True):
        assert torch.equal(measured, given.reference[name] - given.live[name])


def test_gradient_is_the_mean_over_the_steps() -> None:
    given = progress(steps=4)
    assert torch.equal(Gradient().measure(given), given.inner_state[GRADIENT_SUM] / 4)
    assert torch.isfinite(Gradient().measure(progress(steps=0))).all()


def test_momentum_updates_the_agreed_one_with_the_own_gradient() -> None:
    given = progress(steps=2)
    expected = 0.75 * given.anchor[FIRST_MOMENT] + 0.25 * given.inner_state[GRADIENT_SUM] / 2
    torch.testing.assert_close(Momentum(beta=0.75).measure(given), expected)


def test_weights_are_a_copy() -> None:
    given = progress()
    measured = Weights().measure(given)
    assert torch.equal(measured, given.live[WEIGHTS])
    measured.zero_()
    assert given.live[WEIGHTS].any()


def test_progress_and_anchor_are_concatenated() -> None:
    given = progress()
    moved, anchor = torch.split(PseudoGradientAndAnchor().measure(given), NUMEL)
    assert torch.equal(moved, given.reference[WEIGHTS] - given.live[WEIGHTS])
    assert torch.equal(anchor, given.anchor[WEIGHTS])


@pytest.mark.parametrize("kind", SIGNALS)
def test_every_signal_measures_a_new_vector_of_its_size(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    given = progress()
    inputs = [
        vector.clone() for vector in (*given.live.values(), *given.reference.values(), *given.inner_state.values())
    ]
    measured = signal.measure(given)
    assert measured.shape == (NUMEL * signal.vector_count,)
    after = [*given.live.values(), *given.reference.values(), *given.inner_state.values()]
    assert all(torch.equal(one, two) for one, two in zip(inputs, after, strict=True)), (
        "measuring does not change the inputs"
    )
    assert signal.shared_names[0] == WEIGHTS and set(signal.averaged_names) <= set(signal.shared_names[1:])
    assert len(signal.averaged_names) < signal.vector_count
    known = {name for inner in INNER_RULES.values() for name in inner.vectors}
    assert {*signal.averaged_names, *signal.consumed_names} <= known


@pytest.mark.parametrize("kind", SIGNALS)
def test_every_value_is_sent_within_a_cycle(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    sent = torch.zeros(NUMEL * signal.vector_count)
    for number in range(signal.period):
        spans = signal.spans(number, LAYOUT, EverySteps())
        assert list(spans) == sorted(spans) and all(start < stop for start, stop in spans)
        assert spans == signal.spans(number + signal.period, LAYOUT, EverySteps())
        for start, stop in spans:
            sent[start:stop] += 1
    assert sent[:NUMEL].eq(signal.period).all() and sent.ge(1).all()


@pytest.mark.parametrize("kind", SIGNALS)
def test_signals_that_must_be_whole_refuse_fragments(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    if signal.requires_whole:
        with pytest.raises(UnknownOption, match=rf"signal '{kind}' is sent whole; set schedule\.fragments = 1"):
            signal.spans(0, LAYOUT, EverySteps(fragments=2))
    else:
        assert signal.spans(1, LAYOUT, EverySteps(fragments=2)) == EverySteps(fragments=2).spans(1, LAYOUT)
        assert not signal.consumed_names and signal.vector_count == 1


def test_moments_are_sent_on_their_own_periods() -> None:
    signal = WeightsAndMoments(first_every=2, second_every=3)
    sent = [[start // NUMEL for start, _ in signal.spans(number, LAYOUT, EverySteps())] for number in range(6)]
    assert sent == [[0], [0, 1], [0, 2], [0, 1], [0], [0, 1, 2]]
    # The periods that the paper recommends cost half as much as three vectors in every round.
    recommended = WeightsAndMoments()
    values = sum(len(recommended.spans(number, LAYOUT, EverySteps())) for number in range(recommended.period))
    assert values == 3 * recommended.period / 2


def test_periods_with_a_large_common_multiple_are_refused() -> None:
    assert WeightsAndMoments(first_every=999, second_every=999).period == 999
    with pytest.raises(ValidationError, match=f"within {MAX_PERIOD} rounds"):
        WeightsAndMoments(first_every=31, second_every=37)
