"""When a trainer sends its message, when it goes over to a new anchor, and when it waits. PURE.

A message is due after the plan's steps since the last one, or as many of them as the daemon has asked for (see
`protocol.consensus.pacing`), at least one, or after the schedule's time, once no other is on its way. While it travels
a peer trains on for `ahead` further steps, and applies the result after `delay` of them at the earliest
(`optim.exchange_schedule`).
"""

from dataclasses import dataclass

from node.trainer.state import Counters
from optim.exchange_schedule import Schedule
from optim.round_plan import RoundPlan


@dataclass
class StepTarget:
    """What the daemon asks for: `steps` for round `number` at most; at least one is made."""

    round_number: int = -1
    steps: int | None = None

    def set(self, round_number: int, steps: int | None) -> None:
        self.round_number = round_number
        self.steps = steps

    def steps_due(self, planned_steps: int, round_number: int) -> int:
        """Steps that make a message due, of the plan's `full`."""
        return (
            planned_steps
            if self.steps is None or round_number != self.round_number
            else max(1, min(planned_steps, self.steps))
        )


@dataclass
class ContributionTimer:
    """How long a peer has trained for its next message. Told before every step, of the steps made and the time."""

    began: float | None = None

    def seconds(self, steps: int, now: float) -> float:
        if self.began is None or not steps:
            self.began = now
        return now - self.began


def is_contribution_due(counters: Counters, steps: int, schedule: Schedule, seconds: float) -> bool:
    """`seconds`: of training for it."""
    made = counters.since_message.steps
    return counters.outstanding is None and (made >= steps or schedule.is_due(made, seconds))


def may_apply_anchor(counters: Counters, plan: RoundPlan) -> bool:
    """Whether an anchor that has come may be taken already. `plan`: of the round whose message is on its way."""
    return counters.outstanding is None or counters.since_message.steps >= plan.method.schedule.delay


def must_wait(counters: Counters, plan: RoundPlan) -> bool:
    return counters.outstanding is not None and counters.since_message.steps >= plan.method.schedule.ahead
