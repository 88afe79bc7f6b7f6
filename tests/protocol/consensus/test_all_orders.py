"""All orders of messages of a small round: four voters, one of whom lies, and two views.

A message stays under way for ever and may arrive at any time or never, so the honest voters' own histories say what has
been said. The liar acknowledges, confirms and promises anything, and shows any promises and locks that exist. What a
leader has to repeat and what a quorum is, the product's own rules say.
"""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from itertools import combinations, product

import pytest

from protocol.consensus.locks import NO_BOUNDS, Bounds, Vote, newest_confirmed, required_contents
from protocol.electorate import OPEN, Electorate

VOTERS = 4
HONEST = 3
VIEWS = 2
CONTENTS = (b"X", b"Y")
ELECTORATE = Electorate(OPEN, 1, frozenset("abcd"))
QUORUM, TOLERATED = ELECTORATE.quorum_size(VOTERS), ELECTORATE.tolerated_liars(VOTERS)
Required = Callable[[tuple[Bounds, ...], int], Set[bytes] | None]


@dataclass(frozen=True)
class Voter:
    """What an honest voter has done: by view what it acknowledged and confirmed; its promise to a later view."""

    view: int = 0
    acknowledged: tuple[bytes | None, ...] = (None,) * VIEWS
    confirmed: tuple[bytes | None, ...] = (None,) * VIEWS

    def key(self) -> str:
        return repr(self)

    def bounds(self, view: int) -> Bounds:
        """Return the promise to a view, which names what was done before."""
        return Bounds(*(_newest(done[:view]) for done in (self.acknowledged, self.confirmed)))


def _newest(done: tuple[bytes | None, ...]) -> Vote | None:
    votes = [Vote(content, view, content) for view, content in enumerate(done) if content is not None]
    return votes[-1] if votes else None


State = tuple[Voter, ...]


def count(state: State, done: str, view: int, content: bytes) -> int:
    """Count the voters that did something, with the liar."""
    return TOLERATED + len([voter for voter in state if getattr(voter, done)[view] == content])


def is_locked(state: State, view: int, content: bytes) -> bool:
    return count(state, "acknowledged", view, content) >= QUORUM


def decided(state: State, one_phase: bool) -> set[bytes]:
    """Return the contents that somebody may know to be decided."""
    found = set()
    for view, content in product(range(VIEWS), CONTENTS):
        acknowledged, confirmed = (count(state, done, view, content) for done in ("acknowledged", "confirmed"))
        if acknowledged == VOTERS or confirmed >= QUORUM or (one_phase and acknowledged >= QUORUM):
            found.add(content)
    return found


def promises_of_liar(state: State, view: int) -> Iterator[Bounds]:
    """Yield all that the liar may say: it confirms only where there is a lock, because the leader has to show it."""
    votes = [Vote(content, earlier, content) for earlier in range(view) for content in CONTENTS]
    locks = [vote for vote in votes if is_locked(state, vote.view, vote.content)]
    for pair in product((None, *votes), (None, *locks)):
        yield Bounds(*pair)


def justified(state: State, view: int, required: Required) -> set[bytes]:
    """Return the contents for which some promises of a quorum to a view speak."""
    if view == 0:
        return set(CONTENTS)
    found: set[bytes] = set()
    for shown in shown_promises(state, view):
        contents = required((*shown.honest.values(), *shown.lies), TOLERATED)
        found |= set(CONTENTS) if contents is None else contents
    return found


@dataclass(frozen=True)
class Shown:
    """The promises that a leader shows: of honest voters, by their places in the state, and of the liar."""

    honest: dict[int, Bounds]
    lies: tuple[Bounds, ...] = ()


def shown_promises(state: State, view: int) -> Iterator[Shown]:
    """Yield all promises of a quorum to a view that a leader can show."""
    joined = {index: voter.bounds(view) for index, voter in enumerate(state) if voter.view >= view}
    for size in range(QUORUM - 1, len(joined) + 1):
        for chosen in combinations(joined, size):
            honest = {index: joined[index] for index in chosen}
            if size >= QUORUM:
                yield Shown(honest)
            for lie in promises_of_liar(state, view):
                yield Shown(honest, (lie,))


def next_states(state: State, leaders: tuple[bool, ...], required: Required) -> Iterator[State]:
    """Yield what may happen next; `leaders`: by view, whether the liar leads."""
    for index in range(len(state)):
        for step in steps_of(state, index, leaders, required):
            yield tuple(sorted((*state[:index], step, *state[index + 1 :]), key=Voter.key))


def steps_of(state: State, index: int, leaders: tuple[bool, ...], required: Required) -> list[Voter]:
    """Return what one of the voters may do next."""
    voter, steps = state[index], list[Voter]()
    view = voter.view
    if view + 1 < VIEWS:
        steps.append(replace(voter, view=view + 1))
    if voter.acknowledged[view] is None:
        allowed = justified(state, view, required)
        if not leaders[view]:  # an honest leader proposes one content
            made = {other.acknowledged[view] for other in state} - {None}
            allowed = allowed & made if made else allowed
        steps += [_do(voter, "acknowledged", content) for content in allowed]
    if voter.confirmed[view] is None:
        steps += [_do(voter, "confirmed", content) for content in CONTENTS if is_locked(state, view, content)]
    return steps


def _do(voter: Voter, done: str, content: bytes) -> Voter:
    values: tuple[bytes | None, ...] = getattr(voter, done)
    changed = *values[: voter.view], content, *values[voter.view + 1 :]
    return replace(voter, acknowledged=changed) if done == "acknowledged" else replace(voter, confirmed=changed)


def reachable(leaders: tuple[bool, ...], required: Required) -> Iterator[State]:
    """Yield every state to which some order of messages leads, once."""
    start = (Voter(),) * HONEST
    known, waiting = {start}, [start]
    while waiting:
        state = waiting.pop()
        yield state
        fresh = set(next_states(state, leaders, required)) - known
        known |= fresh
        waiting += fresh


def second_decision(leaders: tuple[bool, ...], required: Required, one_phase: bool = False) -> tuple[State | None, int]:
    """Return a state in which two contents are decided, if any order leads there, and how many were looked at."""
    count = 0
    for state in reachable(leaders, required):
        count += 1
        if len(decided(state, one_phase)) > 1:
            return state, count
    return None, count


LEADERS = list(product((True, False), repeat=VIEWS))


@pytest.mark.parametrize("leaders", LEADERS, ids=str)
def test_no_order_of_messages_decides_two_contents(leaders: tuple[bool, ...]) -> None:
    found, states = second_decision(leaders, required_contents)
    assert found is None and states > 100


def forgets(shown: tuple[Bounds, ...], tolerated: int) -> Set[bytes] | None:
    """Let a leader forget everything."""
    return None


def repeats_the_newest(shown: tuple[Bounds, ...], tolerated: int) -> Set[bytes] | None:
    """Repeat the newest acknowledged proposal of any promise, as Paxos does where nobody lies."""
    votes = [bounds.acknowledged for bounds in shown if bounds.acknowledged is not None]
    return {max(votes, key=lambda vote: vote.view).content} if votes else None


def ignores_acknowledgements(shown: tuple[Bounds, ...], tolerated: int) -> Set[bytes] | None:
    """Repeat what is confirmed alone, although the acknowledgements of all decide."""
    lock = newest_confirmed(shown)
    return None if lock is None else {lock.content}


@pytest.mark.parametrize("required", [forgets, repeats_the_newest, ignores_acknowledgements])
def test_other_rules_decide_two_contents(required: Required) -> None:
    assert second_decision((True, True), required)[0] is not None


@pytest.mark.parametrize("required", [forgets, repeats_the_newest, required_contents])
def test_one_phase_decides_two_contents_whatever_a_leader_has_to_repeat(required: Required) -> None:
    assert second_decision((True, True), required, one_phase=True)[0] is not None


def test_members_of_a_view_promise_what_they_did_before() -> None:
    voter = _do(replace(_do(Voter(), "acknowledged", b"X"), view=1), "acknowledged", b"Y")
    assert voter.bounds(1) == Bounds(Vote(b"X", 0, b"X")) and Voter().bounds(1) == NO_BOUNDS
