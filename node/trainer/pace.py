"""When a trainer sends its message, when it goes over to a new anchor, and when it waits. PURE.

A message is due after the plan's steps since the last one, once no other is on its way. While it travels a peer trains
on for `ahead` further steps, and applies the result after `delay` of them at the earliest (`optim.schedules`).
"""

from node.trainer.inner_state import Counters
from optim.program import Plan


def is_message_due(counters: Counters, steps: int) -> bool:
    return counters.outstanding is None and counters.since_message.steps >= steps


def may_adopt(counters: Counters, plan: Plan) -> bool:
    """Whether an anchor that has come may be taken already. `plan`: of the round whose message is on its way."""
    return counters.outstanding is None or counters.since_message.steps >= plan.method.schedule.delay


def must_wait(counters: Counters, plan: Plan) -> bool:
    return counters.outstanding is not None and counters.since_message.steps >= plan.method.schedule.ahead
