"""The reduction of a round at one peer: the sums that it computes, and the assignments that it makes as a leader.

Nothing here sends a message: the round machine signs and sends the bodies that these functions return.
"""

from collections.abc import Iterator

from protocol.blobs.blob import Blob
from protocol.consensus.events import Reduce
from protocol.consensus.knowledge import RoundKnowledge
from protocol.consensus.message_kinds import ReducedPart, ReducerAssignment
from protocol.consensus.messages import Digest
from protocol.consensus.state import Rejection, RoundState
from protocol.consensus.topology import Contributions

PartSum = tuple[int, tuple[Digest, ...]]  # a part, and the digests of the contributions in their order


class Sums:
    """The sums that a peer has requested from its driver in one round; owned by the round machine."""

    def __init__(self) -> None:
        self._requested: list[PartSum] = []  # the index is the request id of the Reduce
        self._results: dict[PartSum, Blob] = {}

    def record(self, request_id: int, blob: Blob) -> None:
        """Record the answer to a request."""
        self._results[self._requested[request_id]] = blob

    def result(self, part: int, contributions: Contributions) -> Blob | None:
        """Return the sum of one part of these contributions, if it is computed."""
        return self._results.get(_part_sum(part, contributions))

    def request(self, part: int, contributions: Contributions, knowledge: RoundKnowledge) -> Reduce | None:
        """Return a request for a sum, once this peer holds that part of all contributions; each one only once."""
        wanted = _part_sum(part, contributions)
        part_blobs = [entry.body.part_blobs[part] for entry in contributions]
        if wanted in self._requested or not knowledge.has_all_parts(knowledge.me, part_blobs):
            return None
        self._requested.append(wanted)
        return Reduce(part, len(self._requested) - 1, contributions)


def _part_sum(part: int, contributions: Contributions) -> PartSum:
    return part, tuple(entry.digest for entry in contributions)


def reduce_own_parts(state: RoundState, sums: Sums) -> Iterator[Reduce | ReducedPart]:
    """Yield a request for each sum that this peer owes and can compute, and an announcement of each computed one."""
    view = state.current_view
    if view is None:
        return
    for part in view.parts_reduced_by(state.me):
        if view.reduced_part(part) is not None:
            continue
        if (blob := sums.result(part, view.included)) is not None:
            yield ReducedPart(state.number, state.view, view.roster.digest, view.attempt, part, blob)
        elif (request := sums.request(part, view.included, state.knowledge)) is not None:
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
        for reducer in sorted(set(view.reducers) - set(reducers))
    ]
    dropped += [(entry.sender, "not fetched") for entry in view.included if entry.sender not in senders]
    body = ReducerAssignment(state.number, state.view, view.roster.digest, view.attempt + 1, senders, reducers)
    return body, dropped
