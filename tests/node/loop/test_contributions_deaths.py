"""Each contribution counts once in random histories with deaths, and more than once in two controls."""

import random
from dataclasses import dataclass, field, replace

import pytest

from node.loop.contributions import (
    MAX_AGE_ROUNDS,
    ContributionTracker,
    LastSent,
    StoredContribution,
)
from node.trainer.ipc.channel import ContributionOutcome
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, extend_head, genesis_head
from protocol.consensus.messages.contributions import Commit
from tests.node.loop.test_contributions import ME, commit, make_contribution
from tests.node.small_run import PROGRAM, RUN_ID


@dataclass(frozen=True)
class Snapshot:
    """The persisted state of a trainer: its round and its outstanding contribution."""

    round: int = 0
    outstanding: StoredContribution | None = None
    made: int = 0  # messages


@dataclass
class SimulatedNode:
    """A chain that always goes on, a node with tracker, and a trainer with a snapshot; either dies at any point."""

    rng: random.Random
    forgets_outcomes: bool = False
    loses_pending: bool = False
    tracker: ContributionTracker = field(default_factory=lambda: ContributionTracker(PROGRAM))
    head: ChainHead = field(default_factory=lambda: genesis_head(RUN_ID))
    trainer: Snapshot = field(default_factory=Snapshot)
    disk: tuple[ChainHead, object, Snapshot] | None = None
    sent: LastSent | None = None  # on disk before it is offered
    commits: list[Commit] = field(default_factory=list)
    chain: ChainHead = field(default_factory=lambda: genesis_head(RUN_ID))  # of the swarm
    made: int = 0
    settled: dict[int, list[ContributionOutcome]] = field(default_factory=dict)
    names: dict[Blob, int] = field(default_factory=dict)

    def train(self) -> None:
        """Make a contribution if none is outstanding; the trainer may be killed after its snapshot."""
        if self.trainer.outstanding is None:
            made = make_contribution(self.trainer.round, self.made)
            self.names[made.parts[0]] = self.made
            self.made += 1
            self.trainer = replace(self.trainer, outstanding=made, made=self.made)
            if self.rng.random() < 0.7:
                self.submit(made)

    def submit(self, made: StoredContribution) -> None:
        self.sent = LastSent(made, tuple(self.tracker.settled))
        self.tracker.submit(made)

    def restart_trainer(self) -> None:
        """Restart the trainer, which resends its outstanding contribution unless the outcome is known."""
        waiting = self.trainer.outstanding
        if waiting is None:
            return
        outcome = "none" if self.forgets_outcomes else self.tracker.outcome_of(waiting.header.round)
        if outcome != "none":
            self.adopt(outcome)
        elif not self.tracker.is_known(waiting.header) or self.forgets_outcomes and self.tracker.pending is None:
            self.submit(waiting)

    def swarm_commits(self) -> None:
        """Decide a round, which may include our contribution even if we do not learn of it."""
        takes_part = self.head == self.chain and self.rng.random() < 0.5
        mine = self.tracker.pending if takes_part else None
        made = commit(self.chain, mine)
        self.commits.append(made)
        self.chain = extend_head(self.chain, made)

    def apply(self) -> None:
        """Catch up by one commit, settle, and let the trainer adopt, unless something dies in between."""
        if self.head.round == self.chain.round:
            return
        found = self.commits[self.head.round]
        outcome = self.tracker.on_commit(ME, found)
        self.head = extend_head(self.head, found)
        if self.rng.random() < 0.8:
            self.adopt(outcome)

    def adopt(self, outcome: ContributionOutcome) -> None:
        waiting = self.trainer.outstanding
        if waiting is None or outcome == "none":
            self.trainer = replace(self.trainer, round=self.head.round)
            return
        number = self.names[waiting.parts[0]]
        self.settled.setdefault(number, []).append(outcome)
        self.trainer = Snapshot(self.head.round, None, self.trainer.made)

    def save(self) -> None:
        self.disk = self.head, self.tracker.to_json(), self.trainer

    def kill_node(self) -> None:
        """Restart the node from its disk: head, last outcome, and the trainer's snapshot."""
        if self.disk is None:
            return
        self.head, decided, self.trainer = self.disk
        self.tracker = ContributionTracker.from_json(PROGRAM, decided)  # type: ignore[arg-type]
        if not self.loses_pending:
            later = self.tracker.restore(self.trainer.outstanding, self.trainer.made, self.sent, self.head.round)
            if self.sent and later != "none":
                self.trainer = replace(
                    self.trainer, outstanding=self.tracker.pending, made=self.sent.contribution.header.serial
                )
        while self.loses_pending and self.head.round < self.chain.round:
            self.apply()

    def step(self) -> None:
        self.rng.choice(
            [self.train] * 4 + [self.swarm_commits] * 3 + [self.apply] * 6 + [self.save] * 2
            + [self.restart_trainer, self.kill_node]
        )()  # fmt: skip

    def finish(self) -> None:
        """Let the last contribution get its outcome."""
        for _ in range(3 * MAX_AGE_ROUNDS):
            self.restart_trainer()
            while self.head.round < self.chain.round:
                self.apply()
                self.restart_trainer()
            self.swarm_commits()

    def inclusions(self) -> list[int]:
        """Return the numbers of our contributions, one for each commit that includes one."""
        entries = [entry for body in self.commits for entry in body.contributions if entry.sender == ME]
        return [self.names[entry.body.parts[0]] for entry in entries]


def simulate(seed: int, fault: str = "") -> SimulatedNode:
    node = SimulatedNode(
        random.Random(seed), forgets_outcomes=fault == "forgets_outcomes", loses_pending=fault == "loses_pending"
    )
    for _ in range(300):
        node.step()
    node.finish()
    return node


def test_each_contribution_counts_once_with_random_deaths() -> None:
    included = returned = 0
    for seed in range(100):
        node = simulate(seed)
        counted = node.inclusions()
        assert len(counted) == len(set(counted)), f"seed {seed}: a contribution counted twice"
        for number, outcomes in node.settled.items():
            assert len(set(outcomes)) == 1, f"seed {seed}: contribution {number} got {outcomes}"
            assert (outcomes[0] == "included") == (number in counted), f"seed {seed}: contribution {number}"
        included += len(counted)
        returned += sum(outcomes[0] == "excluded" for outcomes in node.settled.values())
    assert included > 200 and returned > 10


@pytest.mark.parametrize("fault", ["forgets_outcomes", "loses_pending"])
def test_control_without_memory_some_contributions_count_twice(fault: str) -> None:
    """Without the memory of outcomes, or without the pending contribution, some count twice."""
    doubled = 0
    for seed in range(100):
        counted = simulate(seed, fault).inclusions()
        doubled += len(counted) - len(set(counted))
    assert doubled > 0
