"""Note the conduct of the others when a round is decided; `protocol.conduct` makes strikes of it."""

from collections.abc import Iterator

from protocol.conduct import RoundConduct
from protocol.consensus.messages.contributions import Commit
from protocol.consensus.messages.signed import SignedMessage
from protocol.consensus.state import RoundState
from protocol.identity import PeerId

READY_SHARE = 0.25  # of a grace, in which a contribution reaches every leader
FAULTS = frozenset({"leader silent", "exchange stalled", "not followed", "false proposal", "wrong sum"})


def observe_round(state: RoundState, commit: SignedMessage[Commit]) -> RoundConduct:
    """Return what this peer saw of the others in a round that ends with this commit."""
    served = frozenset(commit.body.by_sender)
    withheld = state.withheld | set(_unserved(state, commit.body))
    if state.leader_role is not None:
        withheld |= state.leader_role.silent_reducers
    return RoundConduct(
        state.number,
        commit.sender,
        served,
        frozenset(withheld),
        dict(state.leader_faults),
        frozenset(_left_out(state, commit)),
        frozenset(state.false_reducers),
        len(state.voter_set.voters),
    )


def _unserved(state: RoundState, commit: Commit) -> Iterator[PeerId]:
    """Yield the peers on the roster that the commit drops, and of whose contribution this peer has not all either."""
    view, knowledge = state.current_view, state.knowledge
    for entry in view.roster.body.contributions if view else ():
        is_dropped = entry.sender not in commit.by_sender and entry.sender != state.me
        if is_dropped and not knowledge.has_all_parts(state.me, entry.body.part_blobs):
            yield entry.sender


def _left_out(state: RoundState, commit: SignedMessage[Commit]) -> Iterator[PeerId]:
    """Yield the contributors that the leader left out although their work was ready long before its roster."""
    view, knowledge = state.current_view, state.knowledge
    if view is None or commit.sender != view.leader or commit.sender == state.me:
        return
    if state.me not in commit.body.by_sender and _is_own_ready(state):
        yield state.me
    for sender, entry in knowledge.contributions.items():
        if sender in commit.body.by_sender or sender == state.me or sender not in state.live - state.set_aside:
            continue
        if sender not in view.contributors and knowledge.has_all_parts(state.me, entry.body.part_blobs):
            yield sender


def _is_own_ready(state: RoundState) -> bool:
    view, contributed_at = state.current_view, state.contributed_at
    if view is None or contributed_at is None:
        return False
    is_hasty = 2 * len(view.contributors) < len(state.voter_set.awaited)  # an honest leader waits for half of them
    margin = state.settings.grace if is_hasty else -READY_SHARE * state.settings.grace
    return contributed_at <= view.started_at + margin
