"""When a trainer sends its message, and when it waits for the fate of the one before. PURE.

A message is due after H = schedule.inner_steps steps since the last one, once no other is on its way. With overlap
training goes on while it travels, for at most H further steps; without, the trainer waits for its fate.
"""

from node.trainer.inner_state import Counters
from optim.schedules import Schedule


def is_message_due(counters: Counters, inner_steps: int) -> bool:
    return counters.outstanding is None and counters.since_message.steps >= inner_steps


def must_wait(counters: Counters, schedule: Schedule) -> bool:
    ahead = schedule.inner_steps if schedule.overlap else 0
    return counters.outstanding is not None and counters.since_message.steps >= ahead
