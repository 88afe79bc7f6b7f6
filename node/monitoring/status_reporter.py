"""Why a round went without this node's work: a word for the counter and a line for the person. PURE.

Where this node stands, in one object for the page, the command and the counters; all reporting passes here.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from node.ipc.channel import (
    ContributionHeader,
    ContributionOutcome,
    Evaluated,
    FromTrainer,
    PauseChanged,
    Ready,
    TrainerProgress,
    TrainerWarning,
)
from node.loop.contributions import SettledContribution
from node.monitoring.metrics import Metrics
from node.monitoring.status import CatchUpKind, NodeStatus, Phase, RecoveredErrorKind
from node.units import format_bytes, format_plural
from protocol.consensus.chain import ChainHead
from protocol.consensus.events import RejectReason
from protocol.consensus.messages import AppliedContributions, Commit, Digest
from protocol.errors import PeerFault
from protocol.identity import PeerId


class MissReason(NamedTuple):
    """`word` is one of a few; `text` says more."""

    word: str
    text: str


CATCHING_UP = MissReason("catching up", "it was decided before this node had caught up")
REJECT_TEXTS: dict[RejectReason, str] = {
    "late": "our message came after the round's roster was closed; it goes with the next one",
    "left out": "too few peers got our message in time: the upload is slow; it goes on, and joins the next round",
    "lost": "nobody could fetch our message in time; see whether the upload is too slow",
}


def find_miss_reason(
    status: NodeStatus, reject_reason: RejectReason | None, is_submitted: bool, rounds: int
) -> MissReason:
    """`mishap`: what the round did to our message; `offered`: whether we had one; `rounds`: how many came at once."""
    if rounds > 1 or status.phase in ("joining", "waiting for peers", "catching up"):
        return CATCHING_UP
    if reject_reason is not None:
        return MissReason(reject_reason, REJECT_TEXTS.get(reject_reason, reject_reason))
    if is_submitted:
        return MissReason("late", REJECT_TEXTS["late"])
    if status.paused:
        return MissReason("paused", f"paused, {status.paused}")
    if status.trainer_trouble:
        return MissReason("no trainer", status.trainer_trouble)
    return MissReason("slow", "the others were done before our message was ready; this machine is slower than they are")


logger = logging.getLogger(__name__)

# A peer that does not answer is told of once, by the directory; the others mend themselves.
LOGGED_AS_INFO: tuple[RecoveredErrorKind, ...] = ("not delivered", "blob late", "given back")
RECENT_ROUND_COUNT = 5
STALL_FACTOR = 5.0  # times as long as the last rounds: then something is wrong
MIN_STALL_SECONDS = 120.0  # seconds
OUTCOME_TEXTS = {
    "included": "applied already",
    "excluded": "not applied, and is given back",
    "lost": "lost: it is not known",
}


class LiveFields(Protocol):
    def status_fields(self) -> Mapping[str, object]:
        """Return fields of NodeStatus as they are now."""


class StatusReporter:
    """Knows what one replica does, for the page, `murmur status` and the counters. All reports pass here."""

    def __init__(self, status: NodeStatus, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status.model_copy(update={"since": time.time()})
        self._clock = clock
        self._decided_at: float | None = None  # the newest round, if we took part in it
        self._round_seconds: deque[float] = deque(maxlen=RECENT_ROUND_COUNT)  # seconds of the last rounds
        self._metrics = metrics
        self._sources: list[LiveFields] = []
        self._validation_since_round = 0  # the first round of the chain that we are on whose model the trainer has seen
        self._is_submitted = False  # whether a message of ours waits for its fate
        self._reject_reason: RejectReason | None = None  # what the open round has done to it

    def add_source(self, source: LiveFields) -> None:
        """Read fields from there whenever the status is asked for."""
        self._sources.append(source)

    def status(self) -> NodeStatus:
        metrics = self._metrics
        reasons = {
            "standstill": self._describe_stall(),
            "absences": dict(metrics.missed_rounds),
            "setbacks": dict(metrics.recovered_errors),
            "refusals": dict(metrics.refusals),
        }
        fields: dict[str, object] = {**reasons}
        for source in self._sources:
            fields.update(source.status_fields())
        status = self._status.model_copy(update=fields)
        # The trainer tells its speed while it trains, and not that it has none.
        rests = status.paused or status.trainer_trouble
        return status.model_copy(update={"tokens_per_second": 0.0}) if rests else status

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        if phase != self._status.phase:
            logger.info("%s%s", phase, f": {reason}" if reason else "")
        self._update(phase=phase, reason=reason)

    def on_trainer_message(self, message: FromTrainer) -> None:
        match message:
            case TrainerProgress():
                self._update(
                    step=message.step,
                    tokens=message.tokens,
                    loss=message.loss,
                    tokens_per_second=message.tokens_per_second,
                    seconds=dict(message.seconds),
                )
            case Evaluated():
                self._record_validation(message)
            case Ready():
                logger.info("the trainer is ready on %s at step %d", message.device, message.step)
                self._update(paused="")
            case ContributionHeader():
                self._is_submitted = True
            case PauseChanged():
                self._set_paused(message.reason)
            case TrainerWarning():
                self.record_recovered(message.reason, message.line)

    def _record_validation(self, message: Evaluated) -> None:
        if self._validation_since_round <= message.round <= self._status.round:  # or it is of a chain that we have left
            logger.info("round %d: validation loss %.4f", message.round, message.loss)
            self._update(validation_loss=message.loss, validation_round=message.round)

    def _describe_stall(self) -> str:
        """Why nothing is decided any more is not known here; that it is so, is."""
        usual, now = max(self._round_seconds, default=math.inf), self._clock()
        silence = now - (self._decided_at or now)
        if silence <= max(MIN_STALL_SECONDS, STALL_FACTOR * usual):
            return ""
        return f"no round was decided for {silence / 60:.0f} min, the last ones took {usual:.0f} s at most"

    def _record_round_seconds(self) -> None:
        """The length of a round that was decided while we took part in it."""
        if self._status.phase == "catching up":
            self._decided_at = None
            return
        now = self._clock()
        if self._decided_at is not None:
            self._round_seconds.append(now - self._decided_at)
        self._decided_at = now

    def set_head(self, head: ChainHead, state: Digest) -> None:
        included = self._status.last_included_round
        if included is not None and included >= head.round:
            included = None  # it was a round of another chain
        self._update(
            round=head.round, chain_tokens=head.tokens, digest=head.digest.hex(), state_digest=state.hex(),
            last_included_round=included,
        )  # fmt: skip

    def record_recovered(self, reason: RecoveredErrorKind, line: str) -> None:
        """Something went wrong that a person need not mend: the line goes to the log."""
        self._metrics.record_recovered(reason)
        logger.log(logging.INFO if reason in LOGGED_AS_INFO else logging.WARNING, "%s: %s", reason, line)

    def record_applied(self, applied: AppliedContributions, step_scale: float) -> None:
        """What went into our state with a round, and which share of a whole step that was."""
        self._metrics.record_applied(applied, step_scale)
        short = "" if step_scale == 1 else f", {step_scale:.2f} of a step"
        count, size = format_plural(len(applied.peers), "contribution"), format_bytes(applied.total_bytes)
        logger.info("%s went in, %d parts of %s%s", count, applied.part_count, size, short)

    def record_rounds(
        self, head: ChainHead, state: Digest, commits: Sequence[Commit], outcome: ContributionOutcome
    ) -> None:
        """New rounds are in place, and what became of our message in them."""
        self._record_round_seconds()
        self.set_head(head, state)
        # Of a round that was skipped by taking over a state we cannot say what went into it.
        went_in = format_plural(len(commits[0].contributions), "contribution") if len(commits) == 1 else "taken over"
        mark = head.digest.hex()[:8]
        if outcome == "included":
            self._record_included(head, commits)
            logger.info("round %d: %s, ours included, digest %s", head.round, went_in, mark)
        else:
            word, text = self._record_missed(outcome, len(commits))
            ours = outcome if outcome != "none" else "not among them"
            logger.info("round %d: %s, ours %s (%s), digest %s", head.round, went_in, ours, word, mark)
            logger.debug("round %d went without us: %s", head.round, text)
        others = commits[outcome != "none" :]  # a message is in one round at most
        for _ in others:
            self._metrics.record_round("missed")
        if outcome != "none":
            self._metrics.record_missed(CATCHING_UP.word, len(others))
        self._is_submitted = self._is_submitted and outcome == "none"
        self._reject_reason = None

    def record_revised(self, settled: Sequence[SettledContribution]) -> None:
        """Another chain judges earlier messages of ours otherwise than the one that we left."""
        for entry in settled:
            self._metrics.record_revised(entry.outcome)
            logger.info(
                "the message of round %d is %s on this chain",
                entry.contribution.header.round,
                OUTCOME_TEXTS[entry.outcome],
            )

    def _record_included(self, head: ChainHead, commits: Sequence[Commit]) -> None:
        self._metrics.record_round("included")
        me, included = self._status.peer_id, self._status.contributions_included + 1
        ours = [commit.round for commit in commits if any(entry.sender == me for entry in commit.contributions)]
        newest = max(ours, default=head.round - 1)
        text = "" if newest == head.round - 1 else CATCHING_UP.text
        self._update(contributions_included=included, last_included_round=newest, absence=text)

    def _record_missed(self, outcome: ContributionOutcome, rounds: int) -> MissReason:
        found = find_miss_reason(self.status(), self._reject_reason, self._is_submitted, rounds)
        if outcome == "excluded":
            found = MissReason("excluded", "our message came too late for several rounds; later ones carry its work")
            self._metrics.record_round("excluded")
            self._update(contributions_excluded=self._status.contributions_excluded + 1)
        elif outcome == "lost":
            found = MissReason(
                "lost", "rounds that are not known here may have taken our message; it is not sent again"
            )
            self._metrics.record_round("lost")
        self._metrics.record_missed(found.word, rounds if outcome == "none" else min(1, rounds))
        self._update(absence=found.text)
        return found

    def reset_validation(self, head: ChainHead) -> None:
        """By taking over a state. What was measured before is of another chain, perhaps of the same round."""
        self._validation_since_round = head.round
        self._update(validation_loss=None, validation_round=None)

    def record_catch_up(self, how: CatchUpKind, rounds: int) -> None:
        """`rounds` that others made without us were replayed, or skipped by taking over a state."""
        self._metrics.record_catch_up(how, rounds)

    def set_miss_reason(self, reason: str) -> None:
        """Why the open round will go without our work, where it is known before that round is applied."""
        self._update(absence=reason)

    def _set_paused(self, reason: str) -> None:
        if reason:
            self._metrics.record_pause()
        logger.info("training pauses: %s" if reason else "training goes on%s", reason)
        self._update(paused=reason)

    def set_pace(self, words: str) -> None:
        """How far we keep to the plan's steps; empty: fully."""
        if words != self._status.pace:
            logger.info("%s", words or "all steps a round: this machine is as fast as the others")
            self._update(pace=words)

    def record_early_submit(self) -> None:
        self._metrics.record_early_submit()
        logger.info("the others wait: asking the trainer for what it has")

    def record_refusal(self, peer: PeerId, first: PeerFault, *others: PeerFault) -> None:
        """All that was wrong in one call: each is counted, and one line says it."""
        for fault in (first, *others):
            self._metrics.record_refusal(fault.metric_label)
        more = f" (and {len(others)} more)" if others else ""
        logger.warning("refused what %s sent (%s): %s%s", peer, first.metric_label, first, more)

    def record_rejected(self, peer: PeerId | None, reason: RejectReason) -> None:
        self._metrics.record_refusal(reason)
        logger.info("%s: %s", reason, peer or "this round")
        if peer == self._status.peer_id and reason in REJECT_TEXTS:
            self._reject_reason = self._reject_reason or reason  # what came of the first is no second one

    def _update(self, **values: object) -> None:
        self._status = self._status.model_copy(update=values)
