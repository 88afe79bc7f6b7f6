"""Store the newest state of a run, or of one stage, without training it, and serve it to peers that come back.

The store fetches the state that most trainers report, once the chain to it is certified and something confirms the
state (`node.loop.peers.state_votes`), and saves it as a checkpoint. It fetches the final state at once, and others so
rarely that they take a small share of its link. Its peer record names the state that it holds, so newcomers, and peers
that return after all others have left, can fetch it here. Commands that fetch a model once do so by the same path.

A store that follows the run computes each state from the one before it and the certified commits (`replay.py`), and
fetches one only if it lags too far behind.
"""

import asyncio
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from node.daemon.node import Node
from node.daemon.peers.admitted_peers import AdmittedPeers
from node.daemon.peers.chain_sync import ChainReader, ServedChain, ask_for_word
from node.daemon.peers.swarm_view import find_newest_validation, stage_witnesses, states_at
from node.daemon.run_limits import contribution_limits
from node.daemon.stored_states.announcing import StateAnnouncer
from node.daemon.stored_states.choice import ChoiceRules, RoundFilter, StateOffer, choose_state
from node.daemon.stored_states.replay import CommitReplay
from node.daemon.stored_states.state_folder import ReportedLoss, StateFolder, StoredState
from node.disk_budget import DiskRoom
from node.from_manifest import build_program, topology_class
from node.loop.peers.catch_up import MAX_VANISHED_STATES
from node.loop.peers.state_votes import StateEvidence, StateVotes, is_state_confirmed
from node.loop.peers.swarm_snapshot import PeerState, SwarmSnapshot
from node.loop.steering import Steering
from node.processes.workers import RunInThread
from node.run_dir import RunDir
from node.units import format_bytes
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.chain import MAX_KEPT_COMMITS, Chain, ChainHead, ChainLog
from protocol.consensus.fork_choice import ChainOffer, LocalEvidence, is_certified, judge
from protocol.consensus.messages.contributions import Adoption
from protocol.consensus.messages.signed import Digest
from protocol.errors import GoneError, MissingFileError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.pipeline.stage import stage_of
from protocol.signing import TrustPoint
from protocol.steering import RevisionLog
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
FOLLOW_SECONDS = 0.1  # the same for a store that follows the run
CHOICE_SECONDS = 0.2
LINK_SHARE = 0.05  # of the time, for downloads
MIN_PAUSE_SECONDS = 30.0  # between two downloads while the run continues
RETRY_SECONDS = 1.0  # after a failure; the state may have been replaced by a newer one
DISK_RETRY_SECONDS = 60.0
MIN_FETCH_SECONDS = 60.0  # for a download, plus its size / MIN_BYTES_PER_SECOND
MIN_BYTES_PER_SECOND = 125_000
MAX_CHAIN_SOURCES = 3
AVOID_SECONDS = 30.0  # for a state that no peer could prove
UNSHOWN_SECONDS = 5.0  # for one to which no peer showed the chain, which may be the network's fault
CONFIRM_SECONDS = 8.0  # for the next certificate, or the voters, to name a state
ASK_AGAIN_SECONDS = 0.5
MAX_REQUESTS = 32  # pieces in memory, of one download
STATES_ON_DISK = 5  # two blobs and three checkpoints while a state is replaced


class UncertifiedError(StaleError):
    """A chain whose certificates do not suffice to follow it."""


@dataclass(frozen=True, kw_only=True)
class StateSources:
    """The peers from which a store fetches, and the means to reach them.

    `reader` requests the commits that lead to a state; `contacts` are the peers that the user named;
    `recently_requested` returns the blobs that peers are downloading from us; `trust` is a point of the run for which
    the user or the organiser vouches.
    """

    admitted: AdmittedPeers
    downloader: Downloader
    reader: ChainReader
    contacts: tuple[PeerId, ...]
    recently_requested: Callable[[], Collection[bytes]]
    trust: TrustPoint | None = None


@dataclass(frozen=True, kw_only=True)
class StorePlan:
    """How a store announces and paces its downloads; the defaults suit the only store of a host.

    `round_filter` chooses the rounds, None means any; `room` limits the disk, None means no limit. `follower` runs the
    computations of a store that follows the run; None means that it fetches a state now and then.
    """

    announcer: StateAnnouncer
    round_filter: RoundFilter | None = None
    room: DiskRoom | None = None
    max_requests: int = MAX_REQUESTS
    follower: RunInThread | None = None


class FetchedState(NamedTuple):
    """A state that something confirms, and the head of its certified chain."""

    head: ChainHead
    blob: Blob


class ProvenChain(NamedTuple):
    """A certified chain to a state, the word of the contacts about it, and the state that its next certificate names.

    `named` is None while the chain ends there.
    """

    chain: ChainOffer
    word: bool | None
    named: Digest | None


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
        self._avoided: dict[tuple[ChainHead, Digest], float] = {}  # no peer could prove them; the end of the pause
        self._validation = ReportedLoss()
        self.replay: CommitReplay | None = None  # of a store that follows the run
        self.changed = asyncio.Event()  # set with each new state; its reader clears it
        self.completed = asyncio.Event()  # set with the final state
        self._replay_failed: ChainHead | None = None
        self.replayed = 0  # rounds whose commits this process has applied
        self.fetched = 0  # states that this process has downloaded

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
            self._sources.admitted.learn(self._stage, self.chain.electorate)
            logger.info("holding the %s of round %d", self._name, kept.head.round)
            self._signal_change()

    def _signal_change(self) -> None:
        self.changed.set()
        if self.is_complete:
            self.completed.set()

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
            await asyncio.sleep(POLL_SECONDS if self.replay is None else FOLLOW_SECONDS)

    def _due_offer(self, now: float) -> StateOffer | None:
        """Return the state to fetch now: the final one at once, another one after the pause."""
        offer, round_filter = self._choose(), self._plan.round_filter
        if offer is None or self.replay is not None or self.steering.is_final(offer.head):
            return offer
        if round_filter is None:
            return offer if now >= self._next_fetch_at else None
        round_filter.observe(offer.head.round, now)
        return offer if self.blob is None or round_filter.is_chosen(offer.head.round) else None

    def _states(self) -> dict[PeerId, PeerState]:
        return states_at(self._sources.admitted.records(), self._stage)

    def _choose(self) -> StateOffer | None:
        """Return the best state; after a refusal in a run whose voters we do not know, one that the contacts name.

        Keys cost nothing there, so strangers could name one invented head after the other.
        """
        snapshot = SwarmSnapshot(self._states())
        now = time.monotonic()
        self._avoided = {state: until for state, until in self._avoided.items() if until > now}
        own, voters = self.chain.head if self.blob else None, self.chain.electorate.voters
        if self._avoided and not voters:
            named = snapshot.peers.keys() & set(self._sources.contacts)
            known = SwarmSnapshot({peer: snapshot.peers[peer] for peer in named})
            if offer := choose_state(self._rules, known, own, voters, self._avoided):
                return offer
        return choose_state(self._rules, snapshot, own, voters, self._avoided)

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
        """Fetch the newest state that can be proven once, without storing it as a host does.

        Raises UnreachableError if no peer that holds one is found in time, or the state cannot be fetched.
        """
        began, vanished = time.monotonic(), 0
        fault = "no peer or host of the run that holds its state answers"
        while vanished < MAX_VANISHED_STATES:
            offer = self._choose()
            try:
                if offer is not None:
                    chain, blob = await self._fetch_both(offer)
                    return FetchedState(chain.head, blob)
            except GoneError:  # the peers have a newer one
                began, vanished = time.monotonic(), vanished + 1
            except (UnreachableError, PeerFault) as error:
                if not self._is_avoided(offer):
                    raise
                fault = f"no peer proves the state that it names ({error})"
            if time.monotonic() - began > find_seconds:
                raise UnreachableError(f"{fault}; try again later")
            await asyncio.sleep(CHOICE_SECONDS)
        raise UnreachableError("the state of the run changes faster than it can be fetched; try again later")

    def _is_avoided(self, offer: StateOffer | None) -> bool:
        return offer is not None and (offer.head, offer.state) in self._avoided

    def _avoid(self, offer: StateOffer, seconds: float) -> None:
        self._avoided[offer.head, offer.state] = time.monotonic() + seconds

    async def _keep(self, offer: StateOffer) -> None:
        """Fetch and save a state; after a failure, log the reason and try again later."""
        began = time.monotonic()
        try:
            kept = await self._replay_commits(offer) or await self._fetch_kept(offer)
            if self._is_save_due(kept.head):
                await asyncio.to_thread(self.folder.save, kept)
        except StorageError as error:
            self._fail(str(error))
            self._announce()  # without a state, so that peers do not wait for us
            await asyncio.sleep(DISK_RETRY_SECONDS)
        except (UnreachableError, PeerFault, MissingFileError) as error:
            logger.info("cannot keep the state of round %d: %s", offer.head.round, error)
            await asyncio.sleep(CHOICE_SECONDS if isinstance(error, GoneError) else RETRY_SECONDS)
        else:
            self._adopt(kept)
            seconds = time.monotonic() - began
            if self._plan.round_filter is not None:
                self._plan.round_filter.record_fetch(self.run_id, seconds)
            self._next_fetch_at = time.monotonic() + max(MIN_PAUSE_SECONDS, seconds / LINK_SHARE)

    def _is_save_due(self, head: ChainHead) -> bool:
        """Return whether to write a checkpoint; a follower writes as many as a trainer, but its first at once."""
        every = self.steering.manifest_at(head.round).checkpoint.every_rounds
        return self.replay is None or self.blob is None or head.round % every == 0 or self.steering.is_final(head)

    async def _fetch_kept(self, offer: StateOffer) -> StoredState:
        chain, blob = await self._fetch_both(offer)
        self.fetched += 1
        return StoredState(chain.head, chain.log, blob, self._validation)

    async def _replay_commits(self, offer: StateOffer) -> StoredState | None:
        """Return the state after the certified commits between ours and an offer; None if it has to be fetched."""
        if self.replay is None or self.blob is None or self._replay_failed == offer.head:
            return None
        chain, state = Chain(self.chain.head, self.chain.log), self.blob
        try:
            proven = await self._fetch_chain(offer, chain.round)
            commits = proven.chain.log.commits
            blob = await self.replay.apply(chain.head, state, commits, partial(self._live_holders, offer))
            if blob.digest != offer.state:
                raise StaleError("the result is not the state that the trainers announce")
            for commit in commits:
                chain.append(commit)
        except (UnreachableError, PeerFault, MissingFileError) as error:
            logger.info("fetching the state of round %d instead of applying commits: %s", offer.head.round, error)
            self._replay_failed = offer.head
            return None
        self.replayed += len(commits)
        return StoredState(chain.head, chain.log, blob, self._validation)

    def _live_holders(self, offer: StateOffer) -> list[PeerId]:
        live = self._sources.admitted.records()
        return [peer for peer in offer.holders if peer in live]

    async def _fetch_both(self, offer: StateOffer) -> tuple[ChainOffer, Blob]:
        """Return the certified chain and the confirmed state: the only way by which a state comes to this node.

        The state is requested at once, because its holders keep it from the first request on. One that cannot be proven
        is avoided for a while, so that the next choice is another.

        Raises StorageError if the disk has no room, and the errors of the downloads.
        """
        if self._plan.room is not None:
            await self._plan.room.require(STATES_ON_DISK * self.folder.state_bytes)
        fetch = asyncio.create_task(self._fetch(offer), name="fetch state")
        try:
            return await self._prove(offer), await fetch
        finally:
            await cancel_and_wait((fetch,))

    async def _prove(self, offer: StateOffer) -> ChainOffer:
        """Return the certified chain to a state, as soon as something confirms the state."""
        try:
            return await self._wait_for_proof(offer)
        except UncertifiedError:
            self._avoid(offer, AVOID_SECONDS)
            raise
        except UnreachableError:
            self._avoid(offer, UNSHOWN_SECONDS)
            raise

    async def _wait_for_proof(self, offer: StateOffer) -> ChainOffer:
        ends, votes = time.monotonic() + CONFIRM_SECONDS, StateVotes(self._rules.peer_id)
        while True:
            votes.record(SwarmSnapshot(self._states()))
            proven = await self._fetch_chain(offer)
            if self._is_confirmed(offer, proven, votes):
                return proven.chain
            if proven.named is not None:
                raise UncertifiedError(f"the certificate of round {offer.head.round} names another state")
            if time.monotonic() > ends:
                raise UncertifiedError(
                    f"neither a certificate nor the voters name the state of round {offer.head.round}"
                )
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    def _is_confirmed(self, offer: StateOffer, proven: ProvenChain, votes: StateVotes) -> bool:
        if not self._rules.has_one_state:
            return True
        if proven.named is not None:
            return proven.named == offer.state
        trainers = SwarmSnapshot(self._states()).trainers - {self._rules.peer_id}
        evidence = StateEvidence(votes, trainers, self._sources.trust, proven.word)
        return is_state_confirmed(proven.chain, offer.state, evidence)

    async def _fetch(self, offer: StateOffer) -> Blob:
        """Download the state; pieces that an earlier attempt or process has left are used."""
        blob = Blob(offer.state, self.folder.state_bytes)
        seconds = MIN_FETCH_SECONDS + blob.size / MIN_BYTES_PER_SECOND
        self._retain(blob)
        holders = partial(self._live_holders, offer)
        await self._sources.downloader.fetch(blob, holders, seconds, wait_if_absent=False)
        return blob

    async def _fetch_chain(self, offer: StateOffer, since: int = 0) -> ProvenChain:
        """Return the certified chain to a state, from one of its holders; contacts and voters are asked first.

        `since` is the first round whose commit is needed.

        Raises UnreachableError if no holder shows it, UncertifiedError if its certificates do not suffice.
        """
        first = {*self._sources.contacts, *self.chain.electorate.voters}
        for peer in sorted(self._live_holders(offer), key=lambda peer: peer not in first)[:MAX_CHAIN_SOURCES]:
            try:
                return await self._read_chain(peer, offer, since)
            except UncertifiedError:
                raise
            except (UnreachableError, PeerFault) as error:
                logger.info("%s does not show the chain to round %d: %s", peer, offer.head.round, error)
        raise UnreachableError(f"no peer shows the chain to round {offer.head.round}")

    async def _read_chain(self, peer: PeerId, offer: StateOffer, since: int) -> ProvenChain:
        """Read and verify the last commits of a peer's chain. Raises PeerFault unless they lead to the state."""
        start = max(since, offer.head.round - MAX_KEPT_COMMITS)
        shown = await self._sources.reader.read(peer, start)
        commits = tuple(entry for entry in shown.log.commits if entry.body.round < offer.head.round)
        state = offer.state if self._rules.has_one_state else b""
        chain = ChainOffer(ChainLog(shown.log.electorate, commits), offer.head, state)
        if not commits or chain.head.digest != offer.head.digest:
            raise StaleError("its chain leads elsewhere, or its log does not reach back far enough")
        word = await self._require_certified(chain)
        self.steering.learn(Adoption(chain.head.revision, shown.revisions))
        return ProvenChain(chain, word, self._named_by_next(ChainOffer(shown.log, shown.head), chain, word))

    def _named_by_next(self, shown: ChainOffer, chain: ChainOffer, word: bool | None) -> Digest | None:
        """Return the state that the certificate of the next commit names; None if none was shown."""
        following = [entry for entry in shown.log.commits if entry.body.base == chain.head.digest]
        if not following or not is_certified(following[0], chain.electorate, self._evidence(word)):
            return None
        return following[0].certificate.basis.state or None

    async def _require_certified(self, chain: ChainOffer) -> bool | None:
        """Return the word of the contacts about a chain, None if none was needed.

        Raises UncertifiedError unless the certificates lead from the chain that we hold to this one.
        """
        word = await ask_for_word(
            self._sources.reader, self.chain, chain, self._sources.contacts, self._stage_witnesses
        )
        judgement = judge(self.chain, chain, self._evidence(word))
        if judgement.relation != "ahead":
            raise UncertifiedError(judgement.reason or "the chain of the state that we hold is preferred")
        return word

    def _stage_witnesses(self) -> list[PeerId]:
        return stage_witnesses(self._states(), self._rules.peer_id) if self._stage is not None else []

    def _evidence(self, word: bool | None) -> LocalEvidence:
        states = self._states()
        live = SwarmSnapshot(states).trainers - {self._rules.peer_id}
        trust = self._sources.trust
        return LocalEvidence(self._rules.peer_id, live or frozenset(states), trust, word, requires_trust=False)

    def _adopt(self, kept: StoredState) -> None:
        is_first = self.blob is None
        self.chain.switch_to(kept.head, kept.log)
        self._sources.admitted.learn(self._stage, self.chain.electorate)
        self.blob, self.error = kept.blob, ""
        self._signal_change()
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
        trust=node.options.trust if stage_of(manifest) is None else None,
    )
    has_one_state = topology_class(planner.method).has_shared_state
    store = StateStore(manifest, folder, sources, plan, node.revisions.log, has_one_state)
    if plan.follower is not None:
        store.replay = CommitReplay(planner, store.steering, folder, sources.downloader, node.peer_id, plan.follower)
    store.restore(node.options.base)
    served = ServedChain(store.chain, lambda: store.blob, store.steering, has_one_state)
    node.add_chain(manifest.run_id, served, folder.store)
    return store
