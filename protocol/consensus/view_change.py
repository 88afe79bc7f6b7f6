"""View changes: who may lead a view, when a peer gives up its leader, and which view it changes to."""

from protocol.consensus.acceptance import lacks_justification, proposal_fault
from protocol.consensus.events import RejectReason
from protocol.consensus.state import FORGIVING_VIEW, MAX_VIEW, RoundState
from protocol.consensus.view import View
from protocol.identity import PeerId

MAX_TIMEOUT_FACTOR = 8
JOIN_TIMEOUTS = 2  # leader timeouts for a majority to join the view of a leader
MAX_VIEW_JUMP = 8  # views


def may_lead(state: RoundState, peer: PeerId, view: int) -> bool:
    """Return whether a peer may lead a view.

    The claim of this peer itself does not count, so that a leader stays once it leads. A failed leader leads again
    only in a view that half of the live voters have reached: they may know better, and all have to meet in one
    view. Otherwise a peer could choose one view after another that its rank gives it, and delay the round for ever.
    """
    electable, me = state.voter_set.electable, state.me
    if peer not in electable or peer == me:
        return False
    if view < FORGIVING_VIEW and peer in state.not_leading and not electable - state.not_leading <= {me}:
        return False
    has_failed = peer in state.failed_leaders and not electable - state.failed_leaders <= {me}
    if has_failed and view > outvoting_view(state):
        return False
    groups = electable, state.candidates
    leaders = {state.election.leader(view, group) for group in groups}
    if me in leaders:
        leaders |= {state.election.leader(view, group - {me}) for group in groups}
    return peer in leaders


def outvoting_view(state: RoundState) -> int:
    """Return the latest view that half of the live voters have reached, or as many as leave no quorum behind.

    Forgotten voters are left out of the count: to leave a view too late or too early costs only time, and they make no
    promises any more.
    """
    live, knowledge = state.voter_set.electable, state.knowledge
    half, spare = (len(live) + 1) // 2, len(live) - state.voter_set.least_majority() + 1
    needed = min(half, spare) if spare > 0 else half
    ahead = knowledge.in_later_view & live
    if not ahead or len(ahead) < needed:
        return 0
    return sorted((knowledge.inventories[peer].view for peer in ahead), reverse=True)[needed - 1]


def max_reachable_view(state: RoundState) -> int:
    """Return the latest view to which the roster of a leader may move this peer."""
    return min(max(state.view + MAX_VIEW_JUMP, outvoting_view(state)), MAX_VIEW)


def next_view(state: RoundState) -> int:
    """Return the view to change to: one that others have reached, so that all meet, but not too far ahead."""
    ahead = state.knowledge.in_later_view & state.voter_set.electable
    latest = max((_reported_view_of(state, peer) for peer in ahead), default=0)
    return min(max(state.view + 1, outvoting_view(state), min(latest, state.view + MAX_VIEW_JUMP)), MAX_VIEW)


def leader_fault(state: RoundState, now: float) -> RejectReason | None:
    """Return the reason to give up the leader of this view, if there is one."""
    view = state.current_view
    if has_spoken_falsely(state):
        return "false proposal"
    if view is None:
        return _missing_roster_fault(state, now)
    if view.leader not in state.live:
        return "leader left"
    if view.leader in state.false_reducers:
        return "wrong sum"
    if _leads_with_ghost(state, view):
        return "exchange stalled"
    if _reported_view_of(state, view.leader) > state.view:
        return "leader moved on"
    role, timeout = state.leader_role, _leader_timeout(state)
    if role is None and now >= view.leader_last_heard + timeout:
        return "leader silent"
    if role and role.has_nothing_to_propose():
        return "exchange stalled"
    if role and now >= view.started_at + JOIN_TIMEOUTS * timeout and not role.has_quorum():
        return "not followed"
    if (fault := _proposal_fault(state, view.started_at, now)) is not None:
        return fault
    deadline = view.started_at + state.settings.exchange_seconds + state.settings.leader_timeout
    return "exchange stalled" if now >= deadline else None


def has_spoken_falsely(state: RoundState) -> bool:
    """Return whether the leader has signed what no honest peer signs; if all leaders failed, this counts only once."""
    return state.leader in state.false_speakers - state.failed_leaders


def _leads_with_ghost(state: RoundState, view: View) -> bool:
    """Return whether the leader lists an unusable contribution of its own, and every voter finds that out.

    Where only some of the voters fetch from it, they would wait in a view that the others do not reach.
    """
    if view.leader not in state.unusable - state.failed_leaders or view.leader not in view.contributors:
        return False
    fetching = set(view.reducers) if state.topology.reduced_part_count else state.voter_set.voters
    return state.topology.has_shared_state and state.voter_set.voters <= fetching


def _missing_roster_fault(state: RoundState, now: float) -> RejectReason | None:
    """Return a fault if the leader is silent: it owes a roster when one is due, and before that signs of life."""
    due_at, contributed_at = state.roster_due_at(), state.contributed_at
    if state.leader in (None, state.me):
        return None
    owed = [] if due_at is None else [due_at]
    owed += [] if contributed_at is None else [max(contributed_at, state.leader_last_heard)]
    owed_since = max(min(owed, default=now), state.view_since)
    return "leader silent" if now >= owed_since + _leader_timeout(state) else None


def _proposal_fault(state: RoundState, since: float, now: float) -> RejectReason | None:
    """Return the fault of a proposal that this peer may not acknowledge.

    In a later view the older proposal that it repeats may still be on its way.
    """
    proposal = state.proposal()
    if proposal is None or (state.view and now < since + JOIN_TIMEOUTS * _leader_timeout(state)):
        return None
    fault = proposal_fault(state, proposal)
    return "false proposal" if fault is None and lacks_justification(state, proposal) else fault


def _leader_timeout(state: RoundState) -> float:
    """Return the timeout, which grows with the views, so that slow links do not depose leaders for ever."""
    return state.settings.leader_timeout * min(1 + state.view // 2, MAX_TIMEOUT_FACTOR)


def _reported_view_of(state: RoundState, peer: PeerId) -> int:
    """Return the view that another peer last reported."""
    known = state.knowledge.inventories.get(peer) if peer in state.knowledge.in_later_view else None
    return known.view if known else 0
