"""The reduction of a round at one peer: the sums that it announces, and the assignments that it makes as a leader.

Nothing here sends a message: the round machine signs and sends the bodies that these functions return.
"""

from collections.abc import Iterator

from protocol.consensus.events import Reduce
from protocol.consensus.messages.kinds import ReducedPart, ReducerAssignment
from protocol.consensus.rules.audits import audited_parts, false_announcements
from protocol.consensus.state import Rejection, RoundState


def reduce_parts(state: RoundState) -> Iterator[Reduce | ReducedPart]:
    """Yield a request for each sum that this peer owes or checks, and an announcement of each one that it owes.

    It also announces the true sum where another peer announced a wrong one, so that all others check that part.
    """
    view, sums = state.current_view, state.sums
    if view is None:
        return
    own, false = view.parts_reduced_by(state.me), {message.body.part for message in false_announcements(state)}
    for part in sorted({*own, *false}):
        blob = sums.result(part, view.inputs)
        if blob is not None and (view.attempt, part, state.me) not in view.announcements:
            yield ReducedPart(state.number, state.view, view.roster.digest, view.attempt, part, blob, view.inputs)
    for part in (*own, *audited_parts(state)):
        if (request := sums.request(part, view.included, state.knowledge)) is not None:
            yield request


def next_assignment(state: RoundState, now: float) -> tuple[ReducerAssignment, list[Rejection]] | None:
    """Return the next assignment of reducers if this peer leads and one is due, and the peers that it drops."""
    view, leader_role = state.current_view, state.leader_role
    if view is None or leader_role is None or state.proposal() is not None:
        return None
    assignment = leader_role.next_assignment(now)
    if assignment is None:
        return None
    included, reducers = assignment
    senders = tuple(entry.sender for entry in included)
    dropped: list[Rejection] = [
        (reducer, "reducer silent" if reducer in leader_role.silent_reducers else "reducer left")
        for reducer in sorted(set(view.reducers) - set(reducers) - state.false_reducers)
    ]
    dropped += [(entry.sender, "not fetched") for entry in view.included if entry.sender not in senders]
    body = ReducerAssignment(state.number, state.view, view.roster.digest, view.attempt + 1, senders, reducers)
    return body, dropped
