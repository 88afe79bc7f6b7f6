"""The trainer's message on its way: offered to one round after the other until one takes it.

A delta that misses its round is still a delta: it joins the next one that exchanges the same values in the same code,
up to MAX_AGE rounds late. After that it is given back to the trainer, whose residual takes it in. Exactly one of the
two happens, and is remembered until the trainer's next message, so a trainer (or a whole node) that died in between
hears of it afterwards. Where it cannot be known whether a round has taken it, neither happens: it is lost.

One case is left: of a network that was split for longer than votes are remembered, one side gives a message back and
the other has taken it. Whoever then goes over to that other chain sends its content a second time. PURE.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from node.channel import Fate, Message
from optim.program import Program
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit, Contribution, Terms

MAX_AGE = 3  # rounds

Later = Literal["none", "one", "many"]


@dataclass(frozen=True)
class Offer:
    message: Message
    parts: tuple[Blob, ...]

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


class Offers:
    """At most one message is undecided."""

    def __init__(self, program: Program, decided: tuple[int, Fate] | None = None) -> None:
        self._program = program
        self.current: Offer | None = None
        self.last: Offer | None = None  # the current one, or that which was decided last
        self.since = 0  # the first round that it may have been offered to
        self.decided = decided  # round and fate of the last message that was decided

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
        self.current, self.last, self.decided = offer, offer, None
        self.since = offer.message.round if number is None else number

    def resume(self, outstanding: Offer | None, made: int, sent: Offer | None, number: int) -> Later:
        """After a start from disk, before round `number`: put the message in its place that may be on its way.

        The trainer goes on from a snapshot that knows of `made` messages, the last of them `outstanding` or decided.
        `sent`: the last message that others may have. Returns how many messages were made after the snapshot: what it
        still had to say is in these, and must not be said again.
        """
        if sent is None or sent.message.serial <= made:
            if outstanding is not None and self.fate_of(outstanding.message.round) == "none":
                self.place(outstanding, number)
            return "none"
        self.place(sent, number)
        if not self._may_join(sent.message.round, number):
            self._decide("lost")  # a round that we have forgotten may have it
        return "one" if sent.message.serial == made + 1 else "many"

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

    def jump(self, me: PeerId, commits: Sequence[Commit], number: int) -> Fate:
        """We stand on another chain, or further on ours, before `number`. `commits`: those that we know of it, one
        after the other. Another chain may have taken our message in a round that ended otherwise on ours."""
        if self.current is None:
            return "none"
        if any(self._is_in(me, commit) for commit in commits):
            return self._decide("included")
        unknown = range(self.since, number)
        if len(unknown) and not (commits and commits[0].round <= self.since and commits[-1].round == number - 1):
            return self._decide("lost")
        return self.arrive(number)

    def _is_in(self, me: PeerId, commit: Commit) -> bool:
        entries = (contribution for contribution in commit.contributions if contribution.sender == me)
        return self.current is not None and any(entry.body.parts == self.current.parts for entry in entries)

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
        self.decided = self.current.message.round, fate
        self.current = None
        return fate

    def to_json(self) -> dict[str, Any] | None:
        return None if self.decided is None else {"round": self.decided[0], "fate": self.decided[1]}

    @classmethod
    def from_json(cls, program: Program, values: dict[str, Any] | None) -> "Offers":
        return cls(program, None if values is None else (int(values["round"]), values["fate"]))
