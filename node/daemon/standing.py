"""Where this node stands, in one object for the page, the command and the counters; all reporting passes here."""

import logging
import time
from collections.abc import Callable, Sequence

from node.channel import Evaluated, Fate, FromTrainer, Message, Pausing, Progress, Ready
from node.daemon.absence import MISHAPS, Absence, absence
from node.daemon.metrics import CatchUp, Metrics, Setback
from node.daemon.offers import Past
from node.status import NodeStatus, Phase, short_bytes
from protocol.errors import PeerFault
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.entries import Entries
from protocol.rounds.events import Reason
from protocol.rounds.statements import Commit, Digest

logger = logging.getLogger(__name__)

# A peer that does not answer is told of once, by the directory; the others mend themselves.
QUIET: tuple[Setback, ...] = ("not delivered", "blob late", "given back")
WORDS = {"included": "applied already", "excluded": "not applied, and is given back", "lost": "lost: it is not known"}


class Standing:
    """`traffic`: fields of NodeStatus that are read when asked (peers, bytes, trainer deaths)."""

    def __init__(self, status: NodeStatus, metrics: Metrics, traffic: Callable[[], dict[str, object]]) -> None:
        self._status = status.model_copy(update={"since": time.time()})
        self._metrics = metrics
        self._traffic = traffic
        self._offered = False  # whether a message of ours waits for its fate
        self._mishap: Reason | None = None  # what the open round has done to it

    def status(self) -> NodeStatus:
        metrics = self._metrics
        reasons = {
            "absences": dict(metrics.absences), "setbacks": dict(metrics.setbacks), "refusals": dict(metrics.refusals)
        }  # fmt: skip
        return self._status.model_copy(update=reasons | self._traffic())

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
                logger.info("round %d: validation loss %.4f", message.round, message.loss)
                self._set(validation_loss=message.loss, validation_round=message.round)
            case Ready():
                logger.info("the trainer is ready on %s at step %d", message.device, message.step)
                self._set(paused="")
            case Message():
                self._offered = True
            case Pausing():
                self._pause(message.reason)

    def stands_at(self, head: Head, state: Digest) -> None:
        self._set(round=head.round, chain_tokens=head.tokens, digest=head.digest.hex(), state_digest=state.hex())

    def set_back(self, reason: Setback, line: str) -> None:
        """Something went wrong that a person need not mend: the line goes to the log."""
        self._metrics.set_back(reason)
        logger.log(logging.INFO if reason in QUIET else logging.WARNING, "%s: %s", reason, line)

    def entered(self, entries: Entries) -> None:
        """What went into our state with a round."""
        self._metrics.entered(entries)
        size = short_bytes(entries.size)
        logger.info("%d contributions went in, %d parts of %s", len(entries.peers), entries.parts, size)

    def applied(self, head: Head, state: Digest, commits: Sequence[Commit], fate: Fate) -> None:
        """New rounds are in place, and what became of our message in them."""
        self.stands_at(head, state)
        # Of a round that was skipped by taking over a state we cannot say what went into it.
        went_in = f"{len(commits[0].contributions)} contributions" if len(commits) == 1 else "taken over"
        mark = head.digest.hex()[:8]
        if fate == "included":
            self._include(head)
            logger.info("round %d: %s, ours included, digest %s", head.round, went_in, mark)
        else:
            word, text = self._exclude(fate, len(commits))
            ours = fate if fate != "none" else "not among them"
            logger.info("round %d: %s, ours %s (%s), digest %s", head.round, went_in, ours, word, mark)
            logger.debug("round %d went without us: %s", head.round, text)
        for _ in commits[fate != "none" :]:
            self._metrics.round_ended("missed")
        self._offered, self._mishap = self._offered and fate == "none", None

    def revised(self, past: Sequence[Past]) -> None:
        """Another chain judges earlier messages of ours otherwise than the one that we left."""
        for entry in past:
            self._metrics.revised(entry.fate)
            logger.info("the message of round %d is %s on this chain", entry.offer.message.round, WORDS[entry.fate])

    def _include(self, head: Head) -> None:
        self._metrics.round_ended("included")
        included = self._status.contributions_included + 1
        self._set(contributions_included=included, last_included_round=head.round - 1, absence="")

    def _exclude(self, fate: Fate, rounds: int) -> Absence:
        found = absence(self.status(), self._mishap, self._offered, rounds)
        if fate == "excluded":
            found = Absence("excluded", "our message came too late for several rounds; later ones carry its work")
            self._metrics.round_ended("excluded")
            self._set(contributions_excluded=self._status.contributions_excluded + 1)
        elif fate == "lost":
            found = Absence("lost", "rounds that are not known here may have taken our message; it is not sent again")
            self._metrics.round_ended("lost")
        self._metrics.was_absent(found.word, rounds)
        self._set(absence=found.text)
        return found

    def caught_up(self, how: CatchUp, rounds: int) -> None:
        """`rounds` that others made without us were replayed, or skipped by taking over a state."""
        self._metrics.caught_up(how, rounds)

    def round_failed(self, reason: str) -> None:
        self._metrics.round_ended("failed")
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

    def refused(self, peer: PeerId, fault: PeerFault) -> None:
        self._metrics.refused(fault.word)
        logger.warning("refused what %s sent (%s): %s", peer, fault.word, fault)

    def skipped(self, peer: PeerId | None, reason: Reason) -> None:
        self._metrics.refused(reason)
        logger.info("%s: %s", reason, peer or "this round")
        if peer == self._status.peer_id and reason in MISHAPS:
            self._mishap = reason

    def _set(self, **values: object) -> None:
        self._status = self._status.model_copy(update=values)
