"""The chain of commits as the host knows it: fetched from peers, proved by digests, recorded as events.

The follower looks at a head when two trainers report it (one, if there are fewer than three trainers). It then fetches
the commits from one of them and accepts them only if they lead to exactly that head and voters certified each of them,
so nobody without votes can invent a round. A peer that cannot prove the head that it reports is not asked for a while,
so that it does not hide the head of the others. A host that was away fetches the rounds that it missed; if the peers'
logs do not reach back far enough, it records which rounds are missing.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.daemon.peers.chain_sync import ChainReader
from node.daemon.peers.peer_rpc import ChannelTo
from node.daemon.peers.swarm_view import peer_states
from node.dashboard.events import (
    ChainForked,
    CommittedContribution,
    CountedGroups,
    LoggedEvent,
    RoundCommitted,
    RoundsMissing,
)
from node.dashboard.state import RunState
from node.loop.peers.catch_up import best_head
from node.loop.peers.swarm_snapshot import SwarmSnapshot
from protocol.consensus.chain import MAX_KEPT_COMMITS, CertifiedCommit, Chain, ChainHead, ChainLog, genesis_head
from protocol.consensus.fork_choice import ChainOffer, LocalEvidence, is_certified
from protocol.consensus.messages.contributions import Commit, ContributionLimits
from protocol.consensus.messages.signed import Digest
from protocol.electorate import OPEN, Electorate
from protocol.errors import MalformedError, PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.manifest.sections import AdmissionSection
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.stage import StageManifest
from protocol.rollout_credits import add_credits

logger = logging.getLogger(__name__)

MAX_SHOWN_LOSS = 1e6  # larger claims would spoil every mean
AVOID_SECONDS = 10.0  # do not ask a peer again that could not prove its head
RECENT_SECONDS = 5.0  # rounds that arrive within this time of the last fetch are dated with the current time


def shown_manifest(manifest: Manifest) -> Manifest:
    """Return the manifest of the chain that a page shows: of a pipeline, the last stage, which has losses."""
    table = manifest.pipeline
    return StageManifest.of(manifest, table.stages - 1) if table.is_cut else manifest


@dataclass(frozen=True)
class ChainStep:
    """A commit with its certificate, the electorate before it, and the chain heads before and after it."""

    before: ChainHead
    electorate: Electorate
    entry: CertifiedCommit
    after: ChainHead

    @property
    def commit(self) -> Commit:
        return self.entry.body


class ChainFollower:
    """Follows the trusted chain: `find_trusted_head` picks the next head, `fetch_steps` the commits up to it.

    `local_chains` are those of peers in this process, which are not asked over the network.
    """

    def __init__(
        self,
        run_id: RunId,
        limits: ContributionLimits,
        channel: ChannelTo,
        local_chains: Mapping[PeerId, Chain] | None = None,
        rule: AdmissionSection = OPEN,
    ) -> None:
        self._run_id = run_id
        self._local_chains = local_chains or {}
        self._reader = ChainReader(run_id, limits, channel, rule)
        self._last_fetch_at: float | None = None
        self._verified: dict[Digest, Electorate] = {}  # the electorate at the last head that we verified
        self._live: frozenset[PeerId] = frozenset()
        self._failed_at: dict[PeerId, float] = {}  # when a peer last failed to prove its head

    def find_trusted_head(
        self, known: ChainHead, trainers: Mapping[PeerId, PeerRecord], now: float
    ) -> tuple[ChainHead, list[PeerId]] | None:
        """Return the best trusted head and peers that can prove it; `None` if it is not better than the known head."""
        self._failed_at = {peer: since for peer, since in self._failed_at.items() if 0 <= now - since < AVOID_SECONDS}
        needed = 1 if len(trainers) < 3 else 2
        self._live = frozenset(trainers)
        heads = SwarmSnapshot(peer_states(trainers)).peers_by_head
        better = {head: peers for head, peers in heads.items() if head.tokens > known.tokens}
        trusted = [(head, peers) for head, peers in better.items() if len(peers) >= needed]
        sources = {head: sorted(set(peers) - set(self._failed_at)) for head, peers in trusted}
        provable = {head: peers for head, peers in sources.items() if peers}
        return best_head(provable) if provable else None

    async def fetch_steps(
        self, known: ChainHead, target: ChainHead, peers: Sequence[PeerId], now: float
    ) -> list[ChainStep]:
        """Return the commits from the known head to `target`; logs each failure and returns none if all peers fail."""
        for peer in peers:
            try:
                return await self._fetch_steps(peer, known, target)
            except (UnreachableError, PeerFault) as error:
                logger.debug("%s could not prove the chain up to round %d: %s", peer, target.round, error)
                self._failed_at[peer] = now
        return []

    def build_events(self, state: RunState, steps: Sequence[ChainStep], now: float) -> list[LoggedEvent]:
        """Return the events that bring `state` to the end of the steps; the rounds of a long absence have no date."""
        recent = self._last_fetch_at is not None and now - self._last_fetch_at < RECENT_SECONDS
        self._last_fetch_at = now
        return _build_events(state, known_head(self._run_id, state), steps, now, recent)

    async def _fetch_steps(self, peer: PeerId, known: ChainHead, target: ChainHead) -> list[ChainStep]:
        """Return steps from our head if the peer's log continues it, otherwise from as far back as its log reaches."""
        for start in (known.round, max(0, target.round - MAX_KEPT_COMMITS)):
            log = await self._fetch_log(peer, start, target)
            if not log.commits:
                continue
            steps = prove_chain(log, target)
            if start == known.round and steps[0].before != known:
                continue  # another chain: find the round where it forked from ours
            self._require_certified(steps)
            return steps
        raise StaleError("the peer's log does not reach back far enough")

    async def _fetch_log(self, peer: PeerId, start: int, target: ChainHead) -> ChainLog:
        """Return the commits from round `start` up to the target, or the oldest that the peer keeps."""
        if (own := self._local_chains.get(peer)) is not None:
            log = own.log_since(min(start, own.round)) or own.log
        else:
            log = (await self._reader.read(peer, start)).log
        return ChainLog(log.electorate, tuple(entry for entry in log.commits if entry.body.round < target.round))

    def _require_certified(self, steps: Sequence[ChainStep]) -> None:
        """Raise MalformedError unless voters certified the commits after the last head that we verified."""
        for step in steps:
            if self._verified.get(step.before.digest, step.electorate).digest != step.electorate.digest:
                raise MalformedError(f"the chain names other voters after round {step.before.round} than before")
            witnesses = LocalEvidence("", self._live)  # before the first commit nobody has a vote
            if step.electorate.voters and not is_certified(step.entry, step.electorate, witnesses):
                raise MalformedError(f"round {step.commit.round} is not certified")
        last = steps[-1]
        self._verified = {last.after.digest: last.electorate.after(last.commit)}


def known_head(run_id: RunId, state: RunState) -> ChainHead:
    """Return the head of the chain in `state`."""
    last = state.rows.last
    return genesis_head(run_id) if last is None else ChainHead(last.round + 1, bytes.fromhex(last.digest), last.tokens)


def prove_chain(log: ChainLog, target: ChainHead) -> list[ChainStep]:
    """Return each commit with the heads around it.

    Raises MalformedError unless the commits lead to `target` by digest and by tokens.
    """
    heads = ChainOffer(log, target).heads
    if heads[-1] != target:
        raise MalformedError(f"the commits do not lead to the head of round {target.round}")
    along = zip(heads, log.electorates, log.commits, heads[1:], strict=False)
    return [ChainStep(*step) for step in along]


def _build_events(
    state: RunState, own_head: ChainHead, steps: Sequence[ChainStep], now: float, recent: bool
) -> list[LoggedEvent]:
    events: list[LoggedEvent] = []
    known = {row.round: row.digest for row in state.rows.recent(2 * MAX_KEPT_COMMITS)}
    new_steps = [step for step in steps if known.get(step.commit.round) != step.after.digest.hex()]
    if not new_steps:
        return []
    first = new_steps[0].before
    if first.round > own_head.round:
        events.append(RoundsMissing(at=now, first=own_head.round, last=first.round - 1))
    elif first != own_head:
        events.append(ChainForked(at=now, round=first.round))
    for step in new_steps:
        dated = recent or step is new_steps[-1]
        events.append(_build_committed(state, step, now if dated else None))
    return events


def _build_committed(state: RunState, step: ChainStep, at: float | None) -> RoundCommitted:
    contributions = tuple(
        CommittedContribution(
            peer=contribution.sender,
            tokens=step.commit.counted_tokens[contribution.sender],
            steps=contribution.body.steps,
            loss=max(-MAX_SHOWN_LOSS, min(contribution.body.loss, MAX_SHOWN_LOSS)),
            size=sum(blob.size for blob in contribution.body.parts),
        )
        for contribution in step.commit.contributions
    )
    drawn = add_credits(*step.commit.counted_credits.values())
    return RoundCommitted(
        at=at,
        round=step.commit.round,
        base=step.before.digest.hex(),
        digest=step.after.digest.hex(),
        tokens=step.after.tokens,
        given=contributions,
        drawn=tuple(CountedGroups(peer=maker, groups=groups, tokens=tokens) for maker, groups, tokens in drawn),
        late=_find_late(state, {contribution.peer for contribution in contributions}) if at is not None else (),
    )


def _find_late(state: RunState, included: set[PeerId]) -> tuple[PeerId, ...]:
    """Return the trainers that contributed before and are not resting, but are missing in this round."""
    expected = [peer for peer in state.chain_trainers if peer.included_count and not peer.report.resting]
    return tuple(sorted(peer.report.peer for peer in expected if peer.report.peer not in included))


def find_diverged(trainers: Mapping[PeerId, PeerRecord]) -> list[tuple[PeerId, int]]:
    """Return the trainers, with their round, whose state differs from the majority at the same chain head.

    A head counts only if at least three trainers report it.
    """
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
