"""The trainer's message on its way: offered to one round after the other until one takes it.

A delta that misses its round is still a delta: it joins the next one that exchanges the same values in the same code,
up to MAX_AGE rounds late. After that it is given back to the trainer, whose residual takes it in. Exactly one of the
two happens, and is remembered until the trainer's next message, so a trainer (or a whole node) that died in between
hears of it afterwards. Where it cannot be known whether a round has taken it, neither happens: it is lost.

A network that was split for longer than votes are remembered has two chains, and on each another fate. Whoever goes
over to the other chain judges its last messages anew (`Offers.jump`): what only the chain that it leaves has taken is
given back, and what was given back although the new one has it is taken out again of what is to be sent. That is a sum
and a difference, since what is to be sent is all that was trained less all that was applied. PURE.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from node.channel import Fate, Message
from optim.program import Program
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit, Contribution, Terms

MAX_AGE = 3  # rounds
KEPT_MESSAGES = 3  # decided ones that can be given back once more: their blobs stay on disk
KNOWN_MESSAGES = 16  # decided ones that another chain may judge otherwise
HORIZON = 48  # rounds; no chain is asked for more

Later = Literal["none", "one", "many"]
Parts = tuple[Blob, ...]


@dataclass(frozen=True)
class Offer:
    message: Message
    parts: Parts

    def contribution(self, head: Head, terms: Terms) -> Contribution:
        """To the round that follows `head`."""
        return Contribution(
            round=head.round,
            base=head.digest,
            codec=terms.codec,
            shapes=terms.shapes,
            tokens=self.message.tokens,
            steps=self.message.steps,
            loss=self.message.loss,
            parts=self.parts,
            age=max(0, head.round - self.message.round),
        )

    def to_json(self) -> dict[str, Any]:
        parts = [{"digest": blob.digest.hex(), "size": blob.size} for blob in self.parts]
        return {"message": self.message.model_dump(mode="json"), "parts": parts}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Offer":
        parts = tuple(Blob(bytes.fromhex(part["digest"]), int(part["size"])) for part in values["parts"])
        return cls(Message.model_validate(values["message"]), parts)


@dataclass(frozen=True)
class Past:
    """A message that is decided. `since`: the first round that it may have been offered to. `was`: the fate that its
    trainer was told before, where another chain has judged otherwise. `carrier`: the serial of the message that went on
    its way with what was given back of this one; None: there was none yet."""

    offer: Offer
    since: int
    fate: Fate
    was: Fate | None = None
    carrier: int | None = None

    def carried_by(self, offer: Offer) -> "Past":
        """A new message carries what was given back before it."""
        fresh = self.fate == "excluded" and self.carrier is None
        return replace(self, carrier=offer.message.serial) if fresh else self

    def to_json(self) -> dict[str, Any]:
        values = {"since": self.since, "fate": self.fate, "was": self.was, "carrier": self.carrier}
        return {**self.offer.to_json(), **values}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Past":
        offer = Offer.from_json(values)
        return cls(offer, int(values["since"]), values["fate"], values["was"], values["carrier"])


class Sent(NamedTuple):
    """The last message that others may have, and those before it."""

    offer: Offer
    past: tuple[Past, ...] = ()


class Verdict(NamedTuple):
    """Of another chain: on the message that is on its way, and on those whose fate is another now."""

    fate: Fate
    revised: tuple[Past, ...] = ()

    @property
    def withdraws(self) -> bool:
        """Whether something that was given back must be taken out again."""
        return any(entry.was == "excluded" for entry in self.revised)


class Offers:
    """At most one message is undecided. `past`: the last that were decided, oldest first."""

    def __init__(self, program: Program, decided: tuple[int, Fate] | None = None, past: Sequence[Past] = ()) -> None:
        self._program = program
        self.current: Offer | None = None
        self.since = 0  # the first round that it may have been offered to
        self.decided = decided  # round and fate of the last message that was decided
        self.past = list(past)

    @property
    def parts(self) -> list[Blob]:
        """Of all messages that may be asked for, or given back."""
        kept = self.past[-KEPT_MESSAGES:]
        offers = [past.offer for past in kept] + ([self.current] if self.current else [])
        return [part for offer in offers for part in offer.parts]

    def asks_since(self, number: int) -> int:
        """The first round of another chain that tells what became of our messages; `number`: that we stand before."""
        offered = [*(past.since for past in self.past), *([self.since] if self.current else [])]
        return min([number, *(since for since in offered if since >= number - HORIZON)])

    def is_known(self, message: Message) -> bool:
        """Whether what a trainer that came back repeats is on its way or decided."""
        return (
            self.current is not None
            and self.current.message.round == message.round
            or (self.fate_of(message.round) != "none")
        )

    def place(self, offer: Offer, number: int | None = None) -> None:
        """A new message: its trainer has heard of the fate of the one before it. `number`: where we stand, if it is not
        the round that the message was made for."""
        # Rounds start anew from a lower number on another chain: an old fate must not pass for that of this message.
        self.current = offer
        self.decided = None
        self.past = [entry.carried_by(offer) for entry in self.past[-KNOWN_MESSAGES:]]
        self.since = offer.message.round if number is None else number

    def resume(self, outstanding: Offer | None, made: int, sent: Sent | None, number: int) -> Later:
        """After a start from disk, before round `number`: put the message in its place that may be on its way.

        The trainer goes on from a snapshot that knows of `made` messages, the last of them `outstanding` or decided.
        Returns how many messages were made after the snapshot: what it
        still had to say is in these, and must not be said again.
        """
        if sent is None or sent.offer.message.serial <= made:
            if outstanding is not None and self.fate_of(outstanding.message.round) == "none":
                self.place(outstanding, number)
            return "none"
        message, self.past = sent.offer.message, list(sent.past)
        self.place(sent.offer, number)
        if not self._may_join(message.round, number):
            self._decide("lost")  # a round that we have forgotten may have it
        return "one" if message.serial == made + 1 else "many"

    def fate_of(self, message_round: int | None) -> Fate:
        """Of the message that a trainer calls outstanding."""
        if self.decided is not None and self.decided[0] == message_round:
            return self.decided[1]
        return "none"

    def settle(self, me: PeerId, commit: Commit) -> Fate:
        """What a commit means for our message."""
        if self.current is None:
            return "none"
        if self._is_in(me, commit):
            return self._decide("included")
        return self.arrive(commit.round + 1)

    def reach(self, me: PeerId, commits: Sequence[Commit], number: int) -> Fate:
        """What these commits, in order, mean for our message, and that we stand before `number` now."""
        fates = [*(self.settle(me, commit) for commit in commits), self.arrive(number)]
        return next((fate for fate in fates if fate != "none"), "none")

    def jump(self, me: PeerId, commits: Sequence[Commit], number: int, left: Head) -> Verdict:
        """We stand on another chain than that of `left`, or further on that, before `number`. `commits`: those that we
        know of it, one after the other. Another chain may have taken our messages in rounds that ended otherwise on
        ours."""
        taken = {entry.body.parts for commit in commits for entry in commit.contributions if entry.sender == me}
        known_since = commits[0].round if commits and commits[-1].round == number - 1 else number
        is_ours = any((commit.round, commit.base) == (left.round, left.digest) for commit in commits)
        fate = self._judge(taken, 0 if is_ours and known_since < number else known_since, number)
        is_pending = fate in ("none", "excluded")
        verdict = Verdict(fate, () if is_ours else self._revise(taken, known_since, is_pending))
        if verdict.withdraws and self.current is not None and fate == "none":
            verdict = verdict._replace(fate="excluded")  # it may carry that, too
        if verdict.fate != "none":
            self._decide(verdict.fate)
        return verdict

    def _judge(self, taken: Set[Parts], known_since: int, number: int) -> Fate:
        """The message that is on its way."""
        if self.current is None:
            return "none"
        if self.current.parts in taken:
            return "included"
        if self.since < known_since:
            return "lost"
        self.since = min(self.since, number)
        return "none" if self._may_join(self.current.message.round, number) else "excluded"

    def _revise(self, taken: Set[Parts], known_since: int, is_pending: bool) -> tuple[Past, ...]:
        """The messages that were decided, from the newest on. `is_pending`: whether what the message that is on its way
        carries is still to be sent on that chain."""
        pending = {self.current.message.serial: is_pending} if self.current else {}
        revised: list[Past] = []
        for place, entry in reversed(list(enumerate(self.past))):
            fate: Fate = "included" if entry.offer.parts in taken else "excluded"
            was_pending = entry.fate == "excluded" and (entry.carrier is None or pending.get(entry.carrier, False))
            is_kept = entry.fate == "excluded" or place >= len(self.past) - KEPT_MESSAGES
            if fate == "excluded" and (entry.since < known_since or not is_kept):
                fate = "lost"
            is_news = entry.fate == "included" != fate or (was_pending and fate != "excluded")
            if is_news:
                self.past[place] = replace(entry, fate=fate, was=entry.fate, carrier=None)
                revised.append(self.past[place])
            pending[entry.offer.message.serial] = fate == "excluded" and (was_pending or is_news)
        return tuple(revised)

    def _is_in(self, me: PeerId, commit: Commit) -> bool:
        entries = (contribution for contribution in commit.contributions if contribution.sender == me)
        return self.current is not None and any(entry.body.parts == self.current.parts for entry in entries)

    def refuse(self, offer: Offer, number: int) -> None:
        """A message that carries what is about to be taken out: nobody is offered it, and its trainer gets it back."""
        self.current = offer
        self.since = number
        self._decide("excluded")

    def arrive(self, number: int) -> Fate:
        """We stand before that round: a message that it cannot take is given back."""
        if self.current is None:
            return "none"
        self.since = min(self.since, number)
        return "none" if self._may_join(self.current.message.round, number) else self._decide("excluded")

    def _may_join(self, made: int, number: int) -> bool:
        """Rounds may also have gone back: on another chain, or since the last save."""
        plan = self._program.plan
        return abs(number - made) <= MAX_AGE and plan(made).may_join(plan(number))

    def _decide(self, fate: Fate) -> Fate:
        assert self.current is not None
        self.past.append(Past(self.current, self.since, fate))
        self.decided = self.current.message.round, fate
        self.current = None
        return fate

    def to_json(self) -> dict[str, Any]:
        return {"decided": self.decided, "past": [entry.to_json() for entry in self.past]}

    @classmethod
    def from_json(cls, program: Program, values: dict[str, Any]) -> "Offers":
        decided = values["decided"]
        past = [Past.from_json(entry) for entry in values["past"]]
        return cls(program, None if decided is None else (int(decided[0]), decided[1]), past)
