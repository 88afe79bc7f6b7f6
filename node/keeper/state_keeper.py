"""Keep the newest state of a run on a host that does not train, and serve it to peers that come back.

The keeper fetches the state that most trainers report, checks it against that digest, and saves it as a checkpoint. It
fetches the final state at once, and others so rarely that they cost a small part of its link. Its peer record names the
state that it holds: newcomers, and peers that return after all others have left, take it from here.
"""

import asyncio
import logging
import os
import random
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from node.daemon.chain_sync import ChainReader, ask_contacts, needs_word
from node.daemon.node import Node
from node.daemon.run_limits import contribution_limits
from node.daemon.services import ServedChain
from node.daemon.swarm_view import find_newest_validation, peer_states
from node.from_manifest import build_program, topology_class
from node.keeper.choice import ChoiceRules, StateOffer, choose_state
from node.keeper.state_folder import KeptState, StateFolder, Validation
from node.loop.catch_up import MAX_VANISHED_STATES
from node.loop.steering import Steering
from node.loop.swarm_snapshot import SwarmSnapshot
from node.run_dir import RunDir
from node.units import format_bytes
from protocol.blobs.blob import Blob
from protocol.blobs.download import Downloader
from protocol.consensus.certified import MAX_KEPT_COMMITS, ChainLog
from protocol.consensus.chain import Chain, ChainHead
from protocol.consensus.fork_choice import ChainOffer, Witnesses, judge
from protocol.consensus.messages import Adoption, Digest
from protocol.errors import GoneError, MissingFileError, PeerFault, StaleError, StorageError, UnreachableError
from protocol.identity import PeerId
from protocol.manifest import Manifest
from protocol.membership.directory import PeerDirectory
from protocol.steering.revision_log import RevisionLog
from protocol.tasks import cancel_and_wait

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
CHOICE_SECONDS = 0.2
LINK_SHARE = 0.05  # of the time that downloads may take
MIN_PAUSE_SECONDS = 30.0  # between two downloads of a run that goes on
RETRY_SECONDS = 1.0  # after a failure; the state may have been replaced by a newer one
DISK_RETRY_SECONDS = 60.0
MIN_FETCH_SECONDS = 60.0  # for a download, plus its size / MIN_BYTES_PER_SECOND
MIN_BYTES_PER_SECOND = 125_000
MAX_CHAIN_SOURCES = 3
AVOID_SECONDS = 30.0  # a head that nobody could prove


class UncertifiedError(StaleError):
    """A chain that is not to be followed."""


class RecentRequests(Protocol):
    def recently_requested(self) -> Collection[bytes]:
        """Return the blobs that peers are downloading from us."""


@dataclass(frozen=True, kw_only=True)
class KeeperParts:
    """The parts of the node that the keeper uses.

    `reader` requests the commits that lead to a state; `contacts` are the peers that the user named.
    """

    directory: PeerDirectory
    downloader: Downloader
    reader: ChainReader
    requests: RecentRequests
    contacts: tuple[PeerId, ...]
    revisions: RevisionLog


class FetchedState(NamedTuple):
    """A state and the head of its chain, which nothing has verified but the word of most trainers."""

    head: ChainHead
    blob: Blob


class StateKeeper:
    """Keeps the newest state of one run. `chain` and `blob` are those that it holds; `blob` is None before the first.

    `error` is the reason why the newest state is not kept, empty if it is.
    """

    def __init__(self, manifest: Manifest, folder: StateFolder, parts: KeeperParts, has_one_state: bool) -> None:
        self.chain = Chain.from_genesis(manifest.run_id, manifest.admission)
        self.steering = Steering(manifest, self.chain, parts.revisions)
        self.blob: Blob | None = None
        self.error = ""
        self.store = folder.store
        self.folder = folder
        self._parts = parts
        self._rules = ChoiceRules(parts.directory.peer_id, has_one_state, self.steering.is_final)
        self._next_fetch_at = 0.0
        self._avoided: dict[Digest, float] = {}  # heads that nobody could prove, and until when
        self._validation = Validation()

    @property
    def bytes_received(self) -> int:
        """Return the bytes of states received by this process."""
        return self._parts.downloader.bytes_received

    @property
    def is_complete(self) -> bool:
        """Return whether the final state is held."""
        return self.blob is not None and self.steering.is_final(self.chain.head)

    def describe(self) -> str:
        """Return one line that says which state is held, or why none is."""
        if self.error:
            return f"the newest state is not kept: {self.error}"
        if self.blob is None:
            return "no state of the run is held yet"
        return f"holding the {'final ' if self.is_complete else ''}state of round {self.chain.round}"

    def restore(self) -> None:
        """Read the state that an earlier process kept. Raises CheckpointError or OtherRunError."""
        kept = self.folder.load()
        if kept is not None:
            self.blob, self._validation = kept.blob, kept.validation
            self.chain.switch_to(kept.head, kept.log)
            logger.info("holding the state of round %d", kept.head.round)

    async def run(self) -> None:
        """Keep the newest state until cancelled."""
        self._announce()
        self._publish_validation()
        while True:
            self._note_validation()
            offer = self._due_offer(time.monotonic())
            if offer is not None:
                await self._keep(offer)
            await asyncio.sleep(POLL_SECONDS)

    def _due_offer(self, now: float) -> StateOffer | None:
        """Return the state to fetch now: the final one at once, another one after the pause."""
        offer = self._choose()
        if offer is None or (now < self._next_fetch_at and not self.steering.is_final(offer.head)):
            return None
        return offer

    def _choose(self) -> StateOffer | None:
        snapshot = SwarmSnapshot(peer_states(self._parts.directory.live()))
        now = time.monotonic()
        self._avoided = {digest: until for digest, until in self._avoided.items() if until > now}
        own = self.chain.head if self.blob else None
        return choose_state(self._rules, snapshot, own, self.chain.electorate.voters, self._avoided)

    def _note_validation(self) -> None:
        """Repeat the newest validation loss in our record, for those who come when no trainer is left."""
        newest = find_newest_validation(self._parts.directory.live().values())
        if newest is not None and newest.validation_round > self._validation.round:
            self._validation = Validation(newest.validation_round, newest.validation_loss)
            self._publish_validation()

    def _publish_validation(self) -> None:
        self._parts.directory.publish(validation_round=self._validation.round, validation_loss=self._validation.loss)

    async def fetch_newest(self, find_seconds: float) -> FetchedState:
        """Fetch the newest state once, without keeping it as a host does.

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
        """Fetch and save a state; on a failure, say why and try again later."""
        began = time.monotonic()
        try:
            chain, blob = await self._fetch_both(offer)
            kept = KeptState(chain.head, chain.log, blob, self._validation)
            await asyncio.to_thread(self.folder.save, kept)
        except StorageError as error:
            self._fail(str(error))
            self._announce()  # without a state: peers must not wait for us
            await asyncio.sleep(DISK_RETRY_SECONDS)
        except (UnreachableError, PeerFault, MissingFileError) as error:
            logger.info("cannot keep the state of round %d: %s", offer.head.round, error)
            if isinstance(error, UncertifiedError):
                self._avoided[offer.head.digest] = time.monotonic() + AVOID_SECONDS
            await asyncio.sleep(CHOICE_SECONDS if isinstance(error, GoneError) else RETRY_SECONDS)
        else:
            self._adopt(kept)
            seconds = time.monotonic() - began
            self._next_fetch_at = time.monotonic() + max(MIN_PAUSE_SECONDS, seconds / LINK_SHARE)

    async def _fetch_both(self, offer: StateOffer) -> tuple[ChainOffer, Blob]:
        """Return the verified chain and the state, which is requested at once: its holders keep it from then on."""
        fetch = asyncio.create_task(self._fetch(offer), name="fetch state")
        try:
            return await self._fetch_chain(offer), await fetch
        finally:
            await cancel_and_wait((fetch,))

    async def _fetch(self, offer: StateOffer) -> Blob:
        """Download the state; what an earlier try or process has left of it is used."""
        blob = Blob(offer.state, self.folder.state_bytes)
        seconds = MIN_FETCH_SECONDS + blob.size / MIN_BYTES_PER_SECOND
        self._retain(blob)

        def holders() -> list[PeerId]:
            live = self._parts.directory.live()
            return [peer for peer in offer.holders if peer in live]

        await self._parts.downloader.fetch(blob, holders, seconds, wait_if_absent=False)
        return blob

    async def _fetch_chain(self, offer: StateOffer) -> ChainOffer:
        """Return the verified chain to a state, from one of its holders.

        Raises UnreachableError if none shows it, UncertifiedError if it is not to be followed.
        """
        live = self._parts.directory.live()
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
        shown = await self._parts.reader.read(peer, start)
        commits = tuple(entry for entry in shown.log.commits if entry.body.round < offer.head.round)
        state = offer.state if self._rules.has_one_state else b""
        chain = ChainOffer(ChainLog(shown.log.electorate, commits), offer.head, state)
        if not commits or chain.head.digest != offer.head.digest:
            raise StaleError("its chain leads elsewhere, or its log does not reach back far enough")
        await self._require_certified(chain)
        self.steering.learn(Adoption(chain.head.revision, shown.revisions))
        return chain

    async def _require_certified(self, chain: ChainOffer) -> None:
        """Raise UncertifiedError unless the chain is to be followed from that of the state that we hold."""
        word = None
        if needs_word(self.chain, chain):
            word = await ask_contacts(self._parts.reader, self._parts.contacts, chain)
        states = peer_states(self._parts.directory.live())
        live = SwarmSnapshot(states).trainers - {self._rules.peer_id}
        judgement = judge(self.chain, chain, Witnesses(self._rules.peer_id, live or frozenset(states), None, word))
        if judgement.relation != "ahead":
            raise UncertifiedError(judgement.reason or "the chain of the state that we hold is preferred")

    def _adopt(self, kept: KeptState) -> None:
        is_first = self.blob is None
        self.chain.switch_to(kept.head, kept.log)
        self.blob, self.error = kept.blob, ""
        self._announce()
        self._retain(kept.blob)
        final = "the final state, " if self.is_complete else "the state "
        level = logging.INFO if self.is_complete or is_first else logging.DEBUG  # the rest repeats itself
        logger.log(level, "holding %sof round %d (%s)", final, kept.head.round, format_bytes(kept.blob.size))

    def _retain(self, wanted: Blob) -> None:
        """Keep the state that we hold, the wanted one, and those that peers are downloading."""
        requested = self.folder.requested(self._parts.requests.recently_requested())
        held = {self.blob.digest} if self.blob else set()
        self.folder.retain(*requested, *held, wanted.digest)

    def _fail(self, reason: str) -> None:
        if reason != self.error:
            logger.error("the newest state of the run is not kept: %s", reason)
        self.error = reason

    def _announce(self) -> None:
        """Publish the state that we hold; before the first, the start of the chain shows that we keep states."""
        head, state = self.chain.head, self.blob.digest if self.blob else b""
        self._parts.directory.set_voters(self.chain.electorate.voters)
        if self.error:
            head, state = ChainHead(0, b"", 0), b""
        self._parts.directory.publish(
            urgent=True, round=head.round, digest=head.digest, chain_tokens=head.tokens, state_digest=state
        )


def build_keeper(node: Node, run_dir: RunDir) -> StateKeeper:
    """Build the keeper of a node that does not train, with the state that an earlier process kept.

    Call it before the node opens. Raises ManifestError, CheckpointError, OtherRunError or StorageError.
    """
    manifest = node.options.manifest
    planner = build_program(manifest)
    folder = StateFolder(run_dir, manifest, planner)
    limits = contribution_limits(manifest, planner)
    parts = KeeperParts(
        directory=node.directory,
        downloader=Downloader(folder.store, node.transport.bulk, random.Random(os.urandom(16))),
        reader=ChainReader(manifest.run_id, limits, node.transport.channel, manifest.admission),
        requests=node.blob_service,
        contacts=node.options.contact_ids,
        revisions=node.revisions.log,
    )
    node.metrics.add_refusal_counter(parts.downloader)
    has_one_state = topology_class(planner.method).has_shared_state
    keeper = StateKeeper(manifest, folder, parts, has_one_state)
    keeper.restore()
    node.add_chain(manifest.run_id, ServedChain(keeper, keeper.steering, has_one_state), folder.store)
    return keeper
