"""Decides when a trainer sends a contribution, applies a new anchor, or waits. Pure.

A contribution is due once the one before is settled, and the plan's number of steps or the schedule's time has passed
since. The daemon may ask for fewer steps, at least one, or for more, at most twice as many
(`protocol.consensus.pacing`). While a contribution travels, the peer trains for `ahead` more steps, and applies the
result after `delay` of them at the earliest (`optim.schedules.exchange_schedule`).
"""

from dataclasses import dataclass

from node.trainer.counters import Counters
from node.trainer.ipc.channel import ApplyAnchor
from optim.round_plan import RoundPlan
from optim.schedules.exchange_schedule import Schedule
from protocol.consensus.messages.contributions import MAX_MULTIPLE


@dataclass
class StepTarget:
    """The number of steps, from one to twice the plan's, that the daemon asks for in one round."""

    round_number: int = -1
    steps: int | None = None

    def set(self, round_number: int, steps: int | None) -> None:
        """Set the steps of a round; `None` means all that the plan has."""
        self.round_number = round_number
        self.steps = steps

    def steps_due(self, planned_steps: int, round_number: int) -> int:
        """Return the number of steps after which a contribution is due."""
        return (
            planned_steps
            if self.steps is None or round_number != self.round_number
            else max(1, min(MAX_MULTIPLE * planned_steps, self.steps))
        )


@dataclass
class ContributionTimer:
    """Measures how long a peer has trained for its next contribution.

    A contribution that is encoded while the trainer goes on takes none of the steps that follow its start, so the time
    of the next one begins there.
    """

    began: float | None = None
    _first: int | None = None
    _asked_at: float = 0.0

    def seconds(self, steps: int, total: int, now: float) -> float:
        """Return the seconds since the first step. Must be called before every step that may make one due.

        Args:
            steps: steps since the last contribution.
            total: steps of the trainer.
            now: seconds of a monotonic clock.
        """
        first = total - steps
        if self.began is None or not steps:
            self.began = now
        elif first != self._first:
            self.began = self._asked_at
        self._first, self._asked_at = first, now
        return now - self.began


def is_contribution_due(counters: Counters, steps: int, schedule: Schedule, seconds: float) -> bool:
    """Return whether a contribution is due.

    Args:
        counters: the steps made since the last contribution, and whether it is outstanding.
        steps: the number that makes one due.
        schedule: may make one due earlier.
        seconds: how long the peer has trained for it.
    """
    made = counters.since_message.steps
    return counters.outstanding is None and (made >= steps or schedule.is_due(made, seconds))


def may_apply_anchor(counters: Counters, plan: RoundPlan) -> bool:
    """Return whether a new anchor may be applied now.

    `plan` is that of the round whose contribution is outstanding.
    """
    return counters.outstanding is None or counters.since_message.steps >= plan.method.schedule.delay


def must_wait(counters: Counters, plan: RoundPlan) -> bool:
    """Return whether the trainer has made all steps that it may make ahead of an outstanding contribution."""
    return counters.outstanding is not None and counters.since_message.steps >= plan.method.schedule.ahead


def merge_pending(waiting: ApplyAnchor | None, command: ApplyAnchor) -> ApplyAnchor:
    """Return the newer anchor, with the outcome that an anchor not yet applied brought.

    The daemon sends each outcome once.
    """
    if waiting is None or command.outcome != "none":
        return command
    return command.model_copy(update={"outcome": waiting.outcome})
