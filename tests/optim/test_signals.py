"""What each signal measures, shares and sends."""

import pytest
import torch
from pydantic import ValidationError

from optim.errors import UnknownOption
from optim.inner.inner import FIRST_MOMENT, GRADIENT_SUM, SECOND_MOMENT, WEIGHTS
from optim.recipes import INNERS, SIGNALS
from optim.schedules import EverySteps
from optim.signals import (
    MAX_CYCLE,
    Gradient,
    InnerState,
    Momentum,
    Progress,
    ProgressAndAnchor,
    PseudoGradient,
    Signal,
    Weights,
)
from tests.optim.replicas import LAYOUT, NUMEL, draw

SHARED = (WEIGHTS, FIRST_MOMENT, SECOND_MOMENT)


def progress(steps: int = 4) -> Progress:
    """Every vector another one."""
    own = {name for inner in INNERS.values() for name in inner.vectors}
    return Progress(
        live={name: draw(place) for place, name in enumerate(SHARED)},
        reference={name: draw(10 + place) for place, name in enumerate(SHARED)},
        agreed={name: draw(20 + place) for place, name in enumerate(SHARED)},
        own={name: draw(30 + place) for place, name in enumerate(sorted(own))},
        steps=steps,
    )


def test_pseudo_gradient_points_uphill() -> None:
    given = progress()
    measured = PseudoGradient().measure(given)
    assert torch.equal(measured, given.reference[WEIGHTS] - given.live[WEIGHTS])


def test_inner_state_is_three_differences() -> None:
    given = progress()
    for name, measured in zip(SHARED, torch.split(InnerState().measure(given), NUMEL), strict=True):
        assert torch.equal(measured, given.reference[name] - given.live[name])


def test_gradient_is_the_mean_over_the_steps() -> None:
    given = progress(steps=4)
    assert torch.equal(Gradient().measure(given), given.own[GRADIENT_SUM] / 4)
    assert torch.isfinite(Gradient().measure(progress(steps=0))).all()


def test_momentum_moves_the_agreed_one_on() -> None:
    given = progress(steps=2)
    expected = 0.75 * given.agreed[FIRST_MOMENT] + 0.25 * given.own[GRADIENT_SUM] / 2
    torch.testing.assert_close(Momentum(beta=0.75).measure(given), expected)


def test_weights_are_a_copy() -> None:
    given = progress()
    measured = Weights().measure(given)
    assert torch.equal(measured, given.live[WEIGHTS])
    measured.zero_()
    assert given.live[WEIGHTS].any()


def test_progress_and_anchor_stand_one_after_the_other() -> None:
    given = progress()
    moved, anchor = torch.split(ProgressAndAnchor().measure(given), NUMEL)
    assert torch.equal(moved, given.reference[WEIGHTS] - given.live[WEIGHTS])
    assert torch.equal(anchor, given.agreed[WEIGHTS])


@pytest.mark.parametrize("kind", SIGNALS)
def test_what_every_signal_promises(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    given = progress()
    inputs = [vector.clone() for vector in (*given.live.values(), *given.reference.values(), *given.own.values())]
    measured = signal.measure(given)
    assert measured.shape == (NUMEL * signal.width,)
    after = [*given.live.values(), *given.reference.values(), *given.own.values()]
    assert all(torch.equal(one, two) for one, two in zip(inputs, after, strict=True)), "measuring changes nothing"
    assert signal.shares[0] == WEIGHTS and set(signal.averaged) <= set(signal.shares[1:])
    assert len(signal.averaged) < signal.width
    known = {name for inner in INNERS.values() for name in inner.vectors}
    assert {*signal.averaged, *signal.consumes} <= known


@pytest.mark.parametrize("kind", SIGNALS)
def test_over_its_cycle_every_value_is_sent(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    sent = torch.zeros(NUMEL * signal.width)
    for number in range(signal.cycle):
        spans = signal.spans(number, LAYOUT, EverySteps())
        assert list(spans) == sorted(spans) and all(start < stop for start, stop in spans)
        assert spans == signal.spans(number + signal.cycle, LAYOUT, EverySteps())
        for start, stop in spans:
            sent[start:stop] += 1
    assert sent[:NUMEL].eq(signal.cycle).all() and sent.ge(1).all()


@pytest.mark.parametrize("kind", SIGNALS)
def test_in_fragments_only_what_has_a_meaning_in_fragments(kind: str) -> None:
    signal: Signal = SIGNALS[kind]()
    if signal.is_whole:
        with pytest.raises(UnknownOption, match=rf"signal '{kind}' is sent whole; set schedule\.fragments = 1"):
            signal.spans(0, LAYOUT, EverySteps(fragments=2))
    else:
        assert signal.spans(1, LAYOUT, EverySteps(fragments=2)) == EverySteps(fragments=2).spans(1, LAYOUT)
        assert not signal.consumes and signal.width == 1


def test_moments_are_sent_on_their_own_periods() -> None:
    signal = InnerState(first_every=2, second_every=3)
    sent = [[start // NUMEL for start, _ in signal.spans(number, LAYOUT, EverySteps())] for number in range(6)]
    assert sent == [[0], [0, 1], [0, 2], [0, 1], [0], [0, 1, 2]]
    # The periods that the paper recommends halve what three vectors in every round would cost.
    recommended = InnerState()
    values = sum(len(recommended.spans(number, LAYOUT, EverySteps())) for number in range(recommended.cycle))
    assert values == 3 * recommended.cycle / 2


def test_periods_that_hardly_ever_meet_are_refused() -> None:
    assert InnerState(first_every=999, second_every=999).cycle == 999
    with pytest.raises(ValidationError, match=f"within {MAX_CYCLE} rounds"):
        InnerState(first_every=31, second_every=37)
