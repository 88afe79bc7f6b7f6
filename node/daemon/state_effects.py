"""Carry out the actions that change our state, and keep the trainer, the disk and other peers up to date."""

from collections.abc import Sequence

from torch import Tensor

from node.daemon.inbox import Inbox
from node.daemon.peers.replica_peers import ReplicaPeers
from node.daemon.replica_work import ReplicaWork
from node.daemon.state.outer_state import OuterState, Rooms, SignedContributions
from node.daemon.state.replica_state import ReplicaState
from node.loop.actions import (
    AdoptState,
    AdvanceState,
    ApplyCommit,
    FetchState,
    FindPath,
    PrecomputeCommit,
    PublishHead,
    PublishStep,
    ReportCatchUp,
    ReportConduct,
    ReportMissed,
    ReportPace,
    ReportPhase,
    ReportRecovered,
    TakeState,
)
from node.loop.contributions import ForkOutcome
from node.loop.events import (
    ApplyFailed,
    CommitApplied,
    CommitComputed,
    HeadPublished,
    PathFound,
    StateFetched,
    StateInstalled,
    SyncFailed,
    TrainerStarted,
)
from node.monitoring.status_reporter import StatusReporter
from node.step_settings import StepSettings, step_settings
from node.trainer.ipc.channel import ContributionOutcome
from protocol.consensus.events import Rejected
from protocol.consensus.messages.contributions import AppliedContributions, Commit
from protocol.errors import GoneError, MissingFileError, PeerFault, StorageError, UnreachableError

MIN_STATE_SECONDS = 15.0  # to download a state, plus its size / MIN_BYTES_PER_SECOND
MIN_BYTES_PER_SECOND = 1_000_000
Report = ReportPhase | ReportRecovered | ReportMissed | ReportPace | ReportCatchUp | ReportConduct | Rejected
RECOVERABLE = (UnreachableError, PeerFault, MissingFileError, StorageError)


class StateEffects:
    """Carries out the state actions of one replica; each method posts the event that answers its action."""

    def __init__(
        self, state: ReplicaState, peers: ReplicaPeers, work: ReplicaWork, inbox: Inbox, status: StatusReporter
    ) -> None:
        self._state = state
        self._replicated = state.replicated
        self._steering = state.steering
        self._peers = peers
        self._work = work
        self._trainer = work.trainer
        self._checkpointer = work.checkpointer
        self._inbox = inbox
        self._status = status
        self._computed: OuterState | None = None

    def report(self, action: Report) -> None:
        status = self._status
        match action:
            case ReportPhase(phase, reason):
                status.set_phase(phase, reason)
            case ReportRecovered(kind, line):
                status.record_recovered(kind, line)
            case ReportMissed(reason):
                status.set_miss_reason(reason)
            case ReportPace(text):
                status.set_pace(text)
            case ReportCatchUp(kind, rounds):
                status.record_catch_up(kind, rounds)
            case ReportConduct(lines):
                status.set_conduct(lines)
            case Rejected(peer, reason):
                status.record_rejected(peer, reason)

    def precompute(self, action: PrecomputeCommit) -> None:
        rooms = self._rooms(action.commit.round + 1)
        self._replicated.speculate(action.commit, action.contributions, rooms)

    async def request_early_submit(self) -> None:
        self._status.record_early_submit()
        await self._work.request_early_submit()

    async def start_trainer(self) -> None:
        round_number = self._replicated.chain.round
        self._remember_anchor(round_number, self._shared_vectors())
        step = self._replicated.state.exact_step
        await self._checkpointer.free_anchor(round_number, self._replicated.blob)
        await self._trainer.start(round_number, self._shared_vectors(), self._settings(), step)
        await self._place_state()
        self._inbox.post(TrainerStarted())

    async def set_resting(self, is_resting: bool) -> None:
        await self._work.set_resting(is_resting)

    def _remember_anchor(self, round_number: int, shared: list[Tensor]) -> None:
        if self._work.auditor is not None:
            self._work.auditor.remember_anchor(round_number, shared)

    def _settings(self) -> StepSettings:
        chain = self._replicated.chain
        return step_settings(self._steering.manifest_at(chain.round), chain.round, chain.tokens)

    async def apply_commit(self, action: ApplyCommit) -> None:
        try:
            contributions = await self._obtain(action)
            rooms = self._rooms(action.commit.body.round + 1)
            self._computed = await self._replicated.compute_next(action.commit, contributions, rooms)
        except RECOVERABLE as error:
            self._inbox.post(ApplyFailed(str(error)))
        else:
            self._inbox.post(CommitComputed(contributions))

    async def advance_state(self, action: AdvanceState) -> None:
        """Give the state to the trainer first; hashing the state takes long and delays no one."""
        state, self._computed = self._computed, None
        assert state is not None
        round_number = action.commit.body.round + 1
        head = self._replicated.chain.head_after([action.commit])
        settings = step_settings(self._steering.manifest_after(action.commit.body), head.round, head.tokens)
        self._remember_anchor(round_number, state.shared_vectors(self._state.method))
        step = state.exact_step
        await self._checkpointer.free_anchor(round_number, self._replicated.blob)
        shared = state.shared_vectors(self._state.method)
        await self._trainer.apply_anchor(round_number, shared, settings, step, head.digest)
        await self._replicated.advance(action.commit, await self._placed(round_number, state))
        self._inbox.post(CommitApplied(self._replicated.blob.digest))

    def publish_step(self, action: PublishStep) -> None:
        self._peers.swarm_view.announce_step(action.round, action.is_complete, action.lacking)
        if self._work.stage is not None:
            self._work.stage.on_membership_changed(())

    async def publish_head(self, action: PublishHead) -> None:
        await self._checkpointer.wait_until_announceable(self._replicated)
        step_scale = self._replicated.step_scale(action.commit, action.contributions)
        self._status.record_applied(AppliedContributions.of(action.contributions), step_scale)
        for peer, reason in self._replicated.state.left_out:
            self._status.record_left_out(peer, reason)
        # The commit shows the others that we are about to have its head, if it includes us. At the end nothing follows.
        urgent = action.outcome != "included" or self._steering.is_target_reached
        self._announce([action.commit], action.outcome, urgent)
        await self._save([action.commit])
        if self._work.auditor is not None:
            self._work.auditor.on_commit(self._replicated.chain)
        self._checkpointer.confirm_round()
        self._inbox.post(HeadPublished())

    async def find_path(self, action: FindPath) -> None:
        try:
            offer = await self._peers.sync_client.ask(action.peer, action.since)
        except RECOVERABLE as error:
            self._inbox.post(SyncFailed(str(error), isinstance(error, GoneError)))
        else:
            self._inbox.post(PathFound(offer))

    async def fetch_state(self, action: FetchState) -> None:
        try:
            await self._download_state(action)
        except RECOVERABLE as error:
            self._inbox.post(SyncFailed(str(error), isinstance(error, GoneError)))
        else:
            self._inbox.post(StateFetched())

    async def _download_state(self, action: FetchState | TakeState) -> None:
        seconds = MIN_STATE_SECONDS + action.state.size / MIN_BYTES_PER_SECOND
        await self._peers.downloads.download_from_holders(action.state, seconds, action.holders)

    async def take_state(self, action: TakeState) -> None:
        chain = action.offer.chain
        try:
            await self._download_state(action)
            await self._checkpointer.keep_before_jump()
            await self._replicated.install_state(chain.head, chain.log, action.state, self._steering.base)
        except RECOVERABLE as error:
            self._inbox.post(SyncFailed(str(error), isinstance(error, GoneError)))
        else:
            self._inbox.post(StateInstalled(self._replicated.blob.digest))

    def record_revised(self, verdict: ForkOutcome) -> None:
        """Report revised outcomes at once: from now on they apply to the trainer's next contribution."""
        self._trainer.record_fork(verdict)
        self._status.record_revised(verdict.revised)

    def begin_adoption(self, action: AdoptState) -> None:
        """Report the jump to a chain or a later round."""
        self._status.reset_validation(self._replicated.chain.head)
        self._status.record_catch_up("skipped", action.skipped)

    async def adopt_state(self, action: AdoptState) -> None:
        """Announce the state only once it is on disk: a kill would revert all skipped rounds."""
        round_number, shared = self._replicated.chain.round, self._shared_vectors()
        self._remember_anchor(round_number, shared)
        step = self._replicated.state.exact_step
        await self._checkpointer.free_anchor(round_number, self._replicated.blob)
        base = self._replicated.chain.digest
        await self._trainer.apply_anchor(round_number, shared, self._settings(), step, base)
        await self._place_state()
        await self._save(action.commits)
        await self._checkpointer.wait_until_saved()
        self._announce(action.commits, action.verdict.outcome)
        self._inbox.post(HeadPublished())

    def _rooms(self, round_number: int) -> Rooms:
        """Return the memory of the vectors of a round, as far as nobody reads it any more.

        All computations run in one thread, one after another, so the last one that was asked for writes last.
        """
        if not self._checkpointer.is_anchor_free(round_number, self._replicated.blob):
            return {}
        return {**self._trainer.anchor_rooms(round_number), **self._state.outer_vectors.rooms(round_number)}

    async def _place_state(self) -> None:
        replicated = self._replicated
        replicated.state = await self._placed(replicated.chain.round, replicated.state)

    async def _placed(self, round_number: int, state: OuterState) -> OuterState:
        """Return the state of a round with its vectors in their own memory, which the checkpointer has freed."""
        shared = self._trainer.share_memory(round_number, state)
        placed: OuterState = await self._state.workers.compute(self._state.outer_vectors.place, round_number, shared)
        return placed

    def _shared_vectors(self) -> list[Tensor]:
        return self._replicated.state.shared_vectors(self._state.method)

    async def _obtain(self, action: ApplyCommit) -> SignedContributions:
        """Return the contributions to apply, with their blobs in the store."""
        commit, downloads = action.commit.body, self._peers.downloads
        if not action.contributions:
            return ()
        if not action.may_lose:
            await downloads.download_from_anyone(action.seconds, *commit.blobs)
            return action.contributions
        obtained = []
        for entry in action.contributions:
            try:
                await downloads.download_from_anyone(action.seconds, entry.body.parts[0])
                obtained.append(entry)
            except (UnreachableError, MissingFileError) as error:  # it may be lost with its owner
                line = f"round {commit.round} is applied here without {entry.sender}: {error}"
                self._status.record_recovered("partner lost", line)
        return tuple(obtained)

    def _announce(self, commits: Sequence[Commit], outcome: ContributionOutcome, urgent: bool = True) -> None:
        """Report the new head to people and peers."""
        replicated = self._replicated
        self._checkpointer.schedule = self._steering.manifest_at(replicated.chain.round).checkpoint
        self._status.set_revisions(self._steering.revisions_in_force, replicated.chain.round)
        self._status.record_rounds(replicated.chain.head, replicated.blob.digest, commits, outcome)
        self._peers.swarm_view.announce_head(replicated.chain, replicated.blob.digest, urgent)

    async def _save(self, commits: Sequence[Commit]) -> None:
        """Retain the blobs that peers may request, and start to write a checkpoint."""
        self._state.revisions.adopt(self._replicated.chain.head.revision)
        contributions = self._state.contributions
        await self._checkpointer.retain_state(self._replicated.blob)
        async with self._trainer.intake.lock:
            self._checkpointer.prune_blobs(contributions, commits)
        await self._checkpointer.save_in_background(self._replicated, contributions)
