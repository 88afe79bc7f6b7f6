"""Pacing: the number of steps that a peer makes for a round, so that it neither delays the others nor is left out.

The full steps of the plan suit machines of the run's usual speed. Each round tells a peer how many steps would have
fitted in before half of the others had contributed:

    fits = steps made - (own arrival - median arrival of the others) / seconds per step

The peer makes the share of the full steps that fitted, as the median of the last three rounds. While that share is
above two thirds it makes all of them: machines are noisy, and equal ones should make equal steps. A contribution with
fewer steps has less weight, because contributions are weighted by their tokens.

Only peers that made most of their steps serve as a reference for others (`EarlySubmitPolicy.min_full_tokens`);
otherwise two peers could lower each other's steps for ever. Of these only those count that were in time for the round
before, because a late one has trained for longer than this round. In a round without a reference, a peer that was in
time makes up to twice as many steps next time. Otherwise a swarm of which half were slow for a while would go on with
few steps, in rounds too short for peers that make all.

A peer that has not contributed when the grace of the others is about to end is asked for its contribution
(`EarlySubmitPolicy.margin_seconds`). This is more than noise: such a round alone determines the steps of the next one.
In the first round of which a peer sees the end it is asked once the first of the others has waited for so long: peers
that come back all the time would otherwise make each round longer by all the steps that they make.
A slow peer whose single step takes about as long as the grace does not count steps, because it could come so early
that the grace of the others ends before they have contributed: it is asked as soon as they have. Times are those of
the caller's clock, in seconds.

Rounds may be shorter than the way of a newcomer from one head to the next, if its daemon is slow: then it would reach
each head too late, and never contribute. So a roster waits for it, within the `Patience` of the peer that makes it.

Where peers train on while their contributions travel, nobody waits as long as all contributions of a round are made
within the steps that they may train on. But a peer that is early once, for example because it started first, stays
early: it makes its next contribution as soon as the round has ended, and waits whenever another peer loses time. So a
peer that leads the last contribution of a round by more than half of these steps makes as many more for its next
one. It still contributes before the others, which lose nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from statistics import median

from protocol.consensus.events import EarlySubmitPolicy
from protocol.identity import PeerId

WINDOW_ROUNDS = 3
FULL_SHARE = 2 / 3  # share of the full steps; a peer with time for it makes all of them
MAX_LATENESS = 0.1  # share of the grace; a peer that is late by less delays no other
MIN_MARGIN, MAX_MARGIN = 0.25, 0.5  # shares of the grace
COARSE_STEP, COARSE_STEP_OF_PAIR = 0.9, 0.25  # shares of the grace; longer steps are too coarse to count
SMOOTHING = 0.5
KEPT_LEAD = 0.5  # share of the steps by which a peer may lead before it waits; with more, it makes more steps
PATIENT_SHARE = 0.05  # of all time; so strangers that never contribute delay a run by no more
MIN_PATIENCE, MAX_PATIENCE = 0.5, 6.0  # seconds


class Patience:
    """The time for which rosters may wait in vain for newcomers: a share of all time, saved up to MAX_PATIENCE.

    Waits that end with their contributions cost nothing, because such peers are voters soon. Once the time is used up,
    nothing is spent until all of it is there again, because a slow newcomer needs several rounds in a row.
    """

    def __init__(self) -> None:
        self._seconds = MAX_PATIENCE
        self._at: float | None = None
        self._is_saving = False

    def for_round(self, most: float, now: float) -> float:
        """Return the seconds for which the roster of a round that opens now may wait, at most `most`."""
        passed = 0.0 if self._at is None else now - self._at
        self._seconds, self._at = min(MAX_PATIENCE, self._seconds + PATIENT_SHARE * passed), now
        self._is_saving = self._seconds < (MAX_PATIENCE if self._is_saving else MIN_PATIENCE)
        return 0.0 if self._is_saving else min(most, self._seconds)

    def spend(self, seconds: float) -> None:
        """Record that a roster waited in vain."""
        self._seconds = max(0.0, self._seconds - seconds)


class Pacing:
    """The pace of one peer, as a share of the full steps of a round.

    `grace`: the longest time for which the others wait in the open round. `full_steps`: maps a round number to the
    plan's steps. `overlaps`: tells whether peers go on training while the contributions of a round travel. Then the
    steps of a contribution began before its round, at a different time for each peer, and its arrival says nothing
    about the speed of its sender: such rounds lower no steps, and a slow peer is only asked for an early contribution.
    `lead`: maps a round number to the steps by which a peer may lead the others before it waits; 0 where all peers
    apply a result at the same step, which more steps of one peer would shift.
    """

    def __init__(
        self, grace: float, full_steps: Callable[[int], int], step_tokens: int,
        overlaps: Callable[[int], bool] = lambda number: False,
        lead: Callable[[int], int] = lambda number: 0,
    ) -> None:  # fmt: skip
        self.grace = grace
        self._full_steps = full_steps
        self._step_tokens = step_tokens
        self._overlaps = overlaps
        self._lead = lead
        self._more_steps = 0  # than the full ones, in the next round
        self._shares = deque([1.0] * WINDOW_ROUNDS, WINDOW_ROUNDS)
        self._delays = deque[float](maxlen=WINDOW_ROUNDS)  # from the request to the submission
        self._step_seconds: float | None = None
        self._totals: tuple[int, float] | None = None
        self._coarse = COARSE_STEP_OF_PAIR
        self._in_time = dict[int, frozenset[PeerId]]()  # by round number, of the last round only
        self._has_ended_round = False  # one that this process was in until its end
        self._reset_round(0, 0.0)

    def _reset_round(self, number: int, now: float) -> None:
        self._number = number
        self._opened = now
        self._requested_at: float | None = None
        self._submitted: tuple[float, int | None] | None = None

    @property
    def step_share(self) -> float:
        """Return the share of the full steps for which this peer has time in a round."""
        return median(self._shares)

    @property
    def is_slow(self) -> bool:
        """Return whether this peer makes fewer than the full steps."""
        return self.step_share < FULL_SHARE

    def steps_for(self, number: int) -> int:
        """Return the number of steps to make for a round."""
        full = self._full_steps(number)
        if self.is_slow and not self._is_coarse:
            return max(1, math.floor(self.step_share * full))
        return full + min(self._more_steps, math.floor(KEPT_LEAD * min(full, self._lead(number))))

    @property
    def _is_coarse(self) -> bool:
        return self._step_seconds is not None and self._step_seconds > self._coarse * self.grace

    def _min_full_tokens(self, number: int) -> int:
        """Return the tokens from which a contribution to a round counts as full."""
        return math.ceil(FULL_SHARE * self._full_steps(number) * self._step_tokens)

    def _margin_seconds(self) -> float:
        """Return how long before the end of the grace the trainer is asked for its contribution."""
        if self.is_slow and self._is_coarse:
            return self.grace
        delay = max(self._delays, default=self._step_seconds or 0.0)
        return min(MAX_MARGIN, max(MIN_MARGIN, 2 * delay / self.grace)) * self.grace if self.grace else 0.0

    def early_submit_policy(self, number: int) -> EarlySubmitPolicy:
        """Return the time at which the round asks for an early contribution."""
        is_new = number > 0 and not self._has_ended_round
        return EarlySubmitPolicy(self._margin_seconds(), self._min_full_tokens(number), awaits_half=not is_new)

    def record_steps(self, step: int, seconds: float) -> None:
        """Record the trainer's total inner steps, and the total seconds that it computed for them."""
        before, self._totals = self._totals, (step, seconds)
        if before is None or step <= before[0] or seconds <= before[1]:
            return
        each = (seconds - before[1]) / (step - before[0])
        self._step_seconds = (
            each if self._step_seconds is None else SMOOTHING * each + (1 - SMOOTHING) * self._step_seconds
        )

    def open_round(self, number: int, now: float) -> None:
        """Start a round."""
        self._reset_round(number, now)

    def record_early_request(self, now: float) -> None:
        """Record that the trainer was asked for an early contribution."""
        self._requested_at = now

    def record_submit(self, steps: int | None, now: float) -> None:
        """Record the first submission in the open round.

        Args:
            steps: the steps in the contribution, or None if it was made for an earlier round.
        """
        if self._submitted is not None:
            return
        self._submitted = now, steps
        if self._requested_at is not None:
            self._delays.append(now - self._requested_at)

    def close_round(self, arrival_times: Mapping[PeerId, float], in_time: Collection[PeerId]) -> None:
        """End the round and derive the steps of the next one.

        Args:
            arrival_times: the time at which each full contribution of other peers arrived.
            in_time: the peers on the roster.
        """
        self._has_ended_round = True
        # In a pair, the first contribution starts the grace.
        self._coarse = COARSE_STEP if len(arrival_times) > 1 else COARSE_STEP_OF_PAIR
        in_time_before, self._in_time = self._in_time.get(self._number - 1), {self._number: frozenset(in_time)}
        if self._overlaps(self._number):
            self._more_steps = self._steps_too_early([at for peer, at in arrival_times.items() if peer in in_time])
            return
        reference = sorted(
            arrived_at for peer, arrived_at in arrival_times.items() if in_time_before is None or peer in in_time_before
        )
        steps = self._steps_that_fit(reference) if reference else self._steps_without_reference()
        if steps is None:
            return
        share = max(0.0, min(1.0, steps / self._full_steps(self._number)))
        self._shares.extend([share] * (1 if self._requested_at is None else WINDOW_ROUNDS))

    def _steps_too_early(self, arrival_times: Collection[float]) -> int:
        """Return the steps by which our contribution led the last one of the others too far."""
        submitted_at, steps = self._submitted or (0.0, None)
        if not arrival_times or self._step_seconds is None or steps is None:
            return 0
        lead = (max(arrival_times) - submitted_at) / self._step_seconds
        return max(0, round(lead - KEPT_LEAD * self._lead(self._number)))

    def _steps_that_fit(self, arrival_times: list[float]) -> float | None:
        """Return the steps that would have fitted into the round, or None if it does not tell."""
        half_arrived_at = arrival_times[len(arrival_times) // 2]  # with this peer, half are waiting then
        if self._step_seconds is None or (self._submitted is None and self._requested_at is None):
            return None
        submitted_at, steps = self._submitted or (0.0, None)
        if steps is None:
            return None if self._submitted else (half_arrived_at - self._opened) / self._step_seconds
        lateness, made = submitted_at - half_arrived_at, min(steps, self.steps_for(self._number))
        if not self.is_slow and self._requested_at is None and lateness < MAX_LATENESS * self.grace:
            return float(self._full_steps(self._number))
        return made - lateness / self._step_seconds

    def _steps_without_reference(self) -> float | None:
        _, steps = self._submitted or (0.0, None)
        return 2.0 * steps if steps is not None and self.is_slow and self._requested_at is None else None

    def describe(self, number: int) -> str:
        """Return the pace in words for the status, or an empty string for a peer that makes all steps."""
        if not self.is_slow:
            return ""
        full = self._full_steps(number)
        slower = 1 / max(self.step_share, 1 / full)
        made = max(1, round(self.step_share * full))
        return f"{made} of {full} steps per round: this machine is {slower:.1f} times slower than the others"
