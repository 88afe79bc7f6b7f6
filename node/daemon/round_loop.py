"""One peer's part in a run: rounds one after the other, catching up where it is behind, the trainer kept in step.

The loop is the same for a newcomer, a peer that was away and one on the lesser of two chains: whoever sees a chain
that is to be preferred goes there; otherwise it opens the next round, and applies what the round decides. A message of
the trainer is offered until a round takes it. Nothing here blocks the trainer: it trains on while all this happens.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from node.daemon.chain_sync import ChainSyncClient, SyncPlan, best_head, find_preferred_heads, should_sync
from node.daemon.checkpointer import RETAINED_ROUNDS, Checkpointer
from node.daemon.downloads import Downloads
from node.daemon.effects import Effects
from node.daemon.outer_state import ReplicatedState, SignedContributions
from node.daemon.swarm_view import SwarmView
from node.daemon.trainer_link import TrainerLink
from node.from_manifest import topology_class
from node.ipc.channel import ContributionOutcome
from node.monitoring.status_reporter import StatusReporter
from node.units import format_bytes
from optim.method import Method
from protocol.consensus.chain import ChainHead, is_state_outvoted
from protocol.consensus.messages import Commit, ContributionLimits, Digest, SignedMessage
from protocol.consensus.pacing import Pacing
from protocol.consensus.topology import AppliedContributions
from protocol.errors import GoneError, MissingFileError, PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import Manifest

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
MIN_STATE_SECONDS = 15.0  # to fetch a state, and a second more for each of so many bytes
MIN_BYTES_PER_SECOND = 1_000_000
MAX_VANISHED_STATES = 5  # states in a row that nobody had any more, by the time they were fetched
AVOID_SECONDS = 60.0  # not to follow a peer that could not show us the way to its head


@dataclass(kw_only=True)
class RoundLoop:
    """`foreseen`, `decided`, `offer`, `broken` and `wake` are called from outside; everything else happens in `run`."""

    manifest: Manifest
    method: Method
    terms: ContributionLimits
    members: SwarmView
    driver: Effects
    wishes: Downloads
    scout: ChainSyncClient
    trainer: TrainerLink
    keeper: Checkpointer
    standing: StatusReporter
    replica: ReplicatedState
    share: Callable[[Commit], SignedContributions]
    pacing: Pacing
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    _decided: SignedMessage[Commit] | None = None
    _fault: BaseException | None = None
    _avoided: dict[PeerId, float] = field(default_factory=dict)
    _ahead_since: float | None = None
    _replay_failed: bool = False
    _gone: int = 0
    _differing: Digest | None = None  # the state of ours that was found to differ

    def foreseen(self, commit: Commit) -> None:
        """From the round driver, once all of it is here."""
        self.replica.speculate(commit, self.share(commit))

    def decided(self, commit: SignedMessage[Commit]) -> None:
        """From the round driver."""
        self._decided = commit
        self.wake.set()

    def broken(self, error: BaseException) -> None:
        """A fault in our own code, somewhere in the background: `run` ends with it."""
        self._fault = self._fault or error
        self.wake.set()

    def offer(self) -> None:
        """Give the trainer's message, if there is one, to the open round."""
        offer, chain = self.trainer.contributions.pending, self.replica.chain
        if offer is not None and self.driver.is_open and self.driver.number == chain.round:
            self.standing.set_phase("exchanging")
            steps = offer.header.steps if offer.header.round == chain.round else None
            self.driver.offer(offer.to_contribution(chain.head, self.terms), steps)

    @property
    def is_target_reached(self) -> bool:
        target, head = self.manifest.target, self.replica.chain.head
        return bool(
            (target.rounds is not None and head.round >= target.rounds)
            or (target.tokens is not None and head.tokens >= target.tokens)
        )

    async def run(self) -> None:
        """Until the target is reached."""
        await self._join()
        await self.trainer.start(self.replica.chain.round, self._shared())
        await self._assemble()
        while not self.is_target_reached:
            self._raise_fault()
            if self._decided is not None:
                await self._take_decided()
            elif self._must_catch_up():
                self.driver.close()
                await self._catch_up()
            elif not self.driver.is_open:
                self._open_round()
            else:
                await self._look()
        self.driver.close()
        self.standing.set_phase("training", "the target is reached")

    async def _join(self) -> None:
        """A newcomer with somebody to ask asks first: what it would train alone is of little use."""
        self.standing.set_phase("joining", "looking for the peers of the run")
        while self.replica.chain.round == 0 and self.members.has_contacts and not self.members.other_records():
            await self._look()
        while self._heads():
            await self._catch_up()

    async def _assemble(self) -> None:
        """Wait until enough peers are there; a run that has begun waits only a while for those it had."""
        needed, loop = self.manifest.run.min_peers, asyncio.get_running_loop()
        patience_ends = loop.time() + self.manifest.membership.expiry
        while (present := len(self.members.trainers())) < needed:
            if self.replica.chain.round > 0 and loop.time() > patience_ends:
                break
            reason = f"{present} of {needed} peers are here; the run begins with {needed}"
            self.standing.set_phase("waiting for peers", reason)
            if self._heads():
                await self._catch_up()
            else:
                await self._look()

    async def _look(self) -> None:
        """Wait for news, or a little."""
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self.wake.wait()
        except TimeoutError:
            return
        finally:
            self.wake.clear()
            self._raise_fault()

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _open_round(self) -> None:
        self.standing.set_phase("training")
        self.driver.begin(self.replica.chain.round, self.replica.chain.digest, self.members.trainers())
        self.offer()

    async def _take_decided(self) -> None:
        """A decided round: get what is missing, apply it; where that fails, the state is fetched later."""
        commit, self._decided = self._decided, None
        assert commit is not None
        try:
            await self._apply(commit)
        except (UnreachableError, PeerFault, MissingFileError) as error:
            line = f"round {commit.body.round} is decided but cannot be applied here: {error}"
            self.standing.record_recovered("not applied", line)
            self.standing.set_miss_reason(str(error))
            await self._look()

    async def _apply(self, commit: SignedMessage[Commit]) -> None:
        self.driver.check(commit.body)
        share = await self._obtain(commit.body)
        state = await self.replica.compute_next(commit, share)
        fate = self.trainer.on_commits([commit.body], commit.body.round + 1)
        await self.trainer.apply_anchor(commit.body.round + 1, state.shared_vectors(self.method))
        await self.replica.advance(commit, state)
        await self.keeper.wait_until_announceable(self.replica)
        self.standing.record_applied(AppliedContributions.of(share), self.replica.step_scale(commit.body, share))
        self._tell([commit.body], fate)
        await self._keep([commit.body])

    async def _obtain(self, commit: Commit) -> SignedContributions:
        """What of a commit is for us, with its blobs in the store."""
        share, seconds = self.share(commit), self.manifest.round.exchange_timeout
        if not topology_class(self.method).may_skip_lost:
            await self.wishes.download_from_anyone(seconds, *commit.blobs)
            return share
        held = []
        for entry in share:
            try:
                await self.wishes.download_from_anyone(seconds, entry.body.parts[0])
                held.append(entry)
            except (UnreachableError, MissingFileError) as error:  # it may have died with its owner, our partner
                line = f"round {commit.round} is applied here without {entry.sender}: {error}"
                self.standing.record_recovered("partner lost", line)
        return tuple(held)

    def _tell(self, commits: list[Commit], fate: ContributionOutcome) -> None:
        """A new state is in place: tell people and the others."""
        replica, self._ahead_since = self.replica, None
        self.standing.record_rounds(replica.chain.head, replica.blob.digest, commits, fate)
        self.members.announce_head(replica.chain.head, replica.blob.digest)

    async def _keep(self, commits: list[Commit]) -> None:
        """And the disk; the trainer has it."""
        replica = self.replica
        self.standing.set_pace(self.pacing.describe(replica.chain.round))
        await self.keeper.retain_state(replica.blob)
        async with self.trainer.submit_lock:
            self.keeper.prune_blobs(self.trainer.contributions, commits)
        await self.keeper.save_in_background(replica, self.trainer.contributions)

    def _shared(self) -> list[Tensor]:
        """The vectors that the trainer takes over."""
        return self.replica.state.shared_vectors(self.method)

    def _heads(self) -> dict[ChainHead, list[PeerId]]:
        """Where others are that we could follow, and who."""
        records = self.members.other_records()
        followed = {peer: record for peer, record in records.items() if peer in self._not_avoided(records)}
        return find_preferred_heads(self.replica.chain.head, followed)

    def _not_avoided(self, peers: Iterable[PeerId]) -> list[PeerId]:
        now = asyncio.get_running_loop().time()
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        return [peer for peer in peers if peer not in self._avoided]

    def _must_catch_up(self) -> bool:
        """Whether others are ahead, and the commit that they have does not come by itself."""
        if self._state_is_wrong():
            return True
        heads = self._heads()
        if not heads:
            self._ahead_since = None
            return False
        now = asyncio.get_running_loop().time()
        self._ahead_since = self._ahead_since or now
        return should_sync(self.replica.chain.head, best_head(heads)[0], now - self._ahead_since)

    def _state_is_wrong(self) -> bool:
        if not topology_class(self.method).has_shared_state:
            return False  # everyone has a state of its own
        votes = {peer: (record.digest, record.state_digest) for peer, record in self.members.other_records().items()}
        voting = {peer: vote for peer, vote in votes.items() if vote[1]}
        return is_state_outvoted(self.replica.chain.digest, self.replica.blob.digest, voting)

    async def _catch_up(self) -> None:
        replace, heads = self._state_is_wrong(), self._heads()
        if replace:
            head = self.replica.chain.head
            self._tell_difference(head)
            peers = self._not_avoided(self.members.state_holders(head, self.replica.blob.digest))
        else:
            self.standing.set_phase("catching up", "others are ahead")
            head, peers = best_head(heads) if heads else (self.replica.chain.head, [])
        if not peers:
            return await self._look()
        # The blobs of long ago are gone, and one state costs no more than many rounds.
        replay = not (replace or self._replay_failed) and head.round - self.replica.chain.round <= RETAINED_ROUNDS
        try:
            await self._follow(await self.scout.plan_sync(peers[0], replay, self._offered_since()), peers)
            self._replay_failed = False
            self._gone = 0
        except (UnreachableError, PeerFault, MissingFileError) as error:
            self.standing.record_recovered("way lost", f"cannot follow {peers[0]} to round {head.round}: {error}")
            self._gone = self._gone + 1 if isinstance(error, GoneError) and not replay else 0
            if 0 < self._gone < MAX_VANISHED_STATES:
                return  # they went on meanwhile, and are asked again where to
            self._replay_failed = replay
            if not replay:
                self._avoided[peers[0]] = asyncio.get_running_loop().time() + AVOID_SECONDS
            await self._look()

    def _tell_difference(self, head: ChainHead) -> None:
        """Of each state of ours once, however often its better is asked for."""
        self.standing.set_phase("catching up", "our state differs from the others'; fetching theirs")
        if self._differing != self.replica.blob.digest:
            self._differing = self.replica.blob.digest
            self.standing.record_recovered(
                "state differs", f"ours is another than the others' after round {head.round}"
            )
            self.standing.set_miss_reason("our state differed from the others'")

    def _offered_since(self) -> int:
        """The first round that may have taken one of our last messages."""
        return self.trainer.contributions.history_needed_since(self.replica.chain.round)

    async def _follow(self, way: SyncPlan, holders: Sequence[PeerId]) -> None:
        """Replay the rounds that we missed, or take over another state, which the holders have, or had a moment ago."""
        if way.state is not None:
            before = self.replica.chain.head
            self._tell_way(f"fetching the state of round {way.head.round} ({format_bytes(way.state.size)})")
            seconds = MIN_STATE_SECONDS + way.state.size / MIN_BYTES_PER_SECOND
            await self.wishes.download_from_holders(way.state, seconds, holders)
            await self.replica.install_state(way.head, way.state, way.commits)
            self.standing.reset_validation(way.head)
            self.standing.record_catch_up("skipped", max(0, way.head.round - before.round))
            commits = [commit.body for commit in way.commits]
            verdict = self.trainer.on_fork(commits, way.head.round, before)
            self.standing.record_revised(verdict.revised)
            fresh = [commit for commit in commits if commit.round >= before.round]
            await self.trainer.apply_anchor(way.head.round, self._shared())
            await self._keep(fresh)
            await self.keeper.wait_until_saved()  # a kill would take back all rounds that were skipped
            self._tell(fresh, verdict.outcome)
        else:
            self._tell_way(f"replaying {len(way.commits)} rounds from round {self.replica.chain.round} on")
            for commit in way.commits:
                await self._apply(commit)
                self.standing.record_catch_up("replayed", 1)

    def _tell_way(self, text: str) -> None:
        logger.info("%s", text)
        self.standing.set_phase("catching up", text)
