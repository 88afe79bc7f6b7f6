"""Where this node stands, in one object for the page, the command and the counters; all reporting passes here."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from node.channel import Evaluated, Fate, FromTrainer, Message, Mishap, Pausing, Progress, Ready
from node.daemon.absence import BEHIND, MISHAPS, Absence, absence
from node.daemon.metrics import CatchUp, Metrics, Setback
from node.daemon.offers import Past
from node.status import NodeStatus, Phase, plural, short_bytes
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.entries import Entries
from protocol.rounds.events import Reason
from protocol.rounds.statements import Commit, Digest

logger = logging.getLogger(__name__)

# A peer that does not answer is told of once, by the directory; the others mend themselves.
QUIET: tuple[Setback, ...] = ("not delivered", "blob late", "given back")
RECENT_LENGTHS = 5
STANDSTILL = 5.0  # times as long as the last rounds: then something is wrong
LEAST_STANDSTILL = 120.0  # seconds
WORDS = {"included": "applied already", "excluded": "not applied, and is given back", "lost": "lost: it is not known"}


class Standing:
    """`traffic`: fields of NodeStatus that are read when asked (peers, bytes, trainer deaths)."""

    def __init__(
        self, status: NodeStatus, metrics: Metrics, traffic: Callable[[], dict[str, object]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._status = status.model_copy(update={"since": time.time()})
        self._clock = clock
        self._decided_at: float | None = None  # the newest round, if we took part in it
        self._lengths: deque[float] = deque(maxlen=RECENT_LENGTHS)  # seconds of the last rounds
        self._metrics = metrics
        self._traffic = traffic
        self._measures_from = 0  # the first round of the chain that we are on whose model the trainer has seen
        self._offered = False  # whether a message of ours waits for its fate
        self._mishap: Reason | None = None  # what the open round has done to it

    def status(self) -> NodeStatus:
        metrics = self._metrics
        reasons = {
            "standstill": self._standstill(),
            "absences": dict(metrics.absences),
            "setbacks": dict(metrics.setbacks),
            "refusals": dict(metrics.refusals),
        }
        status = self._status.model_copy(update=reasons | self._traffic())
        # The trainer tells its speed while it trains, and not that it has none.
        rests = status.paused or status.trainer_trouble
        return status.model_copy(update={"tokens_per_second": 0.0}) if rests else status

    def enter(self, phase: Phase, reason: str = "") -> None:
        if phase != self._status.phase:
            logger.info("%s%s", phase, f": {reason}" if reason else "")
        self._set(phase=phase, reason=reason)

    def heard(self, message: FromTrainer) -> None:
        match message:
            case Progress():
                self._set(
                    step=message.step,
                    tokens=message.tokens,
                    loss=message.loss,
                    tokens_per_second=message.tokens_per_second,
                    seconds=dict(message.seconds),
                )
            case Evaluated():
                self._measured(message)
            case Ready():
                logger.info("the trainer is ready on %s at step %d", message.device, message.step)
                self._set(paused="")
            case Message():
                self._offered = True
            case Pausing():
                self._pause(message.reason)
            case Mishap():
                self.set_back(message.reason, message.line)

    def _measured(self, message: Evaluated) -> None:
        if self._measures_from <= message.round <= self._status.round:  # or it is of a chain that we have left
            logger.info("round %d: validation loss %.4f", message.round, message.loss)
            self._set(validation_loss=message.loss, validation_round=message.round)

    def _standstill(self) -> str:
        """Why nothing is decided any more is not known here; that it is so, is."""
        usual, now = max(self._lengths, default=math.inf), self._clock()
        silence = now - (self._decided_at or now)
        if silence <= max(LEAST_STANDSTILL, STANDSTILL * usual):
            return ""
        return f"no round was decided for {silence / 60:.0f} min, the last ones took {usual:.0f} s at most"

    def _time(self) -> None:
        """The length of a round that was decided while we took part in it."""
        if self._status.phase == "catching up":
            self._decided_at = None
            return
        now = self._clock()
        if self._decided_at is not None:
            self._lengths.append(now - self._decided_at)
        self._decided_at = now

    def stands_at(self, head: Head, state: Digest) -> None:
        included = self._status.last_included_round
        if included is not None and included >= head.round:
            included = None  # it was a round of another chain
        self._set(
            round=head.round, chain_tokens=head.tokens, digest=head.digest.hex(), state_digest=state.hex(),
            last_included_round=included,
        )  # fmt: skip

    def set_back(self, reason: Setback, line: str) -> None:
        """Something went wrong that a person need not mend: the line goes to the log."""
        self._metrics.set_back(reason)
        logger.log(logging.INFO if reason in QUIET else logging.WARNING, "%s: %s", reason, line)

    def entered(self, entries: Entries, step: float) -> None:
        """What went into our state with a round, and which share of a whole step that was."""
        self._metrics.entered(entries, step)
        short = "" if step == 1 else f", {step:.2f} of a step"
        count, size = plural(len(entries.peers), "contribution"), short_bytes(entries.size)
        logger.info("%s went in, %d parts of %s%s", count, entries.parts, size, short)

    def applied(self, head: Head, state: Digest, commits: Sequence[Commit], fate: Fate) -> None:
        """New rounds are in place, and what became of our message in them."""
        self._time()
        self.stands_at(head, state)
        # Of a round that was skipped by taking over a state we cannot say what went into it.
        went_in = plural(len(commits[0].contributions), "contribution") if len(commits) == 1 else "taken over"
        mark = head.digest.hex()[:8]
        if fate == "included":
            self._include(head, commits)
            logger.info("round %d: %s, ours included, digest %s", head.round, went_in, mark)
        else:
            word, text = self._exclude(fate, len(commits))
            ours = fate if fate != "none" else "not among them"
            logger.info("round %d: %s, ours %s (%s), digest %s", head.round, went_in, ours, word, mark)
            logger.debug("round %d went without us: %s", head.round, text)
        others = commits[fate != "none" :]  # a message is in one round at most
        for _ in others:
            self._metrics.round_ended("missed")
        if fate != "none":
            self._metrics.was_absent(BEHIND.word, len(others))
        self._offered = self._offered and fate == "none"
        self._mishap = None

    def revised(self, past: Sequence[Past]) -> None:
        """Another chain judges earlier messages of ours otherwise than the one that we left."""
        for entry in past:
            self._metrics.revised(entry.fate)
            logger.info("the message of round %d is %s on this chain", entry.offer.message.round, WORDS[entry.fate])

    def _include(self, head: Head, commits: Sequence[Commit]) -> None:
        self._metrics.round_ended("included")
        me, included = self._status.peer_id, self._status.contributions_included + 1
        ours = [commit.round for commit in commits if any(entry.sender == me for entry in commit.contributions)]
        newest = max(ours, default=head.round - 1)
        text = "" if newest == head.round - 1 else BEHIND.text
        self._set(contributions_included=included, last_included_round=newest, absence=text)

    def _exclude(self, fate: Fate, rounds: int) -> Absence:
        found = absence(self.status(), self._mishap, self._offered, rounds)
        if fate == "excluded":
            found = Absence("excluded", "our message came too late for several rounds; later ones carry its work")
            self._metrics.round_ended("excluded")
            self._set(contributions_excluded=self._status.contributions_excluded + 1)
        elif fate == "lost":
            found = Absence("lost", "rounds that are not known here may have taken our message; it is not sent again")
            self._metrics.round_ended("lost")
        self._metrics.was_absent(found.word, rounds if fate == "none" else min(1, rounds))
        self._set(absence=found.text)
        return found

    def moved_to(self, head: Head) -> None:
        """By taking over a state. What was measured before is of another chain, perhaps of the same round."""
        self._measures_from = head.round
        self._set(validation_loss=None, validation_round=None)

    def caught_up(self, how: CatchUp, rounds: int) -> None:
        """`rounds` that others made without us were replayed, or skipped by taking over a state."""
        self._metrics.caught_up(how, rounds)

    def goes_without(self, reason: str) -> None:
        """Why the open round will go without our work, where it is known before that round is applied."""
        self._set(absence=reason)

    def _pause(self, reason: str) -> None:
        if reason:
            self._metrics.paused()
        logger.info("training pauses: %s" if reason else "training goes on%s", reason)
        self._set(paused=reason)

    def paced(self, words: str) -> None:
        """How far we keep to the plan's steps; empty: fully."""
        if words != self._status.pace:
            logger.info("%s", words or "all steps a round: this machine is as fast as the others")
            self._set(pace=words)

    def hurried(self) -> None:
        self._metrics.hurried()
        logger.info("the others wait: asking the trainer for what it has")

    def refused(self, peer: PeerId, first: PeerFault, *others: PeerFault) -> None:
        """All that was wrong in one call: each is counted, and one line says it."""
        for fault in (first, *others):
            self._metrics.refused(fault.word)
        more = f" (and {len(others)} more)" if others else ""
        logger.warning("refused what %s sent (%s): %s%s", peer, first.word, first, more)

    def skipped(self, peer: PeerId | None, reason: Reason) -> None:
        self._metrics.refused(reason)
        logger.info("%s: %s", reason, peer or "this round")
        if peer == self._status.peer_id and reason in MISHAPS:
            self._mishap = self._mishap or reason  # what came of the first is no second one

    def _set(self, **values: object) -> None:
        self._status = self._status.model_copy(update=values)
