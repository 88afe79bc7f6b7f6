"""Statements of rounds that are not open: early ones wait for theirs, late ones are answered with what was decided.

Statements of the next round come from peers that have finished this one. Of each sender the newest of each kind is
kept, so nobody can crowd out anybody; whose statements may be kept at all is for the caller to say. Late ones come from
peers that have not heard of a decision: each is told it, and told again if it still asks some time later.
"""

from collections.abc import Iterable
from typing import Any

from protocol.identity import PeerId
from protocol.murmur_pb2 import Signed
from protocol.rounds.reports import Decision
from protocol.rounds.statements import Commit, Statement

KEPT_DECISIONS = 4
MAX_TOLD = 4096  # of one decision; whoever was told the longest ago is forgotten first
Key = tuple[PeerId, str, int]  # sender, kind and part: what a peer may say of these is bounded


def key_of(statement: Statement[Any]) -> Key:
    return statement.sender, statement.signed.kind, getattr(statement.body, "part", 0)


class Attendance:
    """`patience`: seconds after which whoever still asks is told the same decision again."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._early: dict[Key, Statement[Any]] = {}
        self._decisions: dict[int, tuple[Signed, ...]] = {}
        self._told: dict[int, dict[PeerId, float]] = {}

    def keep(self, statement: Statement[Any]) -> None:
        """For the round after the one that is open."""
        self._early[key_of(statement)] = statement

    def begin(self, number: int) -> list[Statement[Any]]:
        """A round opens: what came for it early. After a change of chains, later decisions may be of the other one."""
        for later in [known for known in self._decisions if known >= number]:
            del self._decisions[later], self._told[later]
        early, self._early = self._early, {}
        return [statement for statement in early.values() if statement.body.round == number]

    def close(self) -> None:
        self._early.clear()

    def decide(self, number: int, decision: tuple[Signed, ...], told: Iterable[PeerId], now: float) -> None:
        """`told`: who has just been sent it."""
        self._decisions[number], self._told[number] = decision, dict.fromkeys(told, now)
        while len(self._decisions) > KEPT_DECISIONS:
            oldest = min(self._decisions)
            del self._decisions[oldest], self._told[oldest]

    def is_late(self, statement: Statement[Any]) -> bool:
        """Whether its sender has not heard that its round is decided."""
        return statement.body.round in self._decisions and not isinstance(statement.body, Commit | Decision)

    def answer(self, number: int, asker: PeerId, now: float) -> tuple[Signed, ...]:
        """What was decided in that round; nothing to whom it was told a moment ago."""
        told = self._told[number]
        if now < told.get(asker, -self._patience) + self._patience:
            return ()
        told.pop(asker, None)
        told[asker] = now
        if len(told) > MAX_TOLD:
            del told[next(iter(told))]
        return self._decisions[number]
