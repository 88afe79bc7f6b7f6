"""When a trainer stands back, second by second; the control has no hysteresis."""

from collections.abc import Sequence

from node.trainer.devices.pause_when_busy import PAUSE_AFTER_SECONDS, RESUME_AFTER_SECONDS, PausePolicy


def pauses(shares: Sequence[float], pause_share: float = 0.25, resume_share: float = 0.15) -> list[bool]:
    courtesy, states = PausePolicy(pause_share, resume_share), []
    for second, share in enumerate(shares):
        before = courtesy.paused
        assert courtesy.update(share, float(second)) == (courtesy.paused != before)
        states.append(courtesy.paused)
    return states


def changes(states: Sequence[bool]) -> int:
    return sum(one != other for one, other in zip(states, states[1:], strict=False))


def test_it_stands_back_after_a_while_and_goes_on_after_a_longer_one() -> None:
    states = pauses([0.0] * 5 + [0.6] * 20 + [0.0] * 20)
    assert states.index(True) == 5 + PAUSE_AFTER_SECONDS
    assert states.index(False, 25) == 25 + RESUME_AFTER_SECONDS
    assert changes(states) == 2


def test_a_moment_of_work_changes_nothing() -> None:
    assert not any(pauses([0.0, 0.9, 0.9, 0.0] * 10))
    assert all(pauses([0.9] * 10 + [0.0, 0.0, 0.9] * 10)[5:])


def test_what_lies_between_the_thresholds_leaves_things_as_they_are() -> None:
    assert not any(pauses([0.2] * 60))
    assert all(pauses([0.9] * 10 + [0.2] * 60)[5:])


def test_a_share_that_swings_about_the_threshold_does_not_swing_the_trainer() -> None:
    swinging = [0.3] * 6 + ([0.2] * 12 + [0.3] * 6) * 5
    assert changes(pauses(swinging)) == 1
    assert changes(pauses(swinging, resume_share=0.25)) > 5, "the control: one threshold for both"
