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

from protocol.identity import PeerId
from protocol.rounds.events import Urgency

KEPT_ROUNDS = 3
ENOUGH = 2 / 3  # of the full steps: a peer that has time for so many makes all
SLIGHT = 0.1  # of the grace: who is late by less holds nobody
LEAST_RESERVE, MOST_RESERVE = 0.25, 0.5  # of the grace
COARSE, COARSE_IN_PAIRS = 0.9, 0.25  # of the grace: whose step takes so long cannot tell its time by steps
SMOOTHING = 0.5


class Pacing:
    """`grace`: how long the others wait for us, at most. `full`: the plan's steps of a round by its number.

    `overlaps`: whether peers train on while that round's messages travel. Then a message's steps were begun before its
    round, each peer's at a time of its own, and when it comes tells nothing of its speed: such rounds are left out, and
    a slow peer is only asked for what it has.
    """

    def __init__(
        self, grace: float, full: Callable[[int], int], step_tokens: int,
        overlaps: Callable[[int], bool] = lambda number: False,
    ) -> None:  # fmt: skip
        self._grace = grace
        self._full = full
        self._step_tokens = step_tokens
        self._overlaps = overlaps
        self._shares = deque([1.0] * KEPT_ROUNDS, KEPT_ROUNDS)
        self._delays = deque[float](maxlen=KEPT_ROUNDS)  # from asked to offered
        self._seconds: float | None = None  # of a step
        self._totals: tuple[int, float] | None = None
        self._coarse = COARSE_IN_PAIRS
        self._in_time = dict[int, frozenset[PeerId]]()  # of the last round that we were in, by its number
        self._begin(0, 0.0)

    def _begin(self, number: int, now: float) -> None:
        self._number = number
        self._opened = now
        self._asked_at: float | None = None
        self._offered: tuple[float, int | None] | None = None

    @property
    def share(self) -> float:
        """Of the full steps, what we have time for in a round."""
        return median(self._shares)

    @property
    def is_short(self) -> bool:
        """Whether we make fewer than all steps."""
        return self.share < ENOUGH

    def steps(self, number: int) -> int:
        """To make for that round."""
        full = self._full(number)
        return max(1, math.floor(self.share * full)) if self.is_short and not self._is_coarse else full

    @property
    def _is_coarse(self) -> bool:
        return self._seconds is not None and self._seconds > self._coarse * self._grace

    def _whole_tokens(self, number: int) -> int:
        """Of a contribution to that round whose sender is no short peer."""
        return math.ceil(ENOUGH * self._full(number) * self._step_tokens)

    def _reserve(self) -> float:
        """Before the others' patience ends, when to ask our trainer for what it has."""
        if self.is_short and self._is_coarse:
            return self._grace
        delay = max(self._delays, default=self._seconds or 0.0)
        return min(MOST_RESERVE, max(LEAST_RESERVE, 2 * delay / self._grace)) * self._grace if self._grace else 0.0

    def urgency(self, number: int) -> Urgency:
        return Urgency(self._reserve(), self._whole_tokens(number))

    def trained(self, step: int, seconds: float) -> None:
        """Totals of the trainer: inner steps, and the seconds that it computed for them."""
        before, self._totals = self._totals, (step, seconds)
        if before is None or step <= before[0] or seconds <= before[1]:
            return
        each = (seconds - before[1]) / (step - before[0])
        self._seconds = each if self._seconds is None else SMOOTHING * each + (1 - SMOOTHING) * self._seconds

    def opened(self, number: int, now: float) -> None:
        self._begin(number, now)

    def asked(self, now: float) -> None:
        """Our trainer was asked for what it has."""
        self._asked_at = now

    def offered(self, steps: int | None, now: float) -> None:
        """`steps`: of our message; None: it was made for an earlier round."""
        if self._offered is not None:
            return
        self._offered = now, steps
        if self._asked_at is not None:
            self._delays.append(now - self._asked_at)

    def decided(self, arrivals: Mapping[PeerId, float], in_time: Collection[PeerId]) -> None:
        """The round is over. `arrivals`: when each whole contribution of others came; `in_time`: who was in it."""
        self._coarse = COARSE if len(arrivals) > 1 else COARSE_IN_PAIRS  # of a pair, either one starts the grace
        before, self._in_time = self._in_time.get(self._number - 1), {self._number: frozenset(in_time)}
        if self._overlaps(self._number):
            return
        examples = sorted(at for peer, at in arrivals.items() if before is None or peer in before)
        fits = self._fits(examples) if examples else self._without_example()
        if fits is None:
            return
        share = max(0.0, min(1.0, fits / self._full(self._number)))
        self._shares.extend([share] * (1 if self._asked_at is None else KEPT_ROUNDS))

    def _fits(self, arrivals: list[float]) -> float | None:
        """None: the round tells nothing."""
        others_in = arrivals[len(arrivals) // 2]  # with ourselves half are waiting then
        if self._seconds is None or (self._offered is None and self._asked_at is None):
            return None
        at, steps = self._offered or (0.0, None)
        if steps is None:
            return None if self._offered else (others_in - self._opened) / self._seconds
        late, made = at - others_in, min(steps, self.steps(self._number))
        if not self.is_short and self._asked_at is None and late < SLIGHT * self._grace:
            return float(self._full(self._number))
        return made - late / self._seconds

    def _without_example(self) -> float | None:
        _, steps = self._offered or (0.0, None)
        return 2.0 * steps if steps is not None and self.is_short and self._asked_at is None else None

    def words(self, number: int) -> str:
        """For a person; empty where there is nothing to say."""
        if not self.is_short:
            return ""
        full = self._full(number)
        slower = 1 / max(self.share, 1 / full)
        made = max(1, round(self.share * full))
        return f"{made} of {full} steps a round: this machine is {slower:.1f} times slower than the others"
