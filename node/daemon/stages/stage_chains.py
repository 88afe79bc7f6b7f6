"""Follow the certified chains of the stages that this node does not serve.

They say who has standing at those stages, and, where steps are exact, how the stages decided each round. Peer records
only tell which peers to ask: commits count by the acknowledgements of their voters, as in the chain of our own stage.
So no record alone makes a step void.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from functools import partial

from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.peers.chain_sync import ChainReader, ServedChain, ShownChain, ask_for_word
from node.daemon.peers.peer_rpc import ChannelTo
from node.daemon.peers.swarm_view import stage_witnesses, states_at
from node.daemon.run_limits import contribution_limits
from node.from_manifest import build_program
from node.loop.steering import Steering
from protocol.consensus.chain import MAX_KEPT_COMMITS, CertifiedCommit, Chain, ChainLog
from protocol.consensus.fork_choice import ChainOffer, LocalEvidence, judge
from protocol.errors import PeerFault, StaleError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest, RunId
from protocol.membership.peer_table import MembershipEvent, MembershipListener
from protocol.membership.record_fields import record_of_stage
from protocol.murmur_pb2 import PeerRecord
from protocol.pipeline.exact import StepDecisions
from protocol.pipeline.stage import StageManifest
from protocol.recent import RecentTable
from protocol.steering import RevisionLog

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0  # between two looks at a stage, where steps are not exact
POLL_SECONDS = 1.0  # where they are, unless a record calls for it earlier
AVOID_SECONDS = 10.0  # for a peer that could not prove what it announced
MAX_AVOIDED = 4096
MAX_ASKED = 3  # peers at a look
READ_SECONDS = 15.0  # for the chain of one peer


class FollowedStage:
    """The chain of one other stage, as far as certificates prove it."""

    def __init__(self, manifest: StageManifest, channel: ChannelTo) -> None:
        self.stage = manifest.stage
        self.run_id = manifest.run_id
        self.chain = Chain.from_genesis(manifest.run_id, manifest.admission)
        limits = contribution_limits(manifest, build_program(manifest))
        self.reader = ChainReader(manifest.run_id, limits, channel, manifest.admission)
        self.served = ServedChain(self.chain, lambda: None, Steering(manifest, self.chain, RevisionLog()))

    def offer_of(self, shown: ShownChain) -> ChainOffer:
        """Return the chain that a peer shows, with the commit that it has decided but not applied."""
        offer = ChainOffer(shown.log, shown.head)
        if shown.decided is None:
            return offer
        return ChainOffer(ChainLog(shown.log.electorate, (*shown.log.commits, shown.decided)), shown.head)

    def adopt(self, offer: ChainOffer) -> Sequence[CertifiedCommit]:
        """Follow a chain that was judged; return its new commits."""
        known = [number for number, head in enumerate(offer.heads) if head.digest == self.chain.digest]
        if not known:
            self.chain.switch_to(offer.head, offer.log)
            return offer.log.commits
        added = offer.log.commits[known[-1] :]
        for entry in added:
            self.chain.append(entry)
        return added


class StageChains:
    """Follows the other stages of a pipeline for one node.

    Args:
        manifest: that of the whole run, which is cut into stages.
        contacts: the peers that the user named.
    """

    def __init__(
        self,
        manifest: Manifest,
        admitted: AdmittedPeers,
        channel: ChannelTo,
        contacts: Sequence[PeerId],
        decisions: StepDecisions | None,
        rng: random.Random,
    ) -> None:
        self._manifest = manifest
        self._admitted = admitted
        self._channel = channel
        self._contacts = contacts
        self._decisions = decisions
        self._rng = rng
        self._avoided = RecentTable[PeerId, float](MAX_AVOIDED)  # until when
        self._listeners: list[MembershipListener] = []
        self._news = asyncio.Event()
        self.served: dict[RunId, ServedChain] = {}  # for peers whose stage has nobody left who shows it
        admitted.directory.subscribe(self)

    def subscribe(self, listener: MembershipListener) -> None:
        """Let a listener look again, without any event, when other stages have new commits."""
        self._listeners.append(listener)

    def on_membership_changed(self, events: Sequence[MembershipEvent]) -> None:
        self._news.set()

    async def run(self, own: frozenset[int]) -> None:
        """Follow all stages but those of this node until cancelled. Raises ManifestError."""
        others = [stage for stage in range(self._manifest.pipeline.stages) if stage not in own]
        followed = [FollowedStage(StageManifest.of(self._manifest, stage), self._channel) for stage in others]
        self.served |= {each.run_id: each.served for each in followed}
        while True:
            self._news.clear()
            if any(await asyncio.gather(*(self._look(each) for each in followed))):
                for listener in self._listeners:
                    listener.on_membership_changed(())
            await self._pause()

    async def _pause(self) -> None:
        if self._decisions is None:
            await asyncio.sleep(PAUSE_SECONDS)
            return
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._news.wait()
        except TimeoutError:
            return

    async def _look(self, followed: FollowedStage) -> bool:
        """Ask peers that should have news of a stage; return whether its chain has moved."""
        for peer in self._ahead(followed)[:MAX_ASKED]:
            try:
                async with asyncio.timeout(READ_SECONDS):
                    has_moved = await self._follow(followed, peer)
                self._avoided.pop(peer, None)
                return has_moved
            except (UnreachableError, PeerFault, TimeoutError) as error:
                logger.debug("%s does not prove its rounds of stage %d: %s", peer, followed.stage, error)
                self._count_false_record(peer, error)
                self._avoided[peer] = time.monotonic() + AVOID_SECONDS
        return False

    def _count_false_record(self, peer: PeerId, error: Exception) -> None:
        """Count a record of rounds that its maker does not prove, from the second time on if nothing is forged.

        An honest peer may have decided a round a moment before it shows it.
        """
        if isinstance(error, PeerFault) and (peer in self._avoided or not isinstance(error, StaleError)):
            self._admitted.directory.record_refusal(peer, error)

    def _ahead(self, followed: FollowedStage) -> list[PeerId]:
        """Return the peers that announce more of a stage than we know: those with standing at it first."""
        records, me, now = self._admitted.records(), self._admitted.directory.peer_id, time.monotonic()
        standing, members = self._admitted.standing_records(), followed.chain.electorate.standing
        found = [
            peer
            for peer, record in records.items()
            if peer != me and self._avoided.get(peer, 0.0) <= now and _is_ahead(record, followed)
        ]
        self._rng.shuffle(found)
        return sorted(found, key=lambda peer: (peer not in members, peer not in standing))

    async def _follow(self, followed: FollowedStage, peer: PeerId) -> bool:
        """Follow the chain that a peer shows as far as it is certified. Raises UnreachableError or PeerFault."""
        chain, reader = followed.chain, followed.reader
        shown = await reader.read(peer, chain.round)
        offer = followed.offer_of(shown)
        if not any(chain.has_head(head.digest) for head in offer.heads):
            offer = followed.offer_of(await reader.read(peer, max(0, shown.head.round - MAX_KEPT_COMMITS)))
        if chain.has_head(offer.head.digest):
            raise StaleError("it shows nothing new")
        states, me = states_at(self._admitted.records(), followed.stage), self._admitted.directory.peer_id
        live = frozenset(other for other, state in states.items() if state.is_trainer)
        word = await ask_for_word(reader, chain, offer, self._contacts, partial(stage_witnesses, states, me))
        judgement = judge(chain, offer, LocalEvidence(me, live, None, word))
        if judgement.relation != "ahead":
            raise StaleError(judgement.reason or "its chain is not preferred")
        self._learn(followed, followed.adopt(offer))
        return True

    def _learn(self, followed: FollowedStage, commits: Sequence[CertifiedCommit]) -> None:
        self._admitted.learn(followed.stage, followed.chain.electorate)
        if self._decisions is not None:
            for entry in commits:
                self._decisions.record(followed.stage, entry.body)


def _is_ahead(record: PeerRecord, followed: FollowedStage) -> bool:
    """Return whether a peer should have a commit that we lack.

    A peer of another stage has used the commits of all stages before its round.
    """
    served = record_of_stage(record, followed.stage)
    if served is None:
        return record.role == "trainer" and record.round > followed.chain.round
    decided = (served.step_decided - 1) // 2 + 1 if served.step_decided else 0
    return max(served.round, decided) > followed.chain.round


def build_decisions(manifest: Manifest) -> StepDecisions | None:
    """Return the table of the decisions of all stages; None where steps are not exact."""
    table = manifest.pipeline
    if not table.is_exact:
        return None
    return StepDecisions(table.stages, table.step_microbatches(manifest.train.batch_tokens, manifest.model.context))
