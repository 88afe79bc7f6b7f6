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

from node.daemon.chain_sync import ChainReader, heads_along
from node.daemon.peer_rpc import ChannelTo
from node.daemon.swarm_view import peer_state
from node.dashboard.events import ChainForked, CommittedContribution, LoggedEvent, RoundCommitted, RoundsMissing
from node.dashboard.state import RunState
from node.loop.catch_up import best_head
from node.loop.swarm_snapshot import SwarmSnapshot
from protocol.consensus.chain import MAX_KEPT_COMMITS, ChainHead, genesis_head
from protocol.consensus.messages import Commit, ContributionLimits
from protocol.errors import MalformedError, PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.murmur_pb2 import PeerRecord

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64  # of one peer, for one stretch of the chain
MAX_SHOWN_LOSS = 1e6  # what is claimed beyond it would spoil every mean
AVOID_SECONDS = 10.0  # not to ask a peer that could not show the way to its head
RECENT_SECONDS = 5.0  # a round that was learned within so many is dated with the moment
LOOK_BACK_ROUNDS = (MAX_KEPT_COMMITS, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True)
class ChainStep:
    """A commit, and the heads before and after it."""

    before: ChainHead
    commit: Commit
    after: ChainHead


class ChainFollower:
    """`believed` names the next head; `fetch` brings the events that lead there."""

    def __init__(self, run_id: RunId, limits: ContributionLimits, channel: ChannelTo) -> None:
        self._run_id = run_id
        self._reader = ChainReader(run_id, limits, channel)
        self._last_fetch_at: float | None = None
        self._failed_at: dict[PeerId, float] = {}  # when it could not show the way

    def known_head(self, state: RunState) -> ChainHead:
        last = state.rows.last
        if last is None:
            return genesis_head(self._run_id)
        return ChainHead(last.round + 1, bytes.fromhex(last.digest), last.tokens)

    def find_trusted_head(
        self, state: RunState, trainers: Mapping[PeerId, PeerRecord], now: float
    ) -> tuple[ChainHead, list[PeerId]] | None:
        """The best head that is vouched for, if it is better than what is known; and who of those can be asked."""
        self._failed_at = {peer: since for peer, since in self._failed_at.items() if 0 <= now - since < AVOID_SECONDS}
        needed = 1 if len(trainers) < 3 else 2
        snapshot = SwarmSnapshot({peer: peer_state(record) for peer, record in trainers.items()})
        standing = snapshot.preferred_heads(self.known_head(state))
        vouched = [(head, peers) for head, peers in standing.items() if len(peers) >= needed]
        heads = {head: sorted(set(peers) - set(self._failed_at)) for head, peers in vouched}
        asked = {head: peers for head, peers in heads.items() if peers}
        return best_head(asked) if asked else None

    async def fetch_events(
        self, state: RunState, target: ChainHead, peers: Sequence[PeerId], now: float
    ) -> list[LoggedEvent]:
        """The events from what `state` knows to that head; none where nobody can tell it now, which is logged."""
        for peer in peers:
            try:
                steps = await self._fetch_steps(peer, self.known_head(state), target)
            except (UnreachableError, PeerFault) as error:
                logger.info("%s could not tell the rounds up to %d: %s", peer, target.round, error)
                self._failed_at[peer] = now
                continue
            recent = self._last_fetch_at is not None and now - self._last_fetch_at < RECENT_SECONDS
            self._last_fetch_at = now
            return _build_events(state, self.known_head(state), steps, now, recent)
        return []

    async def _fetch_steps(self, peer: PeerId, known: ChainHead, target: ChainHead) -> list[ChainStep]:
        """From our head where its log reaches so far and continues it; otherwise from as far back as it does."""
        starts = [known.round, *(target.round - back for back in LOOK_BACK_ROUNDS if target.round - back >= 0)]
        for start in dict.fromkeys([*starts, *([0] if target.round < MAX_KEPT_COMMITS else [])]):
            commits = await self._fetch_commits(peer, start, target)
            if not commits:
                continue
            steps = prove_chain(commits, target)
            if start == known.round and steps[0].before != known:
                continue  # another chain: look for where it left ours
            return steps
        raise StaleError("its log does not reach back far enough")

    async def _fetch_commits(self, peer: PeerId, start: int, target: ChainHead) -> list[Commit]:
        """Those of the rounds from `start` up to the target; empty where its log does not hold `start`."""
        found: list[Commit] = []
        for _ in range(MAX_REQUESTS):
            if start + len(found) >= target.round:
                break
            _, commits = await self._reader.read(peer, start + len(found))
            if not commits:
                break
            found += [commit.body for commit in commits]
        wanted = found[: target.round - start]
        in_order = all(commit.round == start + place for place, commit in enumerate(wanted))
        if wanted and not (in_order and len(wanted) == target.round - start):
            raise MalformedError("rounds that do not follow one another")
        return wanted


def prove_chain(commits: Sequence[Commit], target: ChainHead) -> list[ChainStep]:
    """Each with the heads around it. MalformedError unless they lead to `target`, by digest and by tokens."""
    tokens = target.tokens - sum(commit.tokens for commit in commits)
    if tokens < 0:
        raise MalformedError("commits with more tokens than their chain")
    start = ChainHead(commits[0].round, commits[0].base, tokens)
    heads = [start, *heads_along(start, commits)]
    if heads[-1] != target:
        raise MalformedError(f"commits that do not lead to the head of round {target.round}")
    return [ChainStep(heads[place], commit, heads[place + 1]) for place, commit in enumerate(commits)]


def _build_events(
    state: RunState, mine: ChainHead, steps: list[ChainStep], now: float, recent: bool
) -> list[LoggedEvent]:
    events: list[LoggedEvent] = []
    first = steps[0].before.round
    if first > mine.round:
        events.append(RoundsMissing(at=now, first=mine.round, last=first - 1))
    elif steps[0].before != mine:
        known = {row.round: row.digest for row in state.rows.recent(2 * MAX_KEPT_COMMITS)}
        steps = [step for step in steps if known.get(step.commit.round) != step.after.digest.hex()]
        events.append(ChainForked(at=now, round=steps[0].commit.round if steps else mine.round))
    for step in steps:
        dated = recent or step is steps[-1]
        events.append(_build_committed(state, step, now if dated else None))
    return events


def _build_committed(state: RunState, step: ChainStep, at: float | None) -> RoundCommitted:
    given = tuple(
        CommittedContribution(
            peer=one.sender,
            tokens=one.body.tokens,
            steps=one.body.steps,
            loss=max(-MAX_SHOWN_LOSS, min(one.body.loss, MAX_SHOWN_LOSS)),
            size=sum(blob.size for blob in one.body.parts),
        )
        for one in step.commit.contributions
    )
    return RoundCommitted(
        at=at,
        round=step.commit.round,
        base=step.before.digest.hex(),
        digest=step.after.digest.hex(),
        tokens=step.after.tokens,
        given=given,
        late=_find_late(state, {one.peer for one in given}) if at is not None else (),
    )


def _find_late(state: RunState, included: set[PeerId]) -> tuple[PeerId, ...]:
    """Who is there and has contributed before, but not to this round."""
    awaited = [peer for peer in state.trainers if peer.included_count and not peer.report.resting]
    return tuple(sorted(peer.report.peer for peer in awaited if peer.report.peer not in included))


def find_diverged(trainers: Mapping[PeerId, PeerRecord]) -> list[tuple[PeerId, int]]:
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
