"""Store the newest state of a run, or of one stage, without training it, and serve it to peers that come back.

The store fetches the state that most trainers report, checks it against their digest, and saves it as a checkpoint. It
fetches the final state at once, and others so rarely that they take a small share of its link. Its peer record names
the state that it holds, so newcomers, and peers that return after all others have left, can fetch it here.
"""

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from node.daemon.node import Node
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.peers.chain_sync import ChainReader, ServedChain, ask_for_word, needs_word
from node.daemon.peers.swarm_view import find_newest_validation, stage_witnesses, states_at
from node.daemon.run_limits import contribution_limits
from node.daemon.stored_states.announcing import StateAnnouncer
from node.daemon.stored_states.choice import ChoiceRules, RoundFilter, StateOffer, choose_state
from node.daemon.stored_states.state_folder import ReportedLoss, StateFolder, StoredState
from node.disk_budget import DiskRoom
from node.from_manifest import build_program, topology_class
from node.loop.peers.catch_up import MAX_VANISHED_STATES
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.steering import Steering
from node.run_dir import RunDir
from node.units import format_bytes
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainHead, ChainLog
from protocol.consensus.fork_choice import ChainOffer, LocalEvidence, judge
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import Digest
from protocol.errors import GoneError, MissingFileError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import stage_of
from protocol.steering import RevisionLog
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
CHOICE_SECONDS = 0.2
LINK_SHARE = 0.05  # of the time, for downloads
MIN_PAUSE_SECONDS = 30.0  # between two downloads while the run continues
RETRY_SECONDS = 1.0  # after a failure; the state may have been replaced by a newer one
DISK_RETRY_SECONDS = 60.0
MIN_FETCH_SECONDS = 60.0  # for a download, plus its size / MIN_BYTES_PER_SECOND
MIN_BYTES_PER_SECOND = 125_000
MAX_CHAIN_SOURCES = 3
AVOID_SECONDS = 30.0  # for a head that no peer could prove
MAX_REQUESTS = 32  # pieces in memory, of one download
STATES_ON_DISK = 5  # two blobs and three checkpoints while a state is replaced


class UncertifiedError(StaleError):
    """A chain whose certificates do not suffice to follow it."""


@dataclass(frozen=True, kw_only=True)
class StateSources:
    """The peers from which a store fetches, and the means to reach them.

    `reader` requests the commits that lead to a state; `contacts` are the peers that the user named;
    `recently_requested` returns the blobs that peers are downloading from us.
    """

    admitted: AdmittedPeers
    downloader: Downloader
    reader: ChainReader
    contacts: tuple[PeerId, ...]
    recently_requested: Callable[[], Collection[bytes]]


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """How a store announces and paces its downloads; the defaults suit the only store of a host.

    `round_filter` chooses the rounds, None means any; `room` limits the disk, None means no limit.
    """

    announcer: StateAnnouncer
    round_filter: RoundFilter | None = None
    room: DiskRoom | None = None
    max_requests: int = MAX_REQUESTS


class FetchedState(NamedTuple):
    """A state and the head of its chain, which most trainers report; no certificate was checked."""

    head: ChainHead
    blob: Blob


class StateStore:
    """Stores the newest state of one run: its `chain` and its `blob`, which is None before the first.

    `error` is the reason why the newest state is not stored, empty if it is.
    """

    def __init__(
        self,
        manifest: Manifest,
        folder: StateFolder,
        sources: StateSources,
        plan: StorePlan,
        revisions: RevisionLog,
        has_one_state: bool,
    ) -> None:
        self.run_id = manifest.run_id
        self.chain = Chain.from_genesis(manifest.run_id, manifest.admission)
        self.steering = Steering(manifest, self.chain, revisions)
        self.blob: Blob | None = None
        self.error = ""
        self.blobs = folder.store
        self.folder = folder
        self._sources = sources
        self._plan = plan
        self._stage = stage_of(manifest)
        self._name = "state" if self._stage is None else f"state of stage {self._stage}"
        self._rules = ChoiceRules(sources.admitted.directory.peer_id, has_one_state, self.steering.is_final)
        self._next_fetch_at = 0.0
        self._avoided: dict[Digest, float] = {}  # heads that no peer could prove, and until when
        self._validation = ReportedLoss()

    @property
    def refusals(self) -> Counter[str]:
        return self._sources.downloader.refusals

    @property
    def bytes_received(self) -> int:
        """Return the bytes of states received by this process."""
        return self._sources.downloader.bytes_received

    @property
    def is_complete(self) -> bool:
        """Return whether the final state is held."""
        return self.blob is not None and self.steering.is_final(self.chain.head)

    def describe(self) -> str:
        """Describe the stored state, or why there is none, in one line."""
        if self.error:
            return f"the newest {self._name} is not kept: {self.error}"
        if self.blob is None:
            return f"no {self._name} is held yet"
        return f"holding the {'final ' if self.is_complete else ''}{self._name} of round {self.chain.round}"

    def restore(self, base: Path) -> None:
        """Read the state that an earlier process stored, or the state at which the run starts if it is here.

        `base` is the folder that the manifest's paths start from. Raises MurmurError.
        """
        kept = self.folder.load() or self.folder.first_state(base)
        if kept is not None:
            self.blob, self._validation = kept.blob, kept.validation
            self.chain.switch_to(kept.head, kept.log)
            logger.info("holding the %s of round %d", self._name, kept.head.round)

    async def run(self) -> None:
        """Fetch newer states until cancelled."""
        self._announce()
        if self._stage is None:
            self._publish_validation()
        while True:
            self._note_validation()
            offer = self._due_offer(time.monotonic())
            if offer is not None:
                await self._keep(offer)
            await asyncio.sleep(POLL_SECONDS)

    def _due_offer(self, now: float) -> StateOffer | None:
        """Return the state to fetch now: the final one at once, another one after the pause."""
        offer, round_filter = self._choose(), self._plan.round_filter
        if offer is None or self.steering.is_final(offer.head):
            return offer
        if round_filter is None:
            return offer if now >= self._next_fetch_at else None
        round_filter.observe(offer.head.round, now)
        return offer if self.blob is None or round_filter.is_chosen(offer.head.round) else None

    def _states(self) -> dict[PeerId, PeerState]:
        return states_at(self._sources.admitted.records(), self._stage)

    def _choose(self) -> StateOffer | None:
        snapshot = SwarmSnapshot(self._states())
        now = time.monotonic()
        self._avoided = {digest: until for digest, until in self._avoided.items() if until > now}
        own = self.chain.head if self.blob else None
        return choose_state(self._rules, snapshot, own, self.chain.electorate.voters, self._avoided)

    def _note_validation(self) -> None:
        """Repeat the newest validation loss in our record, for observers that come when no trainer is left."""
        if self._stage is not None:  # a stage alone has no loss
            return
        newest = find_newest_validation(self._sources.admitted.records().values())
        if newest is not None and newest.validation_round > self._validation.round:
            self._validation = ReportedLoss(newest.validation_round, newest.validation_loss)
            self._publish_validation()

    def _publish_validation(self) -> None:
        self._sources.admitted.directory.publish(
            validation_round=self._validation.round, validation_loss=self._validation.loss
        )

    async def fetch_newest(self, find_seconds: float) -> FetchedState:
        """Fetch the newest state once, without storing it as a host does.

        Raises UnreachableError if no peer that holds a state is found in time, or the state cannot be fetched.
        """
        began = time.monotonic()
        while (offer := self._choose()) is None:
            if time.monotonic() - began > find_seconds:
                raise UnreachableError("no peer or host of the run that holds its state answers; try again later")
            await asyncio.sleep(CHOICE_SECONDS)
        for _ in range(MAX_VANISHED_STATES):
            try:
                return FetchedState(offer.head, await self._fetch(offer))
            except GoneError:  # the peers have a newer one
                await asyncio.sleep(CHOICE_SECONDS)
                offer = self._choose() or offer
        raise UnreachableError("the state of the run changes faster than it can be fetched; try again later")

    async def _keep(self, offer: StateOffer) -> None:
        """Fetch and save a state; after a failure, log the reason and try again later."""
        began = time.monotonic()
        try:
            chain, blob = await self._fetch_both(offer)
            kept = StoredState(chain.head, chain.log, blob, self._validation)
            await asyncio.to_thread(self.folder.save, kept)
        except StorageError as error:
            self._fail(str(error))
            self._announce()  # without a state, so that peers do not wait for us
            await asyncio.sleep(DISK_RETRY_SECONDS)
        except (UnreachableError, PeerFault, MissingFileError) as error:
            logger.info("cannot keep the state of round %d: %s", offer.head.round, error)
            if isinstance(error, UncertifiedError):
                self._avoided[offer.head.digest] = time.monotonic() + AVOID_SECONDS
            await asyncio.sleep(CHOICE_SECONDS if isinstance(error, GoneError) else RETRY_SECONDS)
        else:
            self._adopt(kept)
            seconds = time.monotonic() - began
            if self._plan.round_filter is not None:
                self._plan.round_filter.record_fetch(self.run_id, seconds)
            self._next_fetch_at = time.monotonic() + max(MIN_PAUSE_SECONDS, seconds / LINK_SHARE)

    async def _fetch_both(self, offer: StateOffer) -> tuple[ChainOffer, Blob]:
        """Return the verified chain and the state.

        The state is requested at once, because its holders keep it from the first request on.

        Raises StorageError if the disk has no room, and the errors of the downloads.
        """
        if self._plan.room is not None:
            await self._plan.room.require(STATES_ON_DISK * self.folder.state_bytes)
        fetch = asyncio.create_task(self._fetch(offer), name="fetch state")
        try:
            return await self._fetch_chain(offer), await fetch
        finally:
            await cancel_and_wait((fetch,))

    async def _fetch(self, offer: StateOffer) -> Blob:
        """Download the state; pieces that an earlier attempt or process has left are used."""
        blob = Blob(offer.state, self.folder.state_bytes)
        seconds = MIN_FETCH_SECONDS + blob.size / MIN_BYTES_PER_SECOND
        self._retain(blob)

        def holders() -> list[PeerId]:
            live = self._sources.admitted.records()
            return [peer for peer in offer.holders if peer in live]

        await self._sources.downloader.fetch(blob, holders, seconds, wait_if_absent=False)
        return blob

    async def _fetch_chain(self, offer: StateOffer) -> ChainOffer:
        """Return the verified chain to a state, from one of its holders.

        Raises UnreachableError if no holder shows it, UncertifiedError if its certificates do not suffice.
        """
        live = self._sources.admitted.records()
        for peer in [peer for peer in offer.holders if peer in live][:MAX_CHAIN_SOURCES]:
            try:
                return await self._read_chain(peer, offer)
            except UncertifiedError:
                raise
            except (UnreachableError, PeerFault) as error:
                logger.info("%s does not show the chain to round %d: %s", peer, offer.head.round, error)
        raise UnreachableError(f"no peer shows the chain to round {offer.head.round}")

    async def _read_chain(self, peer: PeerId, offer: StateOffer) -> ChainOffer:
        """Read and verify the last commits of a peer's chain. Raises PeerFault unless they lead to the state."""
        start = max(0, offer.head.round - MAX_KEPT_COMMITS)
        shown = await self._sources.reader.read(peer, start)
        commits = tuple(entry for entry in shown.log.commits if entry.body.round < offer.head.round)
        state = offer.state if self._rules.has_one_state else b""
        chain = ChainOffer(ChainLog(shown.log.electorate, commits), offer.head, state)
        if not commits or chain.head.digest != offer.head.digest:
            raise StaleError("its chain leads elsewhere, or its log does not reach back far enough")
        await self._require_certified(chain)
        self.steering.learn(Adoption(chain.head.revision, shown.revisions))
        return chain

    async def _require_certified(self, chain: ChainOffer) -> None:
        """Raise UncertifiedError unless the certificates lead from the chain that we hold to this one."""
        word = None
        if needs_word(self.chain, chain):
            witnesses = stage_witnesses(self._states(), self._rules.peer_id) if self._stage is not None else []
            word = await ask_for_word(self._sources.reader, self._sources.contacts, witnesses, chain)
        states = self._states()
        live = SwarmSnapshot(states).trainers - {self._rules.peer_id}
        judgement = judge(self.chain, chain, LocalEvidence(self._rules.peer_id, live or frozenset(states), None, word))
        if judgement.relation != "ahead":
            raise UncertifiedError(judgement.reason or "the chain of the state that we hold is preferred")

    def _adopt(self, kept: StoredState) -> None:
        is_first = self.blob is None
        self.chain.switch_to(kept.head, kept.log)
        self._sources.admitted.learn(self._stage, self.chain.electorate)
        self.blob, self.error = kept.blob, ""
        self._announce()
        self._retain(kept.blob)
        final = f"the final {self._name}," if self.is_complete else f"the {self._name}"
        level = logging.INFO if self.is_complete or is_first else logging.DEBUG  # the lines between are routine
        logger.log(level, "holding %s of round %d (%s)", final, kept.head.round, format_bytes(kept.blob.size))

    def _retain(self, wanted: Blob) -> None:
        """Keep the blobs of our state, of the wanted one, and of those that peers are downloading."""
        requested = self.folder.requested(self._sources.recently_requested())
        held = {self.blob.digest} if self.blob else set()
        self.folder.retain(*requested, *held, wanted.digest)

    def _fail(self, reason: str) -> None:
        if reason != self.error:
            logger.error("the newest %s is not kept: %s", self._name, reason)
        self.error = reason

    def _announce(self) -> None:
        """Publish the state that we hold; before the first, the start of the chain shows that we store states."""
        head, state = self.chain.head, self.blob.digest if self.blob else b""
        if self.error:
            head, state = ChainHead(0, b"", 0), b""
        self._plan.announcer.announce(head, state, self.chain.electorate.voters)


def build_state_store(node: Node, manifest: Manifest, run_dir: RunDir, plan: StorePlan) -> StateStore:
    """Build the store of a run or of one stage, with the state that an earlier process stored.

    Raises ManifestError, CheckpointError, OtherRunError or StorageError.
    """
    planner = build_program(manifest)
    folder = StateFolder(run_dir, manifest, planner)
    limits = contribution_limits(manifest, planner)
    rng = random.Random(os.urandom(16))
    sources = StateSources(
        admitted=node.admitted,
        downloader=Downloader(folder.store, node.transport.bulk, rng, max_requests=plan.max_requests),
        reader=ChainReader(manifest.run_id, limits, node.transport.channel, manifest.admission),
        contacts=node.options.contact_ids,
        recently_requested=node.blob_service.recently_requested,
    )
    has_one_state = topology_class(planner.method).has_shared_state
    store = StateStore(manifest, folder, sources, plan, node.revisions.log, has_one_state)
    store.restore(node.options.base)
    served = ServedChain(store.chain, lambda: store.blob, store.steering, has_one_state)
    node.add_chain(manifest.run_id, served, folder.store)
    return store
