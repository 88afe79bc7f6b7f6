"""Carry out the actions of the round loop in asyncio; their results come back as events.

`RoundEffects` downloads, checks and reduces the blobs of the open round, `VoteEffects` persists votes, and
`StateEffects` (`state_effects.py`) changes our state.
"""

import asyncio

from node.daemon.checkpoints.vote_log import ConvictionFile, ProofFile, VoteLog
from node.daemon.inbox import Inbox, MessageReceiver
from node.daemon.peers.downloads import Downloads
from node.daemon.peers.peer_rpc import Outbox
from node.daemon.state.outer_state import RoundCompute
from node.daemon.state_effects import StateEffects
from node.loop.actions import (
    AdoptState,
    AdvanceState,
    ApplyCommit,
    CloseRound,
    FetchBlob,
    FetchState,
    FindPath,
    LeaveRun,
    LoopAction,
    PrecomputeCommit,
    PublishHead,
    PublishStep,
    ReducePart,
    ReportCatchUp,
    ReportConduct,
    ReportMissed,
    ReportPace,
    ReportPhase,
    ReportRecovered,
    RestTrainer,
    SaveProofs,
    SendReply,
    StartTrainer,
    TakeState,
    TargetReached,
)
from node.loop.events import (
    BlobFetched,
    BlobMissing,
    LoopEvent,
    NodeLeaving,
    Started,
    SumReady,
    TimePassed,
    VotePersisted,
)
from node.loop.round_loop import RoundLoop
from node.monitoring.status_reporter import StatusReporter
from node.processes.workers import BackgroundTasks, RunInThread
from protocol.blobs.store import BlobStore
from protocol.consensus.events import PartReduced, Rejected, RequestEarlySubmit, Send, VoteRecord
from protocol.errors import DeniedError, MissingFileError, PeerFault, StorageError, UnreachableError
from protocol.identity import PeerId

RETRY_SECONDS = 1.0


class Effects:
    """Passes each event of the inbox to the loop, runs the actions in order, and keeps the loop's timer."""

    def __init__(
        self, loop: RoundLoop, inbox: Inbox, receiver: MessageReceiver, outbox: Outbox,
        round_effects: "RoundEffects", state_effects: StateEffects,
    ) -> None:  # fmt: skip
        self._loop = loop
        self._inbox = inbox
        self._receiver = receiver
        self._outbox = outbox
        self._round = round_effects
        self._state = state_effects
        self._tasks = BackgroundTasks(inbox)
        self._timer: asyncio.TimerHandle | None = None
        self.reached: TargetReached | None = None  # the end of the run
        inbox.attach(self.handle)

    async def run(self) -> None:
        """Take part in the run until its target is reached. Raises an error in our own code."""
        self._inbox.post(Started())
        try:
            await self._inbox.wait_until_ended()
        finally:
            self._tasks.cancel_all()

    def stop(self) -> None:
        """Leave the run, but still answer peers that ask about decided rounds."""
        self._inbox.post(NodeLeaving())
        self._tasks.cancel_all()

    def handle(self, event: LoopEvent) -> None:
        for action in self._loop.handle(event, _now()):
            self._run(action)
        self._set_timer()

    def _run(self, action: LoopAction) -> None:
        match action:
            case Send(peers, signed):
                self._outbox.send(peers, signed)
            case SendReply():
                self._receiver.answer(action, self._outbox)
            case FetchBlob():
                self._round.fetch(action)
            case ReducePart():
                self._round.reduce(action)
            case VoteRecord():
                self._round.votes.persist(action)
            case SaveProofs():
                self._round.votes.save_proofs(action)
            case CloseRound():
                self._round.close_round()
            case _:
                self._run_on_state(action)

    def _run_on_state(self, action: LoopAction) -> None:
        match action:
            case PrecomputeCommit():
                self._state.precompute(action)
            case RequestEarlySubmit():
                self._tasks.spawn(self._state.request_early_submit())
            case StartTrainer():
                self._tasks.spawn(self._state.start_trainer())
            case ApplyCommit():
                self._tasks.spawn(self._state.apply_commit(action))
            case AdvanceState(_, verdict):
                self._state.record_revised(verdict)
                self._tasks.spawn(self._state.advance_state(action))
            case PublishStep():
                self._state.publish_step(action)
            case PublishHead():
                self._tasks.spawn(self._state.publish_head(action))
            case FindPath():
                self._tasks.spawn(self._state.find_path(action))
            case FetchState():
                self._tasks.spawn(self._state.fetch_state(action))
            case TakeState():
                self._tasks.spawn(self._state.take_state(action))
            case AdoptState():
                self._state.record_revised(action.verdict)
                self._state.begin_adoption(action)
                self._tasks.spawn(self._state.adopt_state(action))
            case RestTrainer(is_resting):
                self._tasks.spawn(self._state.set_resting(is_resting))
            case TargetReached():
                self.reached = action
                self._inbox.end()
            case LeaveRun(is_extended):
                self._inbox.leave(is_extended)
            case (
                ReportPhase()
                | ReportRecovered()
                | ReportMissed()
                | ReportPace()
                | ReportCatchUp()
                | ReportConduct()
                | Rejected()
            ):
                self._state.report(action)

    def _set_timer(self) -> None:
        deadline = self._loop.next_deadline(_now())
        if self._timer is not None:
            if self._timer.when() == deadline and not self._timer.cancelled():
                return
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._inbox.post(TimePassed())


def _now() -> float:
    return asyncio.get_running_loop().time()


class RoundEffects:
    """Carries out the actions of the open round of one replica."""

    def __init__(
        self, downloads: Downloads, compute: RoundCompute, run_in_thread: RunInThread, votes: "VoteEffects",
        inbox: Inbox, status: StatusReporter,
    ) -> None:  # fmt: skip
        self.votes = votes
        self._downloads = downloads
        self._compute = compute
        self._run_in_thread = run_in_thread
        self._inbox = inbox
        self._status = status
        self._tasks = BackgroundTasks(inbox)

    def fetch(self, action: FetchBlob) -> None:
        if self._downloads.request(action.part_blob, action.sources):
            self._tasks.spawn(self._fetch(action))

    def reduce(self, action: ReducePart) -> None:
        self._tasks.spawn(self._reduce(action))

    def close_round(self) -> None:
        self._downloads.cancel_all()
        self._tasks.cancel_all()

    async def _fetch(self, action: FetchBlob) -> None:
        """Retry until the blob is complete and well-formed, or the round closes (which cancels this)."""
        name, round_number = action.part_blob.blob.name[:12], action.round
        try:
            owners = action.owners
            while not await self._has_arrived(action, owners):
                owners = ()
                self._status.record_recovered("blob late", f"round {round_number} still needs blob {name}")
                await asyncio.sleep(RETRY_SECONDS)
        except (PeerFault, StorageError) as error:
            line = f"round {round_number} continues here without blob {name}: {error}"
            self._status.record_recovered("blob missing", line)
            self._downloads.cancel(action.part_blob)
            if isinstance(error, PeerFault):
                self._inbox.post(BlobMissing(action.opening, action.owners, "does not decode"))
            return
        self._downloads.cancel(action.part_blob)
        self._inbox.post(BlobFetched(action.opening, action.part_blob))

    async def _has_arrived(self, action: FetchBlob, owners: tuple[PeerId, ...]) -> bool:
        """Return whether the blob is here; report an owner that denies it, since others may have it nevertheless."""
        blob, part = action.part_blob
        try:
            await self._downloads.download(
                action.part_blob, action.seconds, action.owner_message, action.priority, owners
            )
            await self._run_in_thread(self._compute.check_part, blob, action.round, part)
        except DeniedError as error:
            self._inbox.post(BlobMissing(action.opening, (error.peer,), "not served"))
            return False
        except (UnreachableError, MissingFileError):  # or it was damaged on our disk and removed
            return False
        return True

    async def _reduce(self, action: ReducePart) -> None:
        order = action.order
        bodies = [contribution.body for contribution in order.contributions]
        try:
            found = await self._run_in_thread(self._compute.reduce_part, action.round, order.part, bodies)
        except (PeerFault, MissingFileError, StorageError) as error:
            line = f"part {order.part} of round {action.round} cannot be reduced here: {error}"
            self._status.record_recovered("not reduced", line)
            return
        for index, reason in sorted(found.left_out.items()):
            self._status.record_left_out(order.contributions[index].sender, reason)
        self._inbox.post(SumReady(action.opening, PartReduced(order.part, order.request_id, found.blob)))


class VoteEffects:
    """Writes what a replica is bound by: its votes, and the proofs of misdeeds that it knows."""

    def __init__(
        self, store: BlobStore, vote_log: VoteLog, proof_file: ProofFile, conviction_file: ConvictionFile, inbox: Inbox
    ) -> None:
        self._store = store
        self._vote_log = vote_log
        self._proof_file = proof_file
        self._conviction_file = conviction_file
        self._inbox = inbox
        self._tasks = BackgroundTasks(inbox)  # they outlive the round, because two threads must not write at once
        self._proof_lock = asyncio.Lock()

    def persist(self, vote: VoteRecord) -> None:
        self._tasks.spawn(self._persist(vote))

    def save_proofs(self, action: SaveProofs) -> None:
        self._tasks.spawn(self._save_proofs(action))

    async def _persist(self, vote: VoteRecord) -> None:
        try:
            await asyncio.to_thread(self._write_vote, vote)
        except StorageError as error:
            # A peer whose vote is not on disk must send nothing more in this round (safety), so the node ends.
            self._inbox.fail(error)
            return
        self._inbox.post(VotePersisted())

    def _write_vote(self, vote: VoteRecord) -> None:
        for blob in vote.required_blobs:
            self._store.persist(blob.digest)
        self._vote_log.save(vote)

    async def _save_proofs(self, action: SaveProofs) -> None:
        try:
            async with self._proof_lock:  # the last call wins
                await asyncio.to_thread(self._proof_file.save, action.proofs)
                await asyncio.to_thread(self._conviction_file.save, action.convictions)
        except StorageError as error:
            self._inbox.fail(error)  # the user has to act on it
