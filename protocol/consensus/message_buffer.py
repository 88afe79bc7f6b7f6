"""Statements of rounds that are not open: early ones wait for theirs, late ones are answered with what was decided.

Statements of the next round come from peers that have finished this one. Of each sender the newest of each kind is
kept, so nobody can crowd out anybody; whose statements may be kept at all is for the caller to say. Late ones come from
peers that have not heard of a decision: each is told it, and told again if it still asks some time later.
"""

from collections.abc import Iterable
from typing import Any

from protocol.consensus.message_kinds import CommitCertificate
from protocol.consensus.messages import Commit, SignedMessage
from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed

MAX_KEPT_DECISIONS = 4
MAX_ANSWERED_PEERS = 4096  # of one decision; whoever was told the longest ago is forgotten first
MessageKey = tuple[PeerId, str, int]  # sender, kind and part: what a peer may say of these is bounded


def message_key(message: SignedMessage[Any]) -> MessageKey:
    return message.sender, message.signed.kind, getattr(message.body, "part", 0)


class MessageBuffer:
    """`patience`: seconds after which whoever still asks is told the same decision again."""

    def __init__(self, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._early: dict[MessageKey, SignedMessage[Any]] = {}
        self._decisions: dict[int, tuple[Signed, ...]] = {}
        self._answered_at: dict[int, dict[PeerId, float]] = {}

    def buffer_early(self, message: SignedMessage[Any]) -> None:
        """For the round after the one that is open."""
        self._early[message_key(message)] = message

    def open_round(self, number: int) -> list[SignedMessage[Any]]:
        """A round opens: what came for it early. After a change of chains, later decisions may be of the other one."""
        for later in [known for known in self._decisions if known >= number]:
            del self._decisions[later], self._answered_at[later]
        early, self._early = self._early, {}
        return [statement for statement in early.values() if statement.body.round == number]

    def clear(self) -> None:
        self._early.clear()

    def record_decision(
        self, number: int, decision: tuple[Signed, ...], informed_peers: Iterable[PeerId], now: float
    ) -> None:
        """`told`: who has just been sent it."""
        self._decisions[number], self._answered_at[number] = decision, dict.fromkeys(informed_peers, now)
        while len(self._decisions) > MAX_KEPT_DECISIONS:
            oldest = min(self._decisions)
            del self._decisions[oldest], self._answered_at[oldest]

    def is_late(self, message: SignedMessage[Any]) -> bool:
        """Whether its sender has not heard that its round is decided."""
        return message.body.round in self._decisions and not isinstance(message.body, Commit | CommitCertificate)

    def answer_late(self, number: int, peer: PeerId, now: float) -> tuple[Signed, ...]:
        """What was decided in that round; nothing to whom it was told a moment ago."""
        told = self._answered_at[number]
        if now < told.get(peer, -self._repeat_seconds) + self._repeat_seconds:
            return ()
        told.pop(peer, None)
        told[peer] = now
        if len(told) > MAX_ANSWERED_PEERS:
            del told[next(iter(told))]
        return self._decisions[number]
