"""Collect the status of one replica, for the page, `murmur status`, the counters and the log.

All reports pass through StatusReporter. `find_miss_reason` explains why a round has no work of this node.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from node.loop.contributions import SettledContribution
from node.monitoring.metrics import Metrics
from node.monitoring.status import PACE_ROUNDS, CatchUpKind, NodeStatus, Phase, RecoveredErrorKind, RoundPace
from node.trainer.ipc.channel import (
    ContributionHeader,
    ContributionOutcome,
    Evaluated,
    FromTrainer,
    PauseChanged,
    Ready,
    RowsSkipped,
    TrainerProgress,
    TrainerWarning,
)
from node.units import format_bytes, format_plural
from optim.aggregation.base import LeftOut
from protocol.consensus.chain import ChainHead
from protocol.consensus.events import RejectReason
from protocol.consensus.messages.contributions import AppliedContributions, Commit
from protocol.consensus.messages.signed import Digest
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.steering import Revision, describe_changes

logger = logging.getLogger(__name__)
REJECT_TEXTS: dict[RejectReason, str] = {
    "late": "our contribution came after the roster of the round was closed; it joins the next round",
    "left out": "too few peers received our contribution in time because the upload is slow; it joins the next round",
    "not fetched": "no peer could fetch our contribution in time; check whether the upload is too slow",
}
# The directory logs a peer that does not answer; the other two resolve themselves.
DETAILS: tuple[RecoveredErrorKind, ...] = ("not delivered", "blob late", "sent again")
ROUND_PHASES: tuple[Phase, ...] = ("training", "exchanging", "catching up")  # a node passes these in every round
STALL_FACTOR = 5.0  # a stall lasts this many times as long as the longest recent round
MIN_STALL_SECONDS = 120.0
OUTCOME_TEXTS: dict[ContributionOutcome, str] = {
    "included": "ours included",
    "excluded": "ours given back: it missed several rounds, and later ones carry its work",
    "lost": "the outcome of ours is unknown: nobody can say whether a round includes it",
}


class ReturnSummary:
    """Collects the rounds that a peer catches up with, from round `start` on."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._included: list[int | None] = []  # the round of each contribution, if it is known
        self._given_back = 0
        self._unknown = 0

    def add(self, outcome: ContributionOutcome, included_in: int | None = None) -> None:
        """Record the outcome of a contribution; `included_in` is the number of the round that includes it."""
        match outcome:
            case "included":
                self._included.append(included_in)
            case "excluded":
                self._given_back += 1
            case "lost":
                self._unknown += 1

    def rounds_until(self, round_number: int) -> int:
        return max(0, round_number - self._start)

    def describe(self, round_number: int) -> str:
        """Return the line for a peer that has caught up with round `round_number`; empty if there is nothing to say."""
        rounds = self.rounds_until(round_number)
        if not rounds and not (self._included or self._given_back or self._unknown):
            return ""
        if self._start == 0:
            return f"caught up with round {round_number}"
        outcomes = [*self._describe_included()]
        if self._given_back:
            outcomes.append(f"{self._given_back} given back; later ones carry their work")
        if self._unknown:
            outcomes.append(f"{self._unknown} with an unknown outcome")
        away = f"back after {format_plural(rounds, 'round')}"
        return f"{away}: {', '.join(outcomes)}" if outcomes else away

    def _describe_included(self) -> list[str]:
        rounds = sorted(number for number in self._included if number is not None)
        if not self._included:
            return []
        where = f" in round {', '.join(map(str, rounds))}" if rounds else ""
        return [f"{format_plural(len(self._included), 'contribution')} included{where}"]


class MissReason(NamedTuple):
    """Why a round has no work of this node: a fixed word for the counter and a text for people."""

    word: str
    text: str


CATCHING_UP = MissReason("catching up", "the round was decided before this node had caught up")


def find_miss_reason(
    status: NodeStatus, reject_reason: RejectReason | None, is_submitted: bool, rounds: int
) -> MissReason:
    """Return why the newest round has none of our work.

    Args:
        status: the status of this node before the round is recorded.
        reject_reason: why the round rejected our contribution, if it did.
        is_submitted: whether a contribution of ours was submitted.
        rounds: number of rounds that were applied at once.
    """
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
    return MissReason("slow", "the other peers finished before our contribution was ready; this machine is slower")


class LiveFields(Protocol):
    def status_fields(self) -> Mapping[str, object]:
        """Return fields of NodeStatus as they are now."""


class StatusReporter:
    """Holds the status of one replica; every component reports to it."""

    def __init__(self, status: NodeStatus, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status.model_copy(update={"since": time.time()})
        self._clock = clock
        self._decided_at: float | None = None  # when the newest round was decided, if we took part in it
        self._round_seconds: deque[float] = deque(maxlen=PACE_ROUNDS)  # durations of the last rounds
        self._heads: deque[tuple[int, int]] = deque(maxlen=PACE_ROUNDS)  # rounds and tokens after these
        self._metrics = metrics
        self._sources: list[LiveFields] = []
        self._revision_count = 0
        self._validation_since_round = 0  # older validations are of a chain that we left
        self._is_submitted = False  # whether a contribution of ours has no outcome yet
        self._reject_reason: RejectReason | None = None  # why the open round rejected it
        self._return_summary: ReturnSummary | None = None  # while the node catches up
        self._round_line = ""  # of the newest round
        self._logged_validation: int | None = None  # the round of the validation that was logged last

    def add_source(self, source: LiveFields) -> None:
        """Read fields from this source whenever the status is requested."""
        self._sources.append(source)

    def status(self) -> NodeStatus:
        metrics = self._metrics
        reasons = {
            "standstill": self._describe_stall(),
            "absences": dict(metrics.missed_rounds),
            "setbacks": dict(metrics.recovered_errors),
            "refusals": dict(metrics.refusals),
            "skipped_rows": dict(metrics.skipped_rows),
        }
        fields: dict[str, object] = {**reasons}
        for source in self._sources:
            fields.update(source.status_fields())
        status = self._status.model_copy(update=fields)
        # The trainer reports its speed only while it trains; it never reports 0.
        is_going_on = status.phase not in ("paused", "leaving", "done")
        left = RoundPace(self._heads, self._round_seconds).seconds_left(status.target_rounds, status.target_tokens)
        status = status.model_copy(update={"seconds_left": left if is_going_on else None})
        is_idle = status.paused or status.trainer_trouble or status.phase == "paused"
        return status.model_copy(update={"tokens_per_second": 0.0}) if is_idle else status

    def set_phase(self, phase: Phase, reason: str = "") -> None:
        before = self._status.phase
        if phase != before:
            # The command prints the error that ends the node.
            is_early = phase == "training" and not self._status.device  # the line about the trainer follows
            is_detail = is_early or (phase in ROUND_PHASES and before in ROUND_PHASES) or phase == "leaving"
            level = logging.DEBUG if is_detail else logging.INFO
            logger.log(level, "%s%s", phase, f": {reason}" if reason else "")
        if phase == "catching up":
            self._return_summary = self._return_summary or ReturnSummary(self._status.round)
        elif self._return_summary is not None:
            summary, self._return_summary = self._return_summary, None
            self._log_return(summary)
        self._update(phase=phase, reason=reason)

    def _log_return(self, summary: ReturnSummary) -> None:
        """Log the rounds that the node has caught up with: one by its own line, several by one line together."""
        line = self._round_line if summary.rounds_until(self._status.round) == 1 else ""
        if line := line or summary.describe(self._status.round):
            logger.info("%s", line)

    def on_trainer_message(self, message: FromTrainer) -> None:
        match message:
            case TrainerProgress():
                self._record_progress(message)
            case Evaluated():
                self._record_validation(message)
            case Ready():
                resumed = "; training resumed" if self._status.paused else ""
                logger.info("the trainer is ready on %s at step %d%s", message.device, message.step, resumed)
                self._update(paused="", device=message.device, ranks=message.ranks)
            case ContributionHeader():
                self._is_submitted = True
            case PauseChanged():
                self._set_paused(message.reason)
            case TrainerWarning():
                self.record_recovered(message.reason, message.line)
            case RowsSkipped():
                self._record_skipped_rows(message)

    def _record_skipped_rows(self, message: RowsSkipped) -> None:
        self._metrics.record_skipped_rows(message.counts)
        for line in message.lines:
            logger.warning("data: %s", line)

    def _record_progress(self, message: TrainerProgress) -> None:
        device = message.device_use
        self._update(
            step=message.step,
            tokens=message.tokens,
            loss=message.loss,
            tokens_per_second=message.tokens_per_second,
            seconds=dict(message.seconds),
            learning_rate=message.learning_rate,
            gradient_norm=message.gradient_norm,
            device_use=device.share if device else None,
            device_memory=device.memory if device else None,
            device_memory_total=device.memory_total if device else None,
            cards=message.cards,
        )

    def _record_validation(self, message: Evaluated) -> None:
        if self._validation_since_round <= message.round <= self._status.round:  # else of a chain that we left
            logger.debug("round %d: validation loss %.4f", message.round, message.loss)
            self._update(
                validation_loss=message.loss,
                validation_round=message.round,
                validation_by_source=dict(message.by_source),
            )

    def adopt_validation(self, round_number: int, loss: float, by_source: Mapping[str, float]) -> None:
        """Take over the validation loss that another peer has measured of the final model."""
        self._update(validation_loss=loss, validation_round=round_number, validation_by_source=dict(by_source))

    def _describe_stall(self) -> str:
        """Describe a stall of the round; empty while there is none. Its cause is not known here."""
        longest, now = max(self._round_seconds, default=math.inf), self._clock()
        silence = now - (self._decided_at or now)
        if silence <= max(MIN_STALL_SECONDS, STALL_FACTOR * longest):
            return ""
        return f"no round was decided for {silence / 60:.0f} min; recent rounds took at most {longest:.0f} s"

    def _record_round_seconds(self, head: ChainHead) -> None:
        """Record the duration of a round that was decided while we took part in it, and its tokens."""
        if self._heads and self._heads[-1][0] >= head.round:
            self._heads.clear()  # of another chain
        self._heads.append((head.round, head.tokens))
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

    def set_revisions(self, in_force: Sequence[Revision], round_number: int) -> None:
        """Set the organiser's revisions that hold for this round, and log those that did not hold before."""
        for revision in in_force[self._revision_count :]:
            logger.info("round %d has the organiser's revision %s", round_number, describe_changes(revision))
        self._revision_count = len(in_force)
        self._update(revision=max((revision.number for revision in in_force), default=0))

    def record_recovered(self, reason: RecoveredErrorKind, line: str) -> None:
        """Count an error that needs no action, and log its line."""
        self._metrics.record_recovered(reason)
        # A trainer that gets the order to stop does not finish its work.
        is_detail = reason in DETAILS or (reason == "trainer late" and self._status.phase == "leaving")
        logger.log(logging.DEBUG if is_detail else logging.WARNING, "%s: %s", reason, line)

    def record_applied(self, applied: AppliedContributions, step_scale: float) -> None:
        """Count and log the contributions of a round, and the fraction of a full outer step."""
        self._metrics.record_applied(applied, step_scale)
        scale = "" if step_scale == 1 else f", {step_scale:.2f} of an outer step"
        count, size = format_plural(len(applied.peers), "contribution"), format_bytes(applied.total_bytes)
        logger.debug("applied %s, %d parts of %s%s", count, applied.part_count, size, scale)

    def record_rounds(
        self, head: ChainHead, state: Digest, commits: Sequence[Commit], outcome: ContributionOutcome
    ) -> None:
        """Record newly applied rounds, and the outcome of our contribution in them."""
        self._record_round_seconds(head)
        self.set_head(head, state)
        if outcome == "included":
            self._record_included(head, commits)
            ours = OUTCOME_TEXTS[outcome]
        else:
            word, text = self._record_missed(outcome, len(commits))
            ours = OUTCOME_TEXTS.get(outcome, f"ours not among them ({word})")
            logger.debug("round %d has none of our work: %s", head.round, text)
        self._log_round(head, commits, ours)
        if self._return_summary is not None:
            self._return_summary.add(outcome, self._find_included(commits))
        others = commits[outcome != "none" :]  # a contribution is in one round at most
        for _ in others:
            self._metrics.record_round("missed")
        if outcome != "none":
            self._metrics.record_missed(CATCHING_UP.word, len(others))
        self._is_submitted = self._is_submitted and outcome == "none"
        self._reject_reason = None

    def _log_round(self, head: ChainHead, commits: Sequence[Commit], ours: str) -> None:
        """Log a round in one line; while the node catches up, `_log_return` does."""
        # After a state download the contributions of the skipped rounds are not known.
        content = format_plural(len(commits[0].contributions), "contribution") if len(commits) == 1 else "downloaded"
        parts = [content, ours, *self._describe_losses()]
        self._round_line = f"round {head.round}: {', '.join(parts)}"
        catches_up = self._return_summary is not None
        logger.log(logging.DEBUG if catches_up else logging.INFO, "%s", self._round_line)
        logger.debug("round %d has the digest %s", head.round, head.digest.hex()[:8])

    def _describe_losses(self) -> list[str]:
        """Return the recent training loss, and the validation loss if no line had it before."""
        status = self._status
        found = [] if status.loss is None else [f"loss {status.loss:.3f} (own weights)"]
        if status.validation_loss is not None and status.validation_round != self._logged_validation:
            self._logged_validation = status.validation_round
            found.append(f"{status.describe_validation()} (shared model)")
        return found

    def record_revised(self, settled: Sequence[SettledContribution]) -> None:
        """Record earlier contributions whose outcome differs on the chain we switched to."""
        for entry in settled:
            self._metrics.record_revised(entry.outcome)
            if self._return_summary is not None:
                self._return_summary.add(entry.outcome)
            logger.debug("the contribution of round %d: %s", entry.contribution.header.round, entry.outcome)

    def _find_included(self, commits: Sequence[Commit]) -> int | None:
        """Return the number of the round that includes our contribution, as the log counts rounds."""
        me = self._status.peer_id
        included = (commit for commit in commits if any(entry.sender == me for entry in commit.contributions))
        return next((commit.round + 1 for commit in included), None)

    def _record_included(self, head: ChainHead, commits: Sequence[Commit]) -> None:
        self._metrics.record_round("included")
        me, included = self._status.peer_id, self._status.contributions_included + 1
        ours = [commit.round for commit in commits if any(entry.sender == me for entry in commit.contributions)]
        newest = max(ours, default=head.round - 1)
        text = "" if newest == head.round - 1 else CATCHING_UP.text
        self._update(contributions_included=included, last_included_round=newest, absence=text)

    def _record_missed(self, outcome: ContributionOutcome, rounds: int) -> MissReason:
        missed = find_miss_reason(self.status(), self._reject_reason, self._is_submitted, rounds)
        if outcome == "excluded":
            missed = MissReason("excluded", "our contribution missed several rounds; later ones carry its work")
            self._metrics.record_round("excluded")
            self._update(contributions_excluded=self._status.contributions_excluded + 1)
        elif outcome == "lost":
            missed = MissReason("lost", "nobody can say whether a round includes our contribution")
            self._metrics.record_round("lost")
        self._metrics.record_missed(missed.word, rounds if outcome == "none" else min(1, rounds))
        self._update(absence=missed.text)
        return missed

    def reset_validation(self, head: ChainHead) -> None:
        """Forget the validation loss after a state download: it may be of another chain."""
        self._validation_since_round = head.round
        self._update(validation_loss=None, validation_round=None, validation_by_source={})

    def record_catch_up(self, how: CatchUpKind, rounds: int) -> None:
        """Count rounds of others that were replayed, or skipped by downloading a state."""
        self._metrics.record_catch_up(how, rounds)

    def set_miss_reason(self, reason: str) -> None:
        """Set why the open round will have none of our work, if known before it is applied."""
        self._update(absence=reason)

    def _set_paused(self, reason: str) -> None:
        if reason:
            self._metrics.record_pause()
        logger.info("training paused: %s" if reason else "training resumed%s", reason)
        self._update(paused=reason)

    def set_pace(self, text: str) -> None:
        """Set why this peer makes fewer steps than planned; empty if it makes all."""
        if text != self._status.pace:
            level = logging.DEBUG if text and self._status.pace else logging.INFO  # the figure changes often
            logger.log(level, "%s", text or "all steps per round: this machine is as fast as the others")
            self._update(pace=text)

    def set_conduct(self, lines: tuple[str, ...]) -> None:
        """Set what is known of the conduct of other peers; a new exclusion is worth a line in the log."""
        for line in lines:
            if line.startswith("excluded") and line not in self._status.conduct:
                logger.warning("%s; nothing of this key counts any more", line)
        self._update(conduct=lines)

    def record_early_submit(self) -> None:
        self._metrics.record_early_submit()
        logger.debug("the other peers are waiting: asking the trainer to submit early")

    def record_refusal(self, peer: PeerId, first: PeerFault, *others: PeerFault) -> None:
        """Count each fault of one call, and log one line for all."""
        for fault in (first, *others):
            self._metrics.record_refusal(fault.metric_label)
        more = f" (and {len(others)} more)" if others else ""
        logger.warning("refused what %s sent (%s): %s%s", peer, first.metric_label, first, more)

    def record_rejected(self, peer: PeerId | None, reason: RejectReason) -> None:
        self._metrics.record_refusal(reason)
        logger.debug("%s: %s", reason, peer or "this round")
        if peer == self._status.peer_id and reason in REJECT_TEXTS:
            self._reject_reason = self._reject_reason or reason  # the first reason is the cause

    def record_left_out(self, peer: PeerId, reason: LeftOut) -> None:
        """Count a contribution that was committed, but that the method's rule left out of the mean."""
        self._metrics.record_refusal(reason)
        logger.debug("left out of the mean, %s: %s", reason, peer)

    def _update(self, **values: object) -> None:
        self._status = self._status.model_copy(update=values)
