"""The work of trainers, in units, and what becomes of it: each is applied once or never, and none gets lost.

A message carries all units that its trainer has made or got back. Where it is on its way is decided by the code of the
node itself (`node.loop.contributions`); here its verdicts are compared with what the chains really hold.
"""

import itertools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, cast

from node.loop.contributions import ContributionTracker, LastSent, SettledContribution, StoredContribution
from node.trainer.ipc.channel import ContributionHeader, ContributionOutcome
from optim.round_plan import RoundPlanner
from protocol.blobs.blob import Blob
from protocol.consensus.chain import Chain, ChainHead, extend_head
from protocol.consensus.messages.contributions import AppliedContributions, Commit
from protocol.consensus.messages.signed import Digest
from protocol.identity import PeerId
from tests.simulation.virtual.network import Scenario

Units = frozenset[int]
Parts = tuple[Blob, ...]
NONE: Units = frozenset()


@dataclass(frozen=True)
class FakeRoundPlan:
    """As much of a round's plan as matters to a message."""

    round: int
    resubmits: bool
    counts_on_any_chain: bool = True

    def is_compatible_with(self, other: "FakeRoundPlan") -> bool:
        return self.resubmits or self.round == other.round


class FakeRoundPlans:
    def __init__(self, carries: bool) -> None:
        self._carries = carries

    def plan(self, number: int) -> FakeRoundPlan:
        return FakeRoundPlan(number, self._carries)


class WorkLedger:
    """Of the whole swarm: what is in which message, and which units each chain has applied."""

    def __init__(self, genesis: ChainHead) -> None:
        self.contents: dict[Parts, Units] = {}
        self.owners: dict[Digest, PeerId] = {}  # by blob
        self.sums: dict[Digest, list[Blob]] = {}  # by their blob, what went into them
        self.made_for: dict[Digest, int] = {}
        self.applied: dict[Digest, Units] = {genesis.digest: NONE}  # by the digest of the head
        self._serials = itertools.count()

    def new_unit(self) -> int:
        return next(self._serials)

    def append(self, head: ChainHead, commit: Commit) -> None:
        """AssertionError: something is applied a second time, or nobody has made it."""
        units = self.applied[head.digest]
        for entry in commit.contributions:
            assert self.owners.get(entry.body.parts[0].digest) == entry.sender, "an invented contribution"
            content = self.contents[entry.body.parts]
            assert not content & units, "a contribution is applied twice"
            units |= content
        self.applied[extend_head(head, commit).digest] = units

    def check_applied(
        self, reported: AppliedContributions, commit: Commit, group: Collection[PeerId], store: Set[Digest]
    ) -> None:
        """AssertionError: a peer tells of other contributions than those whose bytes it has applied. `group`: with whom
        it exchanged."""
        summed = [blob for part in commit.parts for blob in self.sums[part.digest]]
        named = [blob for entry in commit.contributions for blob in entry.body.parts]
        fetched = [blob for blob in named if blob.digest in store and self.owners[blob.digest] in group]
        blobs = summed if commit.parts else fetched
        peers = sorted({self.owners[blob.digest] for blob in blobs})
        real = AppliedContributions(tuple(peers), len(blobs), sum(blob.size for blob in blobs))
        assert reported == real, f"{reported} is told, but {real} was applied"


@dataclass(frozen=True)
class SavedWork:
    """A checkpoint: the last fate, the trainer's residual and all that it has made, and its message on its way."""

    decided: dict[str, Any]
    units: Units
    residual: Units
    made: int
    outstanding: StoredContribution | None


class TrainerWork:
    """Of one peer. `units`: all that its trainer remembers to have made; `residual`: what it has to send again."""

    def __init__(self, name: PeerId, scenario: Scenario, ledger: WorkLedger) -> None:
        self._name = name
        self._scenario = scenario
        self._ledger = ledger
        self._program = cast(RoundPlanner, FakeRoundPlans(scenario.resubmits))
        self.offers = ContributionTracker(self._program)
        self.units = self.residual = NONE
        self.made = 0  # messages
        self.sent: LastSent | None = None  # the last of them, which is on disk before anybody hears of it

    def train(self, number: int) -> None:
        """A new message for that round, unless the last one is still on its way."""
        if self.offers.pending is not None:
            return
        unit, ledger = self._ledger.new_unit(), self._ledger
        self.units |= {unit}
        content, self.residual = self.residual | {unit}, NONE
        parts = tuple(Blob.of(f"{self._name} {unit} {part}".encode()) for part in range(self._scenario.parts))
        ledger.contents[parts] = content
        for blob in parts:
            ledger.owners[blob.digest], ledger.made_for[blob.digest] = self._name, number
        self.made += 1
        message = ContributionHeader(serial=self.made, round=number, sizes=(1,), tokens=100, steps=10, loss=2.5)
        offer = StoredContribution(message, parts)
        self.sent = LastSent(offer, tuple(self.offers.settled))
        self.offers.submit(offer)

    def settle(self, outcome: ContributionOutcome, revised: Sequence[SettledContribution]) -> None:
        """Hear what became of the contribution that was on its way, and of earlier ones on another chain."""
        if outcome in ("excluded", "lost"):
            self._end(self.offers.settled[-1].contribution.parts, outcome)
        for entry in revised:  # from the newest on: what it carried of an earlier one is taken out after that
            self._end(entry.contribution.parts, entry.outcome)

    def _end(self, parts: Parts, fate: ContributionOutcome) -> None:
        content = self._ledger.contents[parts]
        self.residual = self.residual | content if fate == "excluded" else self.residual - content
        if fate == "lost":
            self.units -= content

    def check_nothing_twice(self, chain: Chain) -> None:
        """Once everything is settled. AssertionError: work will be applied a second time."""
        assert not self._ledger.applied[chain.digest] & self._pending, "work is applied, and will be again"

    def check_nothing_lost(self, chain: Chain) -> None:
        """Once everything is settled. AssertionError: work is lost."""
        assert self.units <= self._ledger.applied[chain.digest] | self._pending, "work got lost"

    @property
    def _pending(self) -> Units:
        current = self.offers.pending
        return self.residual | (self._ledger.contents[current.parts] if current else NONE)

    def save(self) -> SavedWork:
        return SavedWork(self.offers.to_json(), self.units, self.residual, self.made, self.offers.pending)

    def restore(self, saved: SavedWork, number: int) -> None:
        """What was made since then is lost with the memory, unless it is in the message that was on its way."""
        self.offers, sent = ContributionTracker.from_json(self._program, saved.decided), self.sent
        self.made = saved.made
        self.units = saved.units
        self.residual = saved.residual
        if sent is not None and self.offers.restore(saved.outstanding, saved.made, sent, number) != "none":
            content, self.made = self._ledger.contents[sent.contribution.parts], sent.contribution.header.serial
            self.residual = NONE
            self.units = self.units | content if self.offers.pending else self.units - content
