"""The reduction of a round at one peer: the sums that it announces, checks, and assigns as a leader.

Nothing here sends a message: the round machine signs and sends the bodies that these functions return.

Sums are exact to the bit, so another result proves that an announcement is wrong. A peer also checks one part that it
draws at random in each round: nobody else knows the draw, and the peer fetches the inputs only after the reducers have
announced their sum. If the sum is wrong, the peer announces its own. Every peer checks the parts of which different
sums are announced, so all find the liar by themselves.

A commit needs the same sum of all reducers of a part, so fewer liars than `reducers_per_part` can stop the part in one
attempt, but not make it up. As many liars that happen to reduce the same part succeed if nobody of the others draws it:
with the probability (1 - 1/parts)^others, and otherwise they are found, though perhaps after the commit.
"""

import hashlib
from collections.abc import Iterator

from protocol.consensus.events import Reduce
from protocol.consensus.messages.contributions import Commit, PartBlob
from protocol.consensus.messages.kinds import ReducedPart, ReducerAssignment
from protocol.consensus.messages.signed import Digest, SignedMessage
from protocol.consensus.state import MissingPart, Rejection, RoundState
from protocol.consensus.view import View
from protocol.identity import PeerId


def drawn_part(view: View, secret: Digest, me: PeerId) -> int | None:
    """Return the part that this peer checks in a view; none where every part has one reducer, or it reduces all."""
    own = set(view.parts_reduced_by(me))
    others = [part for part in range(view.part_count) if part not in own]
    if len(view.initial_reducers) <= view.part_count or not others:
        return None
    number = int.from_bytes(hashlib.sha256(b"".join((secret, view.roster.digest, me.encode()))).digest()[:8], "big")
    return others[number % len(others)]


def audited_parts(state: RoundState) -> list[int]:
    """Return the parts that this peer checks now."""
    view = state.current_view
    if view is None or not view.reducers:
        return []
    own, audited = set(view.parts_reduced_by(state.me)), view.disputed_parts()
    drawn = drawn_part(view, state.audit_secret, state.me)
    if drawn is not None and view.reduced_part(drawn) is not None:
        audited.append(drawn)
    return [part for part in dict.fromkeys(audited) if part not in own]


def missing_inputs(state: RoundState) -> dict[PartBlob, MissingPart]:
    """Return the parts of contributions that the checks of this peer need and that it lacks."""
    view, held = state.current_view, state.knowledge.held_parts
    needed = [
        (entry.body.part_blobs[part], entry.sender)
        for part in audited_parts(state)
        for entry in (view.included if view else ())
    ]
    return {
        part_blob: MissingPart((sender,), is_reduced=False) for part_blob, sender in needed if part_blob not in held
    }


def false_announcements(state: RoundState) -> list[SignedMessage[ReducedPart]]:
    """Return the announcements of sums that differ from those that this peer computed from the same inputs."""
    view = state.current_view
    return [
        message
        for message in (view.announcements.values() if view else ())
        if state.sums.result(message.body.part, message.body.inputs) not in (None, message.body.blob)
    ]


def awaits_audit(state: RoundState, proposal: SignedMessage[Commit], now: float) -> bool:
    """Return whether this peer still has to check its part before it acknowledges a proposal.

    It gives up after a grace: a contributor may have gone, or serve the reducers alone.
    """
    view, evidence = state.current_view, proposal.body.evidence
    if view is None or evidence is None or evidence.roster != view.roster.digest:
        return False
    unchecked = [part for part in audited_parts(state) if state.sums.result(part, view.inputs) is None]
    return bool(unchecked) and proposal.body.inputs == view.inputs and now < audit_deadline(state)


def audit_deadline(state: RoundState) -> float:
    """Return the time from which this peer does not wait for its check."""
    view = state.current_view
    return (view.proposed_at if view and view.proposed_at is not None else float("inf")) + state.settings.grace


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
