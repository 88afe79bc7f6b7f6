"""The trainer's message on its way: offered to one round after the other until one takes it.

A delta that misses its round is still a delta: it joins the next one, up to MAX_AGE rounds late. After that it is
given back to the trainer, whose residual takes it in. Exactly one of the two happens, and is remembered until the
trainer's next message, so a trainer (or a whole node) that died in between hears of it afterwards. PURE.
"""

from dataclasses import dataclass
from typing import Any

from node.channel import Fate, Message
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
        )


class Offers:
    """At most one message is undecided."""

    def __init__(self, decided: tuple[int, Fate] | None = None) -> None:
        self.current: Offer | None = None
        self.decided = decided  # round and fate of the last message that was decided

    def is_known(self, message: Message) -> bool:
        """Whether what a trainer that came back repeats is on its way or decided."""
        return self.current is not None and self.current.message.round == message.round or (
            self.fate_of(message.round) != "none"
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
        if commit.round - self.current.message.round >= MAX_AGE:
            return self._decide("excluded")
        return "none"

    def _decide(self, fate: Fate) -> Fate:
        assert self.current is not None
        self.decided = self.current.message.round, fate
        self.current = None
        return fate

    def to_json(self) -> dict[str, Any] | None:
        return None if self.decided is None else {"round": self.decided[0], "fate": self.decided[1]}

    @classmethod
    def from_json(cls, values: dict[str, Any] | None) -> "Offers":
        return cls(None if values is None else (int(values["round"]), values["fate"]))
