"""Each message is included once or given back once, whoever is killed when."""

import random
from dataclasses import dataclass, field, replace

import pytest

from node.ipc.channel import ContributionHeader, ContributionOutcome
from node.loop.contributions import (
    MAX_AGE_ROUNDS,
    MAX_RESTORABLE,
    MAX_SETTLED,
    ContributionTracker,
    ForkOutcome,
    LastSent,
    SettledContribution,
    StoredContribution,
)
from optim.compose import compose
from protocol.blobs.blob import Blob
from protocol.consensus.chain import ChainHead, extend_head, genesis_head
from protocol.consensus.messages import Commit
from tests.node.small_run import PEERS, PROGRAM, RUN_ID, TERMS, commit_of, program_of
from tests.optim.fake_peers import Tables, constant

ME = PEERS[1].peer_id
NOWHERE = ChainHead(9, bytes(32), 0)  # of a chain that nobody else knows


def message(number: int, serial: int = 0) -> ContributionHeader:
    return ContributionHeader(serial=serial, round=number, sizes=(4,), tokens=100, steps=5, loss=3.0)


def offer(number: int, identity: int = 0) -> StoredContribution:
    return StoredContribution(message(number, identity + 1), (Blob.of(f"message {number} {identity}".encode()),))


def commit(head: ChainHead, mine: StoredContribution | None) -> Commit:
    return commit_of(head, {0: Blob.of(b"other")} | ({1: mine.parts[0]} if mine else {})).body


def test_an_included_message_is_remembered_until_the_next() -> None:
    offers, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    offers.submit(offer(0))
    assert offers.is_known(message(0)) and not offers.is_known(message(1))
    assert offers.on_commit(ME, commit(head, offer(0))) == "included"
    assert offers.pending is None and offers.outcome_of(0) == "included" and offers.outcome_of(None) == "none"
    assert offers.is_known(message(0))
    assert ContributionTracker.from_json(PROGRAM, offers.to_json()).outcome_of(0) == "included"
    offers.submit(offer(1))
    assert (
        offers.outcome_of(0) == "none" and ContributionTracker.from_json(PROGRAM, offers.to_json()).last_outcome is None
    )


def test_a_late_message_joins_the_next_round_and_an_old_one_is_given_back() -> None:
    offers, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    offers.submit(offer(0))
    for number in range(MAX_AGE_ROUNDS):
        assert offers.pending is not None
        contribution = offers.pending.to_contribution(head, TERMS)
        assert (contribution.round, contribution.age) == (number, number)
        missed = commit(head, None)
        assert offers.on_commit(ME, missed) == "none"
        head = extend_head(head, missed)
    assert offers.pending is not None and offers.pending.to_contribution(head, TERMS).age == MAX_AGE_ROUNDS
    assert offers.on_commit(ME, commit(head, None)) == "excluded"
    assert offers.outcome_of(0) == "excluded"


FRAGMENTS = compose("averaging", {"schedule": {"fragments": 2}})


@pytest.mark.parametrize("made", range(4))
def test_a_message_is_never_offered_to_a_round_of_another_fragment(made: int) -> None:
    """Of two fragments: it is given back at once. (The next round of its own would come, but its peer may send another
    message by then.)"""
    offers = ContributionTracker(program_of(FRAGMENTS))
    offers.submit(offer(made))
    assert offers.on_round(made) == "none" and offers.pending is not None
    assert offers.on_round(made + 1) == "excluded" and offers.pending is None
    control = ContributionTracker(PROGRAM)  # where every round sends everything
    control.submit(offer(made))
    assert control.on_round(made + 1) == "none" and control.pending is not None


def test_a_jump_to_another_round_of_its_fragment_keeps_it_on_its_way() -> None:
    offers = ContributionTracker(program_of(FRAGMENTS))
    offers.submit(offer(1))
    assert offers.on_round(3) == "none" and offers.on_round(5) == "excluded"


@pytest.mark.parametrize(
    ("tables", "kept"),
    [
        ({"codec": {"k": [constant(64, 1), 32]}}, False),
        ({"codec": {"kind": "subset"}}, False),
        ({"codec": {"kind": "subset", "shared": False}}, True),
        ({"signal": {"kind": "weights"}, "update": {"kind": "replace"}}, False),
        ({"feedback": {"decay": [constant(0.5, 1), 0.9]}}, True),
    ],
    ids=str,
)
def test_only_what_means_the_same_in_the_next_round_is_offered_to_it(tables: Tables, kept: bool) -> None:
    offers = ContributionTracker(program_of(compose("sparseloco", tables)))
    offers.submit(offer(0))
    assert (offers.on_round(1) == "none") is kept


def test_on_a_chain_with_lower_rounds_a_message_is_given_back() -> None:
    offers = ContributionTracker(PROGRAM)
    offers.submit(offer(7))
    assert offers.on_round(6 - MAX_AGE_ROUNDS) == "excluded"


def test_on_a_chain_that_has_taken_it_before_a_message_is_not_offered_again() -> None:
    """Two parts of a split network end round 0 otherwise; we make one round more, and then meet the better chain."""
    ours, theirs, offers = genesis_head(RUN_ID), genesis_head(RUN_ID), ContributionTracker(PROGRAM)
    offers.submit(offer(0))
    missed, taken = commit(ours, None), commit(theirs, offer(0))
    assert offers.on_commit(ME, missed) == "none"
    ours, theirs = extend_head(ours, missed), extend_head(theirs, taken)
    assert offers.on_commits(ME, [commit(ours, None)], 2) == "none" and offers.submitted_since == 0
    naive = ContributionTracker(PROGRAM)
    naive.submit(offer(0))
    assert naive.on_commits(ME, [], 1) == "none" and naive.pending == offer(0), (
        "it would be offered to round 1 of theirs"
    )
    assert offers.on_fork(ME, [taken], 1, ours) == ForkOutcome("included")


@pytest.mark.parametrize("known", [(), (1,), (0,)], ids=str)
def test_where_it_is_not_known_who_took_it_a_message_is_lost(known: tuple[int, ...]) -> None:
    head, chain, offers = genesis_head(RUN_ID), [], ContributionTracker(PROGRAM)
    for _ in range(2):
        chain.append(commit(head, None))
        head = extend_head(head, chain[-1])
    offers.submit(offer(0))
    assert (
        offers.on_fork(ME, [chain[number] for number in known], 2, NOWHERE).outcome == "lost" and offers.pending is None
    )
    assert offers.outcome_of(0) == "lost"
    offers.submit(offer(0))
    assert offers.on_fork(ME, chain, 2, NOWHERE).outcome == "none" and offers.pending == offer(0)


class Fork:
    """Our messages to a chain of ours; `taken` says of each which of two chains takes it: o(urs), t(heirs) or none."""

    def __init__(self, taken: str) -> None:
        self.offers = ContributionTracker(program_of(compose("averaging", {"schedule": {"fragments": 2}})))
        self.ours = genesis_head(RUN_ID)
        self.theirs = genesis_head(RUN_ID)
        self.chain = list[Commit]()
        self.made = [offer(number, number) for number in range(len(taken))]
        for number, taker in enumerate(taken):
            self.offers.submit(self.made[number])
            mine = commit(self.ours, self.made[number] if taker == "o" else None)
            self.chain.append(commit(self.theirs, self.made[number] if taker == "t" else None))
            self.offers.on_commits(ME, [mine], number + 1)
            self.ours = extend_head(self.ours, mine)
            self.theirs = extend_head(self.theirs, self.chain[-1])

    def meet(self, known_since: int = 0) -> ForkOutcome:
        return self.offers.on_fork(ME, self.chain[known_since:], len(self.chain), self.ours)

    def fates(self, verdict: ForkOutcome) -> dict[int, tuple[ContributionOutcome | None, ContributionOutcome]]:
        return {
            self.made.index(entry.contribution): (entry.previous_outcome, entry.outcome) for entry in verdict.revised
        }


def test_what_only_the_chain_that_was_left_has_taken_is_given_back() -> None:
    fork = Fork("oo")
    assert fork.fates(fork.meet()) == {0: ("included", "excluded"), 1: ("included", "excluded")}
    assert fork.meet().revised == (), "once"


def test_what_was_given_back_and_is_on_the_other_chain_is_taken_out_again() -> None:
    fork = Fork("t-")
    verdict = fork.meet()
    assert fork.fates(verdict) == {0: ("excluded", "included")} and verdict.retracts_restored
    kept = Fork("--").meet()
    assert kept.revised == () and not kept.retracts_restored, "the control: it stays what is to be sent"


def test_a_message_that_carries_what_is_taken_out_is_given_back_first() -> None:
    fork = Fork("t")
    fork.offers.submit(offer(1, 1))
    assert fork.meet() == ForkOutcome("excluded", (SettledContribution(fork.made[0], 0, "included", "excluded"),))
    clean = Fork("o")
    clean.offers.submit(offer(1, 1))
    assert clean.meet().outcome == "none", "what is given back now is not in it"


def test_what_a_chain_has_taken_inside_of_a_later_message_is_taken_out_with_that() -> None:
    """The first was given back and went into the second, which ours took: that alone comes back, less the first."""
    fork = Fork("to")
    assert fork.fates(fork.meet()) == {1: ("included", "excluded"), 0: ("excluded", "included")}


def test_where_it_is_not_known_what_the_other_chain_took_nothing_is_sent_twice() -> None:
    assert Fork("o-").fates(Fork("o-").meet(1)) == {0: ("included", "lost")}
    fork = Fork("-o")
    assert fork.fates(fork.meet(1)) == {1: ("included", "excluded"), 0: ("excluded", "lost")}
    assert fork.offers.history_needed_since(2) == 0


def test_further_on_our_own_chain_all_stays_as_it_was() -> None:
    fork = Fork("o-")
    further = commit(fork.ours, None)
    assert fork.offers.on_fork(ME, [further], 3, fork.ours) == ForkOutcome("none")
    assert Fork("o-").offers.on_fork(ME, [further], 3, NOWHERE).revised, "the control: as if it were another one"


def test_only_so_many_are_remembered_and_fewer_are_kept() -> None:
    fork = Fork("o" * 20)
    fates = fork.fates(fork.meet())
    assert len(fates) == MAX_SETTLED + 1 and len(fork.offers.retained_parts) == MAX_RESTORABLE
    assert [number for number, (_, fate) in fates.items() if fate == "excluded"] == [19, 18, 17]
    again = ContributionTracker.from_json(PROGRAM, fork.offers.to_json())
    assert (again.settled, again.last_outcome) == (fork.offers.settled, fork.offers.last_outcome)
    assert again.history_needed_since(200) == 200, "no chain remembers that"


def test_what_was_made_after_the_checkpoint_is_on_its_way() -> None:
    offers = ContributionTracker(PROGRAM)
    assert offers.restore(offer(0, 0), 1, LastSent(offer(0, 0)), 0) == "none" and offers.pending == offer(0, 0)
    assert offers.restore(None, 1, LastSent(offer(1, 1)), 1) == "one" and offers.pending == offer(1, 1)
    assert offers.restore(offer(0, 0), 1, LastSent(offer(2, 2)), 1) == "many" and offers.pending == offer(2, 2)
    assert offers.restore(None, 0, LastSent(offer(9, 0)), 9 - MAX_AGE_ROUNDS - 1) == "one" and offers.pending is None
    assert offers.outcome_of(9) == "lost"


def test_the_same_bytes_of_somebody_else_are_not_ours() -> None:
    offers, head = ContributionTracker(PROGRAM), genesis_head(RUN_ID)
    offers.submit(offer(0))
    assert offers.on_commit(ME, commit_of(head, {2: offer(0).parts[0]}).body) == "none"


def test_on_a_chain_with_lower_rounds_an_old_fate_is_not_that_of_a_new_message() -> None:
    offers, head = ContributionTracker(PROGRAM), ChainHead(7, bytes(32), 0)
    offers.submit(offer(7))
    offers.on_commit(ME, commit(head, offer(7)))
    offers.submit(offer(5))  # after a jump back to round 5
    offers.on_commit(ME, commit(ChainHead(5, bytes(32), 0), offer(5)))
    offers.submit(offer(7, identity=1))
    assert offers.outcome_of(7) == "none"


@dataclass(frozen=True)
class Snapshot:
    """What a trainer has written down: its round, and the message that it waits for."""

    round: int = 0
    outstanding: StoredContribution | None = None
    made: int = 0  # messages


@dataclass
class SimulatedNode:
    """A chain that always goes on, a node with offers, and a trainer with a snapshot; either dies at any point."""

    rng: random.Random
    forgetful: bool = False
    lost_at_restart: bool = False
    offers: ContributionTracker = field(default_factory=lambda: ContributionTracker(PROGRAM))
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
        """A message, if none is outstanding; the snapshot is written before it is sent, and then it may be killed."""
        if self.trainer.outstanding is None:
            made = offer(self.trainer.round, self.made)
            self.names[made.parts[0]] = self.made
            self.made += 1
            self.trainer = replace(self.trainer, outstanding=made, made=self.made)
            if self.rng.random() < 0.7:
                self.place(made)

    def place(self, made: StoredContribution) -> None:
        self.sent = LastSent(made, tuple(self.offers.settled))
        self.offers.submit(made)

    def restart_trainer(self) -> None:
        """It says Ready with what is outstanding, and sends it again; the daemon greets it with the fate if known."""
        waiting = self.trainer.outstanding
        if waiting is None:
            return
        fate = "none" if self.forgetful else self.offers.outcome_of(waiting.header.round)
        if fate != "none":
            self.adopt(fate)
        elif not self.offers.is_known(waiting.header) or self.forgetful and self.offers.pending is None:
            self.place(waiting)

    def swarm_commits(self) -> None:
        """A round is decided; our message may be in it, whether or not we hear of it."""
        takes_part = self.head == self.chain and self.rng.random() < 0.5
        mine = self.offers.pending if takes_part else None
        made = commit(self.chain, mine)
        self.commits.append(made)
        self.chain = extend_head(self.chain, made)

    def apply(self) -> None:
        """Catch up by one commit, settle, and let the trainer adopt, unless something dies in between."""
        if self.head.round == self.chain.round:
            return
        found = self.commits[self.head.round]
        fate = self.offers.on_commit(ME, found)
        self.head = extend_head(self.head, found)
        if self.rng.random() < 0.8:
            self.adopt(fate)

    def adopt(self, fate: ContributionOutcome) -> None:
        waiting = self.trainer.outstanding
        if waiting is None or fate == "none":
            self.trainer = replace(self.trainer, round=self.head.round)
            return
        number = self.names[waiting.parts[0]]
        self.settled.setdefault(number, []).append(fate)
        self.trainer = Snapshot(self.head.round, None, self.trainer.made)

    def save(self) -> None:
        self.disk = self.head, self.offers.to_json(), self.trainer

    def kill_node(self) -> None:
        """The disk knows the head, the last fate, and the trainer's snapshot with what was outstanding."""
        if self.disk is None:
            return
        self.head, decided, self.trainer = self.disk
        self.offers = ContributionTracker.from_json(PROGRAM, decided)  # type: ignore[arg-type]
        if not self.lost_at_restart:
            later = self.offers.restore(self.trainer.outstanding, self.trainer.made, self.sent, self.head.round)
            if self.sent and later != "none":
                self.trainer = replace(
                    self.trainer, outstanding=self.offers.pending, made=self.sent.contribution.header.serial
                )
        while self.lost_at_restart and self.head.round < self.chain.round:
            self.apply()

    def step(self) -> None:
        self.rng.choice(
            [self.train] * 4 + [self.swarm_commits] * 3 + [self.apply] * 6 + [self.save] * 2
            + [self.restart_trainer, self.kill_node]
        )()  # fmt: skip

    def finish(self) -> None:
        """Everything heals: the last message gets its fate."""
        for _ in range(3 * MAX_AGE_ROUNDS):
            self.restart_trainer()
            while self.head.round < self.chain.round:
                self.apply()
                self.restart_trainer()
            self.swarm_commits()

    def inclusions(self) -> list[int]:
        """Numbers of our messages, one for each commit that has one."""
        entries = [entry for body in self.commits for entry in body.contributions if entry.sender == ME]
        return [self.names[entry.body.parts[0]] for entry in entries]


def simulate(seed: int, fault: str = "") -> SimulatedNode:
    world = SimulatedNode(
        random.Random(seed), forgetful=fault == "forgetful", lost_at_restart=fault == "lost_at_restart"
    )
    for _ in range(300):
        world.step()
    world.finish()
    return world


def test_whoever_dies_when_each_message_counts_once() -> None:
    included = given_back = 0
    for seed in range(100):
        world = simulate(seed)
        counted = world.inclusions()
        assert len(counted) == len(set(counted)), f"seed {seed}: a message counted twice"
        for number, fates in world.settled.items():
            assert len(set(fates)) == 1, f"seed {seed}: message {number} was told {fates}"
            assert (fates[0] == "included") == (number in counted), f"seed {seed}: message {number}"
        included += len(counted)
        given_back += sum(fates[0] == "excluded" for fates in world.settled.values())
    assert included > 200 and given_back > 10


@pytest.mark.parametrize("fault", ["forgetful", "lost_at_restart"])
def test_negative_control(fault: str) -> None:
    """Without the memory of fates, or without the message on its way in a checkpoint, some are counted twice."""
    doubled = 0
    for seed in range(100):
        counted = simulate(seed, fault).inclusions()
        doubled += len(counted) - len(set(counted))
    assert doubled > 0
