"""Carry out the actions of an open round: download, check and reduce blobs, and persist votes."""

import asyncio
from dataclasses import dataclass

from node.daemon.checkpoints.vote_log import VoteLog
from node.daemon.inbox import Inbox
from node.daemon.peers.downloads import Downloads
from node.daemon.state.outer_state import RoundCompute
from node.daemon.state.proof_file import ProofFile
from node.loop.actions import FetchBlob, ReducePart
from node.loop.events import BlobFetched, FetchFailed, SumReady, VotePersisted
from node.monitoring.status_reporter import StatusReporter
from node.processes.workers import BackgroundTasks, RunInThread
from protocol.blobs.store import BlobStore
from protocol.conduct import Proof
from protocol.consensus.events import PartReduced, VoteRecord
from protocol.consensus.messages.signed import SignedMessage
from protocol.errors import DeniedError, MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId

RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class RoundTools:
    """The parts of a node that a round needs."""

    store: BlobStore
    downloads: Downloads
    compute: RoundCompute
    run_in_thread: RunInThread
    vote_log: VoteLog
    proof_file: ProofFile


class RoundEffects:
    """Carries out the actions of the open round of one replica."""

    def __init__(self, inbox: Inbox, status: StatusReporter, tools: RoundTools) -> None:
        self._inbox = inbox
        self._status = status
        self._tools = tools
        self._tasks = BackgroundTasks(inbox)
        self._proof_lock = asyncio.Lock()
        self._vote_tasks = BackgroundTasks(inbox)  # outlive the round: two threads must not write at once

    def fetch(self, action: FetchBlob) -> None:
        if self._tools.downloads.request(action.part_blob, action.sources):
            self._tasks.spawn(self._fetch(action))

    def reduce(self, action: ReducePart) -> None:
        self._tasks.spawn(self._reduce(action))

    def persist(self, vote: VoteRecord) -> None:
        self._vote_tasks.spawn(self._persist(vote))

    def save_proofs(self, proofs: tuple[SignedMessage[Proof], ...]) -> None:
        self._vote_tasks.spawn(self._save_proofs(proofs))

    async def _save_proofs(self, proofs: tuple[SignedMessage[Proof], ...]) -> None:
        try:
            async with self._proof_lock:  # the last call wins
                await asyncio.to_thread(self._tools.proof_file.save, proofs)
        except StorageError as error:
            self._inbox.fail(error)  # the user has to act on it

    def close_round(self) -> None:
        self._tools.downloads.cancel_all()
        self._tasks.cancel_all()

    async def _persist(self, vote: VoteRecord) -> None:
        """If the vote cannot be persisted, send nothing more (safety): the node ends."""
        try:
            await asyncio.to_thread(self._write_vote, vote)
        except StorageError as error:
            self._inbox.fail(error)  # the user has to act on it
            return
        self._inbox.post(VotePersisted())

    def _write_vote(self, vote: VoteRecord) -> None:
        for blob in vote.required_blobs:
            self._tools.store.persist(blob.digest)
        self._tools.vote_log.save(vote)

    async def _fetch(self, action: FetchBlob) -> None:
        """Retry until the blob is complete and well-formed, or the round closes (which cancels this)."""
        name, round_number, downloads = action.part_blob.blob.name[:12], action.round, self._tools.downloads
        try:
            owners = action.owners
            while not await self._has_arrived(action, owners):
                owners = ()
                self._status.record_recovered("blob late", f"round {round_number} still needs blob {name}")
                await asyncio.sleep(RETRY_SECONDS)
        except (PeerFault, StorageError) as error:
            line = f"round {round_number} continues here without blob {name}: {error}"
            self._status.record_recovered("blob missing", line)
            downloads.cancel(action.part_blob)
            if isinstance(error, PeerFault):
                self._inbox.post(FetchFailed(action.opening, action.owners, "does not decode"))
            return
        downloads.cancel(action.part_blob)
        self._inbox.post(BlobFetched(action.opening, action.part_blob))

    async def _has_arrived(self, action: FetchBlob, owners: tuple[PeerId, ...]) -> bool:
        """Return whether the blob is here; report an owner that denies it, since others may have it nevertheless."""
        tools, (blob, part) = self._tools, action.part_blob
        try:
            await tools.downloads.download(
                action.part_blob, action.seconds, action.owner_message, action.priority, owners
            )
            await tools.run_in_thread(tools.compute.check_part, blob, action.round, part)
        except DeniedError as error:
            self._inbox.post(FetchFailed(action.opening, (error.peer,), "not served"))
            return False
        except (UnreachableError, MissingFileError):  # or it was damaged on our disk and removed
            return False
        return True

    async def _reduce(self, action: ReducePart) -> None:
        tools, order = self._tools, action.order
        bodies = [contribution.body for contribution in order.contributions]
        try:
            found = await tools.run_in_thread(tools.compute.reduce_part, action.round, order.part, bodies)
        except (PeerFault, MissingFileError, StorageError) as error:
            line = f"part {order.part} of round {action.round} cannot be reduced here: {error}"
            self._status.record_recovered("not reduced", line)
            return
        for index, reason in sorted(found.left_out.items()):
            self._status.record_left_out(order.contributions[index].sender, reason)
        self._inbox.post(SumReady(action.opening, PartReduced(order.part, order.request_id, found.blob)))
