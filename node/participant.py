"""One peer's part in a run: rounds one after the other, catching up where it is behind, the trainer kept in step.

The loop is the same for a newcomer, a peer that was away and one on the lesser of two chains: whoever sees a chain
that is to be preferred goes there; otherwise it opens the next round, and applies what the round decides. A message of
the trainer is offered until a round takes it. Nothing here blocks the trainer: it trains on while all this happens.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from node import catch_up
from node.keeper import Keeper
from node.membership import Members
from node.replica import OuterState, Workshop, state_bytes
from node.rounds import RoundDriver
from node.standing import Standing
from node.trainer_link import TrainerLink
from node.wishes import Wishes
from optim.method import Method
from protocol.blobs import Blob
from protocol.chain import Chain, Head, disagrees
from protocol.errors import MalformedError, PeerFault, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.statements import Commit, Statement, Terms
from protocol.transport import Transport

logger = logging.getLogger(__name__)

PATIENCE = 1.5  # seconds that the next commit may take to come by itself before we ask for it
GAP = 2  # rounds behind, from which on we ask at once
LOOK_SECONDS = 0.5
STATE_SECONDS = 600.0
AVOID_SECONDS = 60.0


@dataclass
class Replica:
    """Where this peer stands: the state belongs to the head of the chain, `blob` is the state's."""

    state: OuterState
    blob: Blob


class Participant:
    def __init__(
        self, manifest: Manifest, method: Method, terms: Terms, numel: int, transport: Transport, members: Members,
        driver: RoundDriver, workshop: Workshop, wishes: Wishes, trainer: TrainerLink, keeper: Keeper,
        standing: Standing, chain: Chain, replica: Replica, work: Callable[..., Awaitable[Any]],
    ) -> None:  # fmt: skip
        self._manifest, self._method, self._terms, self._numel = manifest, method, terms, numel
        self._transport, self._members, self._driver = transport, members, driver
        self._workshop, self._wishes, self._trainer, self._keeper = workshop, wishes, trainer, keeper
        self._standing, self.chain, self.replica, self._work = standing, chain, replica, work
        self._decided: Statement[Commit] | None = None
        self._avoided: dict[Head, float] = {}
        self._ahead_since: float | None = None
        self.wake = asyncio.Event()

    def decided(self, commit: Statement[Commit]) -> None:
        """From the round driver."""
        self._decided = commit
        self.wake.set()

    @property
    def target_reached(self) -> bool:
        target = self._manifest.target
        return bool(
            (target.rounds is not None and self.chain.round >= target.rounds)
            or (target.tokens is not None and self.chain.tokens >= target.tokens)
        )

    async def run(self) -> None:
        """Until the target is reached."""
        await self._join()
        await self._trainer.start(self.chain.round, self.replica.state.anchor)
        await self._assemble()
        while not self.target_reached:
            if not self._driver.is_open and self._decided is None:
                self._open_round()
            await self._advance()
        self._driver.close()

    async def _join(self) -> None:
        """A newcomer with somebody to ask asks first: what it would train alone is of little use."""
        self._standing.enter("joining", "looking for the peers of the run")
        while self.chain.round == 0 and self._members.has_contacts and not self._members.others():
            await self._look()
        while self._heads():
            await self._catch_up_or_wait()

    async def _assemble(self) -> None:
        """Wait until enough peers are there; a run that has begun waits only a while for those it had."""
        needed, loop = self._manifest.run.min_peers, asyncio.get_running_loop()
        patience_ends = loop.time() + self._manifest.membership.expiry
        while self._members.trainers() < needed:
            if self.chain.round > 0 and loop.time() > patience_ends:
                break
            present = self._members.trainers()
            self._standing.enter("waiting for peers", f"{present} of {needed} peers are here, round 0 begins with all")
            if self._heads():
                await self._catch_up_or_wait()
            else:
                await self._look()

    async def _look(self) -> None:
        """Wait for news, or a little."""
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self.wake.wait()
        except TimeoutError:
            return
        finally:
            self.wake.clear()

    def _open_round(self) -> None:
        self._standing.enter("training")
        self._driver.begin(self.chain.round, self.chain.digest, self._members.live_trainers())
        self.offer()

    def offer(self) -> None:
        """Give the trainer's message, if there is one, to the open round."""
        offer = self._trainer.offers.current
        if offer is not None and self._driver.is_open and self._driver.number == self.chain.round:
            self._standing.enter("exchanging")
            self._driver.offer(
                offer.contribution(self.chain.round, self.chain.digest, self._terms.codec, self._terms.shapes)
            )

    async def _advance(self) -> None:
        if self._decided is not None:
            commit, self._decided = self._decided, None
            await self._take(commit)
        elif self._must_catch_up():
            self._driver.close()
            await self._catch_up_or_wait()
        else:
            await self._look()

    async def _take(self, commit: Statement[Commit]) -> None:
        """A decided round: get what is missing, apply it; where that fails, the state is fetched later."""
        if (commit.body.round, commit.body.base) != (self.chain.round, self.chain.digest):
            return
        try:
            await self._apply(commit)
        except (UnreachableError, MalformedError) as error:
            logger.warning("round %d is decided but cannot be applied here: %s", commit.body.round, error)
            self._standing.round_failed(str(error))

    async def _apply(self, commit: Statement[Commit]) -> None:
        for blob in commit.body.parts or [offer.body.parts[0] for offer in commit.body.contributions]:
            await self._wishes.get_from_anyone(blob, self._manifest.round.exchange_timeout)
        state, blob = await self._work(self._workshop.apply, self.replica.state, commit.body)
        self.chain.append(commit)
        await self._settle(state, blob, commit.body)

    async def _settle(self, state: OuterState, blob: Blob, *commits: Commit) -> None:
        """A new state is in place: tell the trainer, the others and the disk."""
        self.replica = Replica(state, blob)
        self._ahead_since = None
        fate = self._trainer.settle(commits)
        self._standing.applied(self.chain.head, blob.digest, commits, fate)
        self._members.announce_head(self.chain.head, blob.digest)
        await self._trainer.adopt(self.chain.round, state.anchor, fate)
        async with self._trainer.placing:
            self._keeper.prune(self._trainer.offers, blob, commits)
        await self._keeper.keep(self.chain, self._trainer.offers, state)

    def _heads(self) -> dict[Head, list[PeerId]]:
        now = asyncio.get_running_loop().time()
        self._avoided = {head: until for head, until in self._avoided.items() if until > now}
        heads = catch_up.ahead(self.chain.head, self._members.records())
        return {head: peers for head, peers in heads.items() if head not in self._avoided}

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
        gap = catch_up.best(heads)[0].round - self.chain.round
        return gap >= GAP or now - self._ahead_since > PATIENCE

    def _state_is_wrong(self) -> bool:
        votes = {peer: (record.digest, record.state_digest) for peer, record in self._members.records().items()}
        voting = {peer: vote for peer, vote in votes.items() if vote[1]}
        return disagrees(self.chain.digest, self.replica.blob.digest, voting)

    async def _catch_up_or_wait(self) -> None:
        self._standing.enter("catching up", "others are ahead")
        wrong, heads = self._state_is_wrong(), self._heads()
        if wrong:
            logger.error("our state differs from the others' after round %d; fetching theirs", self.chain.round)
            self._standing.round_failed("our state differed from the others'")
            head, peers = self.chain.head, self._members.holders(self.chain.head, self.replica.blob.digest)
        elif heads:
            head, peers = catch_up.best(heads)
        else:
            return
        try:
            await self._follow(peers[0], replace=wrong)
        except (UnreachableError, PeerFault) as error:
            logger.warning("cannot follow %s to round %d: %s", peers[0], head.round, error)
            if len(peers) == 1:
                self._avoided[head] = asyncio.get_running_loop().time() + AVOID_SECONDS
            await self._look()

    async def _follow(self, peer: PeerId, replace: bool) -> None:
        expected = state_bytes(self._numel, self._method)
        way = await catch_up.find_way(
            self._manifest.run_id, self._terms, self.chain, peer, self._transport.channel, expected
        )
        if way.state is None and not replace:
            logger.info("replaying %d rounds from round %d on", len(way.commits), self.chain.round)
            for commit in way.commits:
                await self._apply(commit)
            return
        if way.state is None:
            raise MalformedError(f"{peer} has no other state than ours")
        logger.info("fetching the state of round %d (%d bytes)", way.head.round, way.state.size)
        await self._wishes.get_from_anyone(way.state, STATE_SECONDS)
        state = await self._work(self._workshop.load, way.state)
        self.chain.restart(way.head, way.commits)
        await self._settle(state, way.state, *(commit.body for commit in way.commits))

