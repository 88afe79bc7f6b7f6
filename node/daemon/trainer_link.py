"""The daemon's dealings with its trainer: anchors in, messages out, over any number of trainer deaths.

The anchor of round r lies in the arena's buffer r % 2. It is written only once the trainer has adopted round r - 1, so
a trainer never reads a buffer that changes under it.

A fate goes out in one Adopt only: to a trainer that has that message outstanding. Said twice, it would be taken for
that of the next message. So nothing is sent to a trainer between its death and its Ready; the greeting tells it all.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from node.ipc.channel import (
    AnchorApplied,
    ApplyAnchor,
    ContributionHeader,
    Evaluate,
    Evaluated,
    FromTrainer,
    PauseChanged,
    Ready,
    RevisedOutcome,
    SubmitEarly,
    TrainerProgress,
    TrainerWarning,
)
from node.ipc.shared_memory import SharedMemory
from node.ipc.trainer_process import TrainerProcess
from node.loop.contributions import (
    ContributionFile,
    ContributionTracker,
    ForkOutcome,
    LastSent,
    SettledContribution,
    StoredContribution,
    store_parts,
)
from node.monitoring.status import ErrorRecorder
from node.workers import RunInThread
from protocol.blobs.store import BlobStore

APPLY_ANCHOR_SECONDS = 60.0
LAST_APPLY_ANCHOR_SECONDS = 5.0


class TrainerListener(Protocol):
    def on_trainer_message(self, message: FromTrainer) -> None:
        """Take note of a message of the trainer; a new contribution is in the tracker by then."""


class StepTargets(Protocol):
    def steps_for(self, number: int) -> int:
        """Return the inner steps to take for a round."""


@dataclass(frozen=True, kw_only=True)
class TrainerTools:
    """The trainer's process, and where its contributions are read and kept."""

    process: TrainerProcess
    shared_memory: SharedMemory
    store: BlobStore
    contribution_file: ContributionFile
    run_in_thread: RunInThread


class TrainerLink:
    """Hands anchors to the trainer of one replica and takes its contributions."""

    def __init__(
        self,
        tools: TrainerTools,
        contributions: ContributionTracker,
        step_targets: StepTargets,
        listener: TrainerListener,
        errors: ErrorRecorder,
    ) -> None:
        self._process = tools.process
        self._shared_memory = tools.shared_memory
        self._store = tools.store
        self._contribution_file = tools.contribution_file
        self._run_in_thread = tools.run_in_thread
        self.contributions = contributions
        self._step_targets = step_targets
        self._listener = listener
        self._errors = errors
        self._round = 0
        self._started = asyncio.Event()
        self._changed = asyncio.Condition()  # of the two below
        self._running = False
        self._applied_round = 0
        self._ready_crash_count = -1  # deaths before the life that said Ready last
        self._outstanding: int | None = None  # round of the message whose fate the living trainer waits for
        self._resent_round: int | None = None  # the same, where it will send that message again
        # Earlier fates have changed: until it has heard of that, it sends too much or too little, which is not offered.
        self._revision_pending = bool(self._revised_outcomes())
        self._revision_sent = False
        self._pump: asyncio.Task[None] | None = None
        self.submit_lock = asyncio.Lock()  # held while blobs are put that no offer names yet

    @property
    def crash_count(self) -> int:
        return self._process.crash_count

    @property
    def not_running_reason(self) -> str:
        """Why no trainer is at work; empty where one is."""
        return self._process.not_running_reason

    @property
    def round(self) -> int:
        """Of the anchor that the trainer was last told of."""
        return self._round

    async def start(self, round_number: int, shared: Sequence[Tensor]) -> None:
        self._round = self._process.round = self._applied_round = round_number
        self._shared_memory.write_anchor(round_number, shared)
        await self._process.start()
        self._running = True
        self._pump = asyncio.create_task(self._listen(), name="trainer link")
        self._started.set()

    async def wait_finished(self) -> None:
        """Ends only with the trainer: raises what made it fail for good."""
        await self._started.wait()
        assert self._pump is not None
        await asyncio.shield(self._pump)

    async def stop(self, round_number: int) -> None:
        """The trainer adopts that round, writes a last snapshot and ends; nothing of it is left."""
        if not await self.wait_until_applied(round_number, LAST_APPLY_ANCHOR_SECONDS):
            self._errors.record_recovered(
                "trainer late", f"the trainer stops before it has adopted round {round_number}"
            )
        await self._process.stop()
        if self._pump is not None:
            await asyncio.wait({self._pump}, timeout=LAST_APPLY_ANCHOR_SECONDS)
        async with self._changed:
            self._running = False
            self._changed.notify_all()

    def record_fork(self, verdict: ForkOutcome) -> None:
        """Note that another chain judges our earlier contributions otherwise than the one that we left."""
        if verdict.revised:
            self._revision_pending = True
            self._revision_sent = False

    async def apply_anchor(self, round_number: int, shared: Sequence[Tensor]) -> None:
        """Hand the trainer a new anchor, and the fate of its message if that is decided."""
        if not self._running:
            return
        while not await self.wait_until_applied(
            self._round, APPLY_ANCHOR_SECONDS
        ):  # one that is stuck is started again
            line = f"the trainer has not adopted round {self._round} for {APPLY_ANCHOR_SECONDS:g} s"
            self._errors.record_recovered("trainer late", line)
        await self._run_in_thread(self._shared_memory.write_anchor, round_number, shared)
        self._round = self._process.round = round_number
        self.contributions.on_round(round_number)  # a message may have come while the copy was under way
        # On another chain the number may be lower, and is not adopted yet for all that.
        self._applied_round = min(self._applied_round, round_number - 1)
        if self._process.crash_count == self._ready_crash_count:
            await self._send_anchor()

    async def wait_until_applied(self, round_number: int, seconds: float = APPLY_ANCHOR_SECONDS) -> bool:
        """Also true where no trainer runs: its snapshot lies still, and the greeting of the next one tells the rest."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(partial(self._has_applied, round_number))
        except TimeoutError:
            return False
        return True

    def _has_applied(self, round_number: int) -> bool:
        return self._applied_round >= round_number or not self._running

    async def request_evaluation(self) -> None:
        """Ask for the validation loss of the newest anchor; the answer comes through `heard`."""
        await self._process.send(Evaluate(round=self._round))

    async def request_early_submit(self) -> None:
        """Ask for what it has made for the round that it stands at."""
        await self._process.send(SubmitEarly(round=self._round))

    async def _listen(self) -> None:
        async for message in self._process.messages():
            match message:
                case Ready():
                    await self._on_ready(message)
                case ContributionHeader():
                    await self._on_contribution(message)
                case AnchorApplied():
                    await self._on_anchor_applied(message.round)
                case TrainerProgress() | Evaluated() | PauseChanged() | TrainerWarning():
                    pass
            self._listener.on_trainer_message(message)

    async def _on_ready(self, ready: Ready) -> None:
        """A trainer that (re)started may be behind, or wait for a fate that was decided meanwhile."""
        self._ready_crash_count = self._process.crash_count
        self._outstanding = ready.outstanding
        self._resent_round = ready.outstanding
        if (
            ready.round != self._round
            or self.contributions.outcome_of(ready.outstanding) != "none"
            or self._revised_outcomes()
        ):
            await self._send_anchor()
        else:
            await self._on_anchor_applied(ready.round)

    async def _send_anchor(self) -> None:
        fate = self.contributions.outcome_of(self._outstanding)
        if fate != "none":
            self._outstanding = None
        self._revision_sent = self._revision_pending
        steps = self._step_targets.steps_for(self._round)
        await self._process.send(
            ApplyAnchor(round=self._round, outcome=fate, steps=steps, revised=self._revised_outcomes())
        )

    def _revised_outcomes(self) -> tuple[RevisedOutcome, ...]:
        return tuple(
            RevisedOutcome(
                header=entry.contribution.header,
                parts=tuple(blob.name for blob in entry.contribution.parts),
                outcome=entry.outcome,
            )
            for entry in self.contributions.settled
            if entry.previous_outcome is not None
        )

    async def _on_anchor_applied(self, round_number: int) -> None:
        if self._revision_sent and round_number == self._round:
            self._revision_pending = self._revision_sent = False
        if round_number <= self._round:  # a greater one is of the chain that we left
            async with self._changed:
                self._applied_round = max(self._applied_round, round_number)
                self._changed.notify_all()

    async def _on_contribution(self, header: ContributionHeader) -> None:
        """Put the parts of a new message where others can fetch them."""
        repeated, self._resent_round = self._resent_round == header.round, None
        if repeated and self.contributions.is_known(header):
            return
        self._outstanding = header.round
        async with self.submit_lock:
            past = None if self._revision_pending else tuple(self.contributions.settled)
            offer = await self._run_in_thread(self._store_contribution, header, past)
            if self._revision_pending:
                self._errors.record_recovered(
                    "sent again", f"the message of round {header.round} is of the chain that was left"
                )
                self.contributions.reject(offer, self._round)
            else:
                self.contributions.submit(offer, self._round)
        # Made for a round that was decided meanwhile: the one that is open may be unable to take it.
        self.contributions.on_round(self._round)
        if self.contributions.pending is None and self._process.crash_count == self._ready_crash_count:
            await self._send_anchor()

    def _store_contribution(
        self, header: ContributionHeader, settled: tuple[SettledContribution, ...] | None
    ) -> StoredContribution:
        """`past`: the messages before it; None: it is not to be offered."""
        offer = StoredContribution(header, store_parts(self._store, self._shared_memory, header))
        if settled is not None:
            self._contribution_file.save(LastSent(offer, settled))
        return offer
