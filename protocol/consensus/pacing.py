"""How many steps a peer makes for a round, so that it neither holds the others nor is left out. PURE.

The plan's full steps are for machines of the run's usual speed. Every round tells a peer how many would have fitted in
before half of the others were in:

    fits = steps made - (own arrival - arrival of the others' median) / seconds of a step

and the share of the full steps that fitted, as the median of the last three rounds, is what it makes of the next. While
that is above two thirds it makes all of them: machines are noisy, and equal ones shall make equal steps. What is made
less weighs less, for contributions are weighed by their tokens. Only those who made most of their steps are an example
to others (`Urgency.whole_tokens`): otherwise two could lower each other's steps for ever; and of these only who was in
time for the round before, for whoever was too late has trained for longer than this one. Where nobody was an example,
who was in time makes up to twice as many: otherwise a swarm of which half were slow for a while would go on with their
few steps, in rounds too short for whoever makes all.

A peer that has not offered when the others' patience is about to end is asked for what it has (`Urgency.reserve`). That
is no noise any more: such a round alone decides the next one's steps. A short peer whose single step takes about as
long as the grace does not count steps, for it could come so early that the others' grace ends before they are there:
it is asked as soon as they are. Times are the caller's clock, in seconds.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from statistics import median

from protocol.consensus.events import EarlySubmitPolicy
from protocol.identity import PeerId

WINDOW_ROUNDS = 3
FULL_SHARE = 2 / 3  # of the full steps: a peer that has time for so many makes all
MAX_LATENESS = 0.1  # of the grace: who is late by less holds nobody
MIN_MARGIN, MAX_MARGIN = 0.25, 0.5  # of the grace
COARSE_STEP, COARSE_STEP_OF_PAIR = 0.9, 0.25  # of the grace: whose step takes so long cannot tell its time by steps
SMOOTHING = 0.5


class Pacing:
    """`grace`: how long the others wait for us, at most. `full`: the plan's steps of a round by its number.

    `overlaps`: whether peers train on while that round's messages travel. Then a message's steps were begun before its
    round, each peer's at a time of its own, and when it comes tells nothing of its speed: such rounds are left out, and
    a slow peer is only asked for what it has.
    """

    def __init__(
        self, grace: float, full_steps: Callable[[int], int], step_tokens: int,
        overlaps: Callable[[int], bool] = lambda number: False,
    ) -> None:  # fmt: skip
        self._grace = grace
        self._full_steps = full_steps
        self._step_tokens = step_tokens
        self._overlaps = overlaps
        self._shares = deque([1.0] * WINDOW_ROUNDS, WINDOW_ROUNDS)
        self._delays = deque[float](maxlen=WINDOW_ROUNDS)  # from asked to offered
        self._step_seconds: float | None = None  # of a step
        self._totals: tuple[int, float] | None = None
        self._coarse = COARSE_STEP_OF_PAIR
        self._in_time = dict[int, frozenset[PeerId]]()  # of the last round that we were in, by its number
        self._reset_round(0, 0.0)

    def _reset_round(self, number: int, now: float) -> None:
        self._number = number
        self._opened = now
        self._requested_at: float | None = None
        self._submitted: tuple[float, int | None] | None = None

    @property
    def step_share(self) -> float:
        """Of the full steps, what we have time for in a round."""
        return median(self._shares)

    @property
    def is_slow(self) -> bool:
        """Whether we make fewer than all steps."""
        return self.step_share < FULL_SHARE

    def steps_for(self, number: int) -> int:
        """To make for that round."""
        full = self._full_steps(number)
        return max(1, math.floor(self.step_share * full)) if self.is_slow and not self._is_coarse else full

    @property
    def _is_coarse(self) -> bool:
        return self._step_seconds is not None and self._step_seconds > self._coarse * self._grace

    def _min_full_tokens(self, number: int) -> int:
        """Of a contribution to that round whose sender is no short peer."""
        return math.ceil(FULL_SHARE * self._full_steps(number) * self._step_tokens)

    def _margin_seconds(self) -> float:
        """Before the others' patience ends, when to ask our trainer for what it has."""
        if self.is_slow and self._is_coarse:
            return self._grace
        delay = max(self._delays, default=self._step_seconds or 0.0)
        return min(MAX_MARGIN, max(MIN_MARGIN, 2 * delay / self._grace)) * self._grace if self._grace else 0.0

    def early_submit_policy(self, number: int) -> EarlySubmitPolicy:
        return EarlySubmitPolicy(self._margin_seconds(), self._min_full_tokens(number))

    def record_steps(self, step: int, seconds: float) -> None:
        """Totals of the trainer: inner steps, and the seconds that it computed for them."""
        before, self._totals = self._totals, (step, seconds)
        if before is None or step <= before[0] or seconds <= before[1]:
            return
        each = (seconds - before[1]) / (step - before[0])
        self._step_seconds = (
            each if self._step_seconds is None else SMOOTHING * each + (1 - SMOOTHING) * self._step_seconds
        )

    def open_round(self, number: int, now: float) -> None:
        self._reset_round(number, now)

    def record_early_request(self, now: float) -> None:
        """Our trainer was asked for what it has."""
        self._requested_at = now

    def record_submit(self, steps: int | None, now: float) -> None:
        """`steps`: of our message; None: it was made for an earlier round."""
        if self._submitted is not None:
            return
        self._submitted = now, steps
        if self._requested_at is not None:
            self._delays.append(now - self._requested_at)

    def close_round(self, arrival_times: Mapping[PeerId, float], in_time: Collection[PeerId]) -> None:
        """The round is over. `arrivals`: when each whole contribution of others came; `in_time`: who was in it."""
        self._coarse = (
            COARSE_STEP if len(arrival_times) > 1 else COARSE_STEP_OF_PAIR
        )  # of a pair, either one starts the grace
        before, self._in_time = self._in_time.get(self._number - 1), {self._number: frozenset(in_time)}
        if self._overlaps(self._number):
            return
        examples = sorted(at for peer, at in arrival_times.items() if before is None or peer in before)
        fits = self._steps_that_fit(examples) if examples else self._steps_without_reference()
        if fits is None:
            return
        share = max(0.0, min(1.0, fits / self._full_steps(self._number)))
        self._shares.extend([share] * (1 if self._requested_at is None else WINDOW_ROUNDS))

    def _steps_that_fit(self, arrival_times: list[float]) -> float | None:
        """None: the round tells nothing."""
        others_in = arrival_times[len(arrival_times) // 2]  # with ourselves half are waiting then
        if self._step_seconds is None or (self._submitted is None and self._requested_at is None):
            return None
        at, steps = self._submitted or (0.0, None)
        if steps is None:
            return None if self._submitted else (others_in - self._opened) / self._step_seconds
        late, made = at - others_in, min(steps, self.steps_for(self._number))
        if not self.is_slow and self._requested_at is None and late < MAX_LATENESS * self._grace:
            return float(self._full_steps(self._number))
        return made - late / self._step_seconds

    def _steps_without_reference(self) -> float | None:
        _, steps = self._submitted or (0.0, None)
        return 2.0 * steps if steps is not None and self.is_slow and self._requested_at is None else None

    def describe(self, number: int) -> str:
        """For a person; empty where there is nothing to say."""
        if not self.is_slow:
            return ""
        full = self._full_steps(number)
        slower = 1 / max(self.step_share, 1 / full)
        made = max(1, round(self.step_share * full))
        return f"{made} of {full} steps a round: this machine is {slower:.1f} times slower than the others"
