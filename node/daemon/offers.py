"""The trainer's message on its way: offered to one round after the other until one takes it.

A delta that misses its round is still a delta: it joins the next one that exchanges the same values in the same code,
up to MAX_AGE rounds late. After that it is given back to the trainer, whose residual takes it in. Exactly one of the
two happens, and is remembered until the trainer's next message, so a trainer (or a whole node) that died in between
hears of it afterwards. PURE.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from node.channel import Fate, Message
from optim.program import Program
from protocol.blobs.blob import Blob
from protocol.identity import PeerId
from protocol.rounds.chain import Head
from protocol.rounds.statements import Commit, Contribution, Terms

MAX_AGE = 3  # rounds


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
            age=head.round - self.message.round,
        )


class Offers:
    """At most one message is undecided."""

    def __init__(self, program: Program, decided: tuple[int, Fate] | None = None) -> None:
        self._program = program
        self.current: Offer | None = None
        self.decided = decided  # round and fate of the last message that was decided

    def is_known(self, message: Message) -> bool:
        """Whether what a trainer that came back repeats is on its way or decided."""
        return (
            self.current is not None
            and self.current.message.round == message.round
            or (self.fate_of(message.round) != "none")
        )

    def place(self, offer: Offer) -> None:
        """A new message: its trainer has heard of the fate of the one before it."""
        # Rounds start anew from a lower number on another chain: an old fate must not pass for that of this message.
        self.current, self.decided = offer, None

    def fate_of(self, message_round: int | None) -> Fate:
        """Of the message that a trainer calls outstanding."""
        if self.decided is not None and self.decided[0] == message_round:
            return self.decided[1]
        return "none"

    def settle(self, me: PeerId, commit: Commit) -> Fate:
        """What a commit means for our message."""
        if self.current is None:
            return "none"
        mine = {contribution.body.parts for contribution in commit.contributions if contribution.sender == me}
        if self.current.parts in mine:
            return self._decide("included")
        return self.arrive(commit.round + 1)

    def reach(self, me: PeerId, commits: Iterable[Commit], number: int) -> Fate:
        """What these commits, in order, mean for our message, and that we stand before `number` now."""
        fates = [*(self.settle(me, commit) for commit in commits), self.arrive(number)]
        return next((fate for fate in fates if fate != "none"), "none")

    def arrive(self, number: int) -> Fate:
        """We stand before that round: a message that it cannot take is given back."""
        if self.current is None or self._may_join(self.current.message.round, number):
            return "none"
        return self._decide("excluded")

    def _may_join(self, made: int, number: int) -> bool:
        plan = self._program.plan
        return 0 <= number - made <= MAX_AGE and plan(made).may_join(plan(number))

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
