"""The chain of commits as the host knows it: fetched from the peers, proved by their digests, told as events.

A head is believed when two trainers stand there (one, where there are fewer than three). What a peer then answers is
followed from commit to commit; it counts only if it leads to that very head, so no single peer can invent a round. Who
cannot show the way to where it says it stands is not asked for a while, so that it does not hide the others' head.
A host that was away asks for what it missed; where the logs do not reach back so far, it says which rounds are missing.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.daemon.calls import Channels, ask_chain
from node.daemon.catch_up import ahead, best
from node.host.events import Committed, Durable, Forked, Given, Missing
from node.host.state import State
from protocol.errors import MalformedError, PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import PeerRecord
from protocol.rounds.chain import KEPT_COMMITS, Head, after, genesis
from protocol.rounds.kinds import parse
from protocol.rounds.statements import Commit, Statement, Terms

logger = logging.getLogger(__name__)

MAX_ANSWERS = 64  # of one peer, for one stretch of the chain
MAX_LOSS = 1e6  # what is claimed beyond it would spoil every mean
AVOID_SECONDS = 10.0  # not to ask a peer that could not show the way to its head
RECENT_SECONDS = 5.0  # a round that was learned within so many is dated with the moment
BACKWARDS = (KEPT_COMMITS, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class Step:
    """A commit, and the heads before and after it."""

    before: Head
    commit: Commit
    after: Head


class Chronicle:
    """`believed` names the next head; `fetch` brings the events that lead there."""

    def __init__(self, run_id: RunId, terms: Terms, channel: Channels) -> None:
        self._run_id = run_id
        self._terms = terms
        self._channel = channel
        self._followed: float | None = None
        self._failed: dict[PeerId, float] = {}  # when it could not show the way

    def head(self, state: State) -> Head:
        last = state.rows.last
        if last is None:
            return genesis(self._run_id)
        return Head(last.round + 1, bytes.fromhex(last.digest), last.tokens)

    def believed(
        self, state: State, trainers: Mapping[PeerId, PeerRecord], now: float
    ) -> tuple[Head, list[PeerId]] | None:
        """The best head that is vouched for, if it is better than what is known; and who of those can be asked."""
        self._failed = {peer: since for peer, since in self._failed.items() if 0 <= now - since < AVOID_SECONDS}
        needed = 1 if len(trainers) < 3 else 2
        standing = ahead(self.head(state), trainers)
        vouched = [(head, peers) for head, peers in standing.items() if len(peers) >= needed]
        heads = {head: sorted(set(peers) - set(self._failed)) for head, peers in vouched}
        asked = {head: peers for head, peers in heads.items() if peers}
        return best(asked) if asked else None

    async def fetch(self, state: State, target: Head, peers: Sequence[PeerId], now: float) -> list[Durable]:
        """The events from what `state` knows to that head; none where nobody can tell it now, which is logged."""
        for peer in peers:
            try:
                steps = await self._steps(peer, self.head(state), target)
            except (UnreachableError, PeerFault) as error:
                logger.info("%s could not tell the rounds up to %d: %s", peer, target.round, error)
                self._failed[peer] = now
                continue
            recent = self._followed is not None and now - self._followed < RECENT_SECONDS
            self._followed = now
            return _events(state, self.head(state), steps, now, recent)
        return []

    async def _steps(self, peer: PeerId, mine: Head, target: Head) -> list[Step]:
        """From our head where its log reaches so far and continues it; otherwise from as far back as it does."""
        starts = [mine.round, *(target.round - back for back in BACKWARDS if target.round - back >= 0)]
        for start in dict.fromkeys([*starts, *([0] if target.round < KEPT_COMMITS else [])]):
            commits = await self._commits(peer, start, target)
            if not commits:
                continue
            steps = proved(commits, target)
            if start == mine.round and steps[0].before != mine:
                continue  # another chain: look for where it left ours
            return steps
        raise StaleError("its log does not reach back far enough")

    async def _commits(self, peer: PeerId, start: int, target: Head) -> list[Commit]:
        """Those of the rounds from `start` up to the target; empty where its log does not hold `start`."""
        found: list[Commit] = []
        for _ in range(MAX_ANSWERS):
            if start + len(found) >= target.round:
                break
            reply = await ask_chain(self._run_id, self._channel, peer, start + len(found))
            statements = [parse(signed, self._run_id, self._terms) for signed in reply.commits[:KEPT_COMMITS]]
            if not statements:
                break
            found += [_commit(statement) for statement in statements]
        commits = found[: target.round - start]
        in_order = all(commit.round == start + place for place, commit in enumerate(commits))
        if commits and not (in_order and len(commits) == target.round - start):
            raise MalformedError("rounds that do not follow one another")
        return commits


def proved(commits: Sequence[Commit], target: Head) -> list[Step]:
    """Each with the heads around it. MalformedError unless they lead to `target`, by digest and by tokens."""
    tokens = target.tokens - sum(commit.tokens for commit in commits)
    if tokens < 0:
        raise MalformedError("commits with more tokens than their chain")
    head, steps = Head(commits[0].round, commits[0].base, tokens), []
    for commit in commits:
        try:
            following = after(head, commit)
        except StaleError as fault:
            raise MalformedError(f"commits that do not follow one another: {fault}") from fault
        steps.append(Step(head, commit, following))
        head = following
    if head != target:
        raise MalformedError(f"commits that do not lead to the head of round {target.round}")
    return steps


def _commit(statement: Statement[object]) -> Commit:
    if not isinstance(statement.body, Commit):
        raise MalformedError("a chain of something else than commits")
    return statement.body


def _events(state: State, mine: Head, steps: list[Step], now: float, recent: bool) -> list[Durable]:
    events: list[Durable] = []
    first = steps[0].before.round
    if first > mine.round:
        events.append(Missing(at=now, first=mine.round, last=first - 1))
    elif steps[0].before != mine:
        known = {row.round: row.digest for row in state.rows.recent(2 * KEPT_COMMITS)}
        steps = [step for step in steps if known.get(step.commit.round) != step.after.digest.hex()]
        events.append(Forked(at=now, round=steps[0].commit.round if steps else mine.round))
    for step in steps:
        dated = recent or step is steps[-1]
        events.append(_committed(state, step, now if dated else None))
    return events


def _committed(state: State, step: Step, at: float | None) -> Committed:
    given = tuple(
        Given(
            peer=one.sender,
            tokens=one.body.tokens,
            steps=one.body.steps,
            loss=max(-MAX_LOSS, min(one.body.loss, MAX_LOSS)),
            size=sum(blob.size for blob in one.body.parts),
        )
        for one in step.commit.contributions
    )
    return Committed(
        at=at,
        round=step.commit.round,
        base=step.before.digest.hex(),
        digest=step.after.digest.hex(),
        tokens=step.after.tokens,
        given=given,
        late=_late(state, {one.peer for one in given}) if at is not None else (),
    )


def _late(state: State, included: set[PeerId]) -> tuple[PeerId, ...]:
    """Who is there and has contributed before, but not to this round."""
    awaited = [peer for peer in state.trainers if peer.given and not peer.now.resting]
    return tuple(sorted(peer.now.peer for peer in awaited if peer.now.peer not in included))


def strays(trainers: Mapping[PeerId, PeerRecord]) -> list[tuple[PeerId, int]]:
    """Who holds another state than most of those at the same point of the chain, where there are three or more."""
    found: list[tuple[PeerId, int]] = []
    by_head: dict[bytes, dict[PeerId, PeerRecord]] = {}
    for peer, record in trainers.items():
        if record.digest and record.state_digest:
            by_head.setdefault(record.digest, {})[peer] = record
    for group in by_head.values():
        state, count = Counter(record.state_digest for record in group.values()).most_common(1)[0]
        if len(group) >= 3 and 2 * count > len(group):
            found += [(peer, record.round) for peer, record in group.items() if record.state_digest != state]
    return found
