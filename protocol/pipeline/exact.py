"""The agreement of exact steps: which peer owns which microbatch, when a server seals, and what it offers. No I/O.

A round is one step of the microbatches 0 .. count - 1. Each server reports to all others what its sum contains. A
server seals its sum once, as far as it knows, every microbatch counts at every stage; it reopens if a crash has lost
some. When all servers of its stage that have reported have sealed, it offers its sum. It first removes microbatches
that another server counts too: the lower peer id keeps them, unless the other server has offered already.

Owners are peers with standing, so a key that only announces owns nothing. If no microbatch of an owner has come to
count anywhere for a grace, those that are missing pass to the next peer by hash, and an owner that made none in a whole
round owns none in the next ones. Microbatches that two owners begin are counted once.

This only makes void rounds rare. Whether a round counts is decided by its commit alone (`ledger.covers_step`).
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Self, get_args

from protocol import murmur_pb2 as wire
from protocol.consensus.messages.contributions import Commit
from protocol.errors import MalformedError
from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.ledger import StepLedger, covers_step
from protocol.pipeline.messages import MAX_LIFE, check_bound, check_run
from protocol.pipeline.microbatch import ServerLife
from protocol.recent import RecentTable
from protocol.signing import MAX_ROUND

Phase = Literal[
    "open",  # it adds gradients
    "sealed",  # all microbatches count at all stages, so it adds nothing more
    "offered",  # its contribution has this ledger
]
PHASES: tuple[Phase, ...] = get_args(Phase)
MAX_DECISIONS = 64  # rounds of each stage; peers keep as many commits
STATEMENT_SECONDS, REPEAT_SECONDS = 0.1, 2.0  # from a change to its statement; between repeats
RETRY_SECONDS = 1.0  # before a dropped microbatch is tried again
GRACE_SECONDS, FIRST_GRACE_SECONDS = 14.0, 30.0  # for an owner without progress; while our own pace is unknown
GRACE_FACTOR = 4.0  # times our slowest microbatch of late
MAX_IDLE_ROUNDS = 64  # that an idle owner owns nothing
OVERTAKEN_SECONDS = 1.0  # how far an acknowledgement may overtake a statement
MAX_STATEMENTS = 4096  # peers


@dataclass(frozen=True)
class Statement:
    """A server's report of its sum in a round; `version` grows with each change."""

    run: RunId
    round: int
    life: int
    version: int
    ledger: StepLedger
    phase: Phase = "open"

    @property
    def age(self) -> tuple[int, int, int]:
        """Sort key for the statements of one server."""
        return self.round, self.life, self.version

    def to_wire(self) -> wire.StepStatement:
        return wire.StepStatement(
            run=bytes.fromhex(self.run),
            round=self.round,
            life=self.life,
            version=self.version,
            ledger=self.ledger.to_bytes(),
            phase=PHASES.index(self.phase),
        )

    @classmethod
    def from_wire(cls, body: wire.StepStatement, count: int) -> Self:
        """Return a checked statement about a step of `count` microbatches. Raises MalformedError."""
        check_run(body.run)
        check_bound(body.round, MAX_ROUND, "round")
        check_bound(body.life, MAX_LIFE, "life")
        if body.phase >= len(PHASES):
            raise MalformedError("an unknown phase of a step")
        ledger = StepLedger.from_bytes(body.ledger, count)
        return cls(body.run.hex(), body.round, body.life, body.version, ledger, PHASES[body.phase])


@dataclass(frozen=True)
class StepReports:
    """`decided`: by round and stage, whether the certified commit covers the step."""

    stages: int
    decided: Mapping[int, Mapping[int, bool]] = field(default_factory=dict)

    def verdict(self, round_number: int, own: Mapping[int, bool]) -> bool | None:
        """Return whether a round counts; None while it is open. `own`: what our own commit says, by stage."""
        known = {**self.decided.get(round_number, {}), **own}
        if not all(known.values()):
            return False
        return True if len(known) == self.stages else None

    def covered_stages(self, round_number: int) -> frozenset[int]:
        """Return the stages whose commit to a round covers the step."""
        return frozenset(stage for stage, covers in self.decided.get(round_number, {}).items() if covers)

    def is_void(self, round_number: int) -> bool:
        """Return whether a round cannot count any more."""
        return self.verdict(round_number, {}) is False


def commit_covers_step(commit: Commit, count: int) -> bool:
    """Return whether the contributions of a commit have each of the microbatches of a step exactly once."""
    return covers_step((entry.body.ledger for entry in commit.contributions), count)


class StepDecisions:
    """How the stages have decided the last rounds: by their commits, whose certificates were checked.

    A peer's record only tells that there is a decision, and which peer to ask for its certificate. So a step is never
    void by the word of a record.

    Args:
        count: the microbatches of a step.
    """

    def __init__(self, stages: int, count: int) -> None:
        self._stages = stages
        self._count = count
        self._by_stage = [RecentTable[int, bool](MAX_DECISIONS) for _ in range(stages)]

    def record(self, stage: int, commit: Commit) -> None:
        """Record a certified commit."""
        self.note(stage, commit.round, commit_covers_step(commit, self._count))

    def note(self, stage: int, round_number: int, is_complete: bool) -> None:
        """Record whether a certified commit covers its step."""
        self._by_stage[stage][round_number] = is_complete

    def reports(self) -> StepReports:
        """Return the known decisions."""
        decided: dict[int, dict[int, bool]] = {}
        for stage, rounds in enumerate(self._by_stage):
            for number, covers in rounds.items():
                decided.setdefault(number, {})[stage] = covers
        return StepReports(self._stages, decided)


@dataclass(frozen=True)
class SendStatement:
    """Send a statement to the other servers; it is repeated, so it may be lost."""

    peers: frozenset[PeerId]
    statement: Statement


@dataclass(frozen=True)
class OfferStep:
    """Take the gradients of `duplicates` out of the sum and offer the rest; answer by `offered` or `drop`."""

    duplicates: StepLedger


Action = SendStatement | OfferStep


class OwnerProgress:
    """Which owners of an exact step make progress. Times are those of the events, in seconds."""

    def __init__(self) -> None:
        self._began_at = 0.0
        self._newest: dict[PeerId, float] = {}  # when a microbatch of the owner last came to count, in this round
        self._idle = RecentTable[PeerId, tuple[int, int]](MAX_STATEMENTS)  # idle rounds in a row; owns again from round
        self._started: dict[int, float] = {}  # our microbatches in flight
        self._slowest = 0.0  # seconds of our slowest microbatch of late
        self._is_known = False  # whether one of ours has ended

    def begin(self, round_number: int, owners: Collection[PeerId], now: float) -> None:
        """Begin a round; `owners` had microbatches in the last one."""
        if now - self._began_at > self.grace and self._newest:
            for owner in owners:
                self._judge(owner, round_number)
        self._began_at = now
        self._newest.clear()
        self._started.clear()

    def _judge(self, owner: PeerId, round_number: int) -> None:
        if owner in self._newest:
            self._idle.pop(owner, None)
            return
        strikes = self._idle.get(owner, (0, 0))[0] + 1
        self._idle[owner] = strikes, round_number + min(MAX_IDLE_ROUNDS, 2**strikes)

    def active(self, owners: Sequence[PeerId], round_number: int) -> tuple[PeerId, ...]:
        """Return the owners without those that were idle lately, unless all were."""
        found = tuple(owner for owner in owners if self._idle.get(owner, (0, 0))[1] <= round_number)
        return found or tuple(owners)

    @property
    def grace(self) -> float:
        """Return how long an owner may make no progress."""
        return max(GRACE_SECONDS, GRACE_FACTOR * self._slowest) if self._is_known else FIRST_GRACE_SECONDS

    def start(self, number: int, now: float) -> None:
        """Record that we begin a microbatch."""
        self._started[number] = now

    def end(self, number: int, now: float) -> None:
        """Record that a microbatch of ours counts."""
        began = self._started.pop(number, None)
        if began is not None:
            self._is_known, self._slowest = True, max(0.9 * self._slowest, now - began)

    def count(self, owner: PeerId | None, now: float) -> None:
        """Record that a microbatch of an owner has come to count at a stage, unless it has passed to another peer."""
        if owner is not None and now < self.passes_at(owner, 1):
            self._newest[owner] = now

    def passes_at(self, owner: PeerId, rank: int) -> float:
        """Return when the microbatches of an owner pass to the peer that follows it at a rank."""
        return self._newest.get(owner, self._began_at) + rank * self.grace


class StepAgreement:
    """The open step, as one server sees it. `runs`: the ids of all stages; `stage`: the one it serves."""

    def __init__(self, me: PeerId, runs: Sequence[RunId], stage: int, count: int) -> None:
        self.count = count
        self.round = self.life = self.version = 0
        self.phase: Phase = "open"
        self.ledger = StepLedger(count)
        self._is_void = False  # a stage has decided the round without the whole step
        self._decided: frozenset[int] = frozenset()  # stages whose commit has the whole step
        self.is_offering = False  # while duplicates are subtracted and the contribution is made
        self.is_adding = False  # while the trainer computes a gradient for the sum
        self._me = me
        self._runs = tuple(runs)
        self._stage = stage
        self._live: tuple[Mapping[PeerId, int], ...] = tuple({} for _ in runs)  # life by peer
        self._owners: tuple[PeerId, ...] = ()
        self._statements: dict[PeerId, Statement] = {}
        self._acknowledged: dict[tuple[int, int], tuple[ServerLife, float]] = {}  # by stage and id, since when
        self._retry_at: dict[int, float] = {}
        self._statement_at: float | None = 0.0
        self._coverage: list[StepLedger] | None = None  # by stage, until something changes
        self._ranks: dict[int, tuple[PeerId, int]] | None = None  # owner and our rank after it, until something changes
        self.progress = OwnerProgress()
        self._looked_at = 0.0  # microbatches that had passed to us by then were seen

    def begin(self, round_number: int, life: int, now: float) -> None:
        """Begin the step of a round with an empty sum."""
        if round_number != self.round:
            self.progress.begin(round_number, {owner for owner, _ in self._ranked().values()}, now)
        self.round, self.life = round_number, life
        self._is_void, self._decided = False, frozenset()
        self._clear()
        self._acknowledged.clear()
        self._retry_at.clear()
        self._coverage = self._ranks = None
        self._change(now)

    def restart(self, life: int, now: float) -> None:
        """Begin a new life of the trainer: its sum is lost, unless it was offered already."""
        self.life, self.is_adding = life, False
        if self.phase != "offered":
            self._clear()
        self._change(now)

    def drop(self, now: float) -> None:
        """Begin our sum again in the same round."""
        self._clear()
        self._change(now, at_once=True)

    def offered(self, ledger: StepLedger, now: float) -> None:
        """Adopt the ledger of our contribution; our sum is frozen from now on."""
        self.phase, self.is_offering, self.ledger = "offered", False, ledger
        self._change(now, at_once=True)

    def _clear(self) -> None:
        self.phase, self.is_offering, self.ledger = "open", False, StepLedger(self.count)

    def add(self, number: int, now: float) -> None:
        """Count a microbatch in our sum; a restarted trainer may repeat its contribution meanwhile."""
        if self.phase == "offered":
            return
        self.ledger |= StepLedger.of(self.count, (number,))
        self._note_progress((number,), now)
        self._change(now)

    def set_peers(self, stages: Sequence[Mapping[PeerId, int]], owners: Collection[PeerId]) -> None:
        """Update the live servers of each stage with their lives, and the peers that own microbatches."""
        self._live = tuple(stages)
        self._owners = tuple(sorted(owners))
        self._coverage = self._ranks = None
        known = {peer for stage in stages for peer in stage}
        self._statements = {peer: each for peer, each in self._statements.items() if peer in known}

    def next_deadline(self) -> float | None:
        """Return when `advance` or `wanted` may change without an event."""
        passes = (self.progress.passes_at(owner, rank) for owner, rank in set(self._ranked().values()) if rank)
        times = [*self._retry_at.values(), *(time for time in passes if time > self._looked_at)]
        return min([*times, *([] if self._statement_at is None else [self._statement_at])], default=None)

    def take_reports(self, reports: StepReports) -> None:
        """Update how the stages have decided the round."""
        self._is_void = reports.is_void(self.round)
        self._decided = reports.covered_stages(self.round)
        self._coverage = None

    def record(self, peer: PeerId, statement: Statement, now: float) -> None:
        """Record a statement of another server, unless we know a newer one.

        A statement without a microbatch revokes its acknowledgement: the server has dropped its sum. A recent
        acknowledgement stays until the statement is repeated, because it may have overtaken the statement.
        """
        known = self._statements.get(peer)
        is_news = known.age <= statement.age if known is not None else len(self._statements) < MAX_STATEMENTS
        if is_news and statement.run in self._runs:
            if statement.round == self.round:
                before = known.ledger if known is not None and known.round == self.round else StepLedger(self.count)
                self._note_progress(statement.ledger - before, now)
            self._statements[peer] = statement
            self._coverage = None
            lacking = [
                (stage, number)
                for (stage, number), (server, since) in self._acknowledged.items()
                if server.peer == peer and since < now - OVERTAKEN_SECONDS and number not in statement.ledger
            ]
            for key in lacking:
                del self._acknowledged[key]

    def acknowledge(self, number: int, added: Mapping[int, ServerLife], now: float) -> None:
        """Record which servers, in which lives, count a microbatch of ours."""
        if added:
            self.progress.end(number, now)
        self._acknowledged |= {(stage, number): (server, now) for stage, server in added.items()}

    def postpone(self, number: int, now: float) -> None:
        """Retry a dropped microbatch after RETRY_SECONDS."""
        self._retry_at[number] = now + RETRY_SECONDS

    @property
    def _listeners(self) -> frozenset[PeerId]:
        """The peers that receive our statements: all live servers except us."""
        return frozenset(peer for stage in self._live for peer in stage) - {self._me}

    # Owners

    def counted_at(self, number: int) -> frozenset[int]:
        """Return the stages at which a live server counts a microbatch, as far as we know."""
        return frozenset(stage for stage in range(len(self._runs)) if self._is_counted(stage, number))

    def wanted(self, started: Collection[int], now: float) -> list[int]:
        """Return our microbatches that some stage lacks and that are not in flight."""
        return [
            number
            for number, (owner, rank) in self._ranked().items()
            if number not in started
            and self._retry_at.get(number, now) <= now
            and (not rank or self.progress.passes_at(owner, rank) <= now)
            and not self._is_complete(number)
        ]

    def _ranked(self) -> dict[int, tuple[PeerId, int]]:
        """Return for each microbatch its owner, and how many peers come before us; none if we own nothing."""
        if self._ranks is None:
            owners = self.progress.active(self._owners, self.round)
            orders = {number: ranked_owners(self.round, number, owners) for number in range(self.count)}
            self._ranks = {
                number: (order[0], order.index(self._me)) for number, order in orders.items() if self._me in order
            }
        return self._ranks

    def _note_progress(self, numbers: Iterable[int], now: float) -> None:
        for number in numbers:
            owner, _ = self._ranked().get(number, (None, 0))
            self.progress.count(owner, now)

    def _is_complete(self, number: int) -> bool:
        return all(self._is_counted(stage, number) for stage in range(len(self._runs)))

    def _is_counted(self, stage: int, number: int) -> bool:
        return number in self._covered()[stage] or self._has_acknowledgement(stage, number)

    def _has_acknowledgement(self, stage: int, number: int) -> bool:
        """Return whether a server acknowledged a microbatch of ours and still has the same life."""
        server, _ = self._acknowledged.get((stage, number), (None, 0.0))
        is_elsewhere = server is not None and server.peer != self._me
        return server is not None and is_elsewhere and self._live[stage].get(server.peer) == server.life

    # Servers

    def advance(self, now: float) -> list[Action]:
        """Seal or reopen the sum, and return the actions that are due."""
        self._looked_at = now
        self._retry_at = {number: at for number, at in self._retry_at.items() if at > now}
        actions: list[Action] = []
        if self.phase != "offered" and not self.is_adding and not self.is_offering:
            self._seal_or_open(now)
            if (self.phase == "sealed" and self._may_offer()) or self._is_void:
                self.is_offering = True
                actions.append(OfferStep(self._duplicates()))
        if self._statement_at is not None and self._statement_at <= now:
            self._statement_at = now + REPEAT_SECONDS
            actions.append(SendStatement(self._listeners, self.statement))
        return actions

    @property
    def statement(self) -> Statement:
        """Our newest statement."""
        return Statement(self._runs[self._stage], self.round, self.life, self.version, self.ledger, self.phase)

    def _seal_or_open(self, now: float) -> None:
        is_complete = all(covered.is_complete for covered in self._covered())
        if is_complete != (self.phase == "sealed"):
            self.phase = "sealed" if is_complete else "open"
            self._change(now, at_once=True)

    def _may_offer(self) -> bool:
        return all(each.phase != "open" for each in self._valid_statements(self._stage).values())

    def _duplicates(self) -> StepLedger:
        """Return the microbatches that other servers count too and that we must give up."""
        theirs = StepLedger(self.count)
        for peer, statement in self._valid_statements(self._stage).items():
            if peer < self._me or statement.phase == "offered":
                theirs |= statement.ledger
        return self.ledger & theirs

    def _valid_statements(self, stage: int) -> dict[PeerId, Statement]:
        """Return the valid statements of the other live servers of a stage about this round."""
        found = ((peer, self._statements.get(peer), life) for peer, life in self._live[stage].items())
        return {
            peer: statement
            for peer, statement, life in found
            if statement is not None and peer != self._me and self._counts(statement, stage, life)
        }

    def _counts(self, statement: Statement, stage: int, life: int) -> bool:
        """Return whether a statement is about this round, and its sum still exists."""
        is_here = (statement.run, statement.round) == (self._runs[stage], self.round)
        # An offered sum outlives its trainer, which sends the contribution again after a restart.
        return is_here and (statement.life >= life or statement.phase == "offered")

    def _covered(self) -> list[StepLedger]:
        """Return the microbatches that each stage counts, as far as we know."""
        if self._coverage is None:
            self._coverage = [self._covered_at(stage) for stage in range(len(self._runs))]
        return self._coverage

    def _covered_at(self, stage: int) -> StepLedger:
        if stage in self._decided:
            return StepLedger.full(self.count)
        covered = self.ledger if stage == self._stage else StepLedger(self.count)
        for statement in self._valid_statements(stage).values():
            covered |= statement.ledger
        return covered

    def _change(self, now: float, at_once: bool = False) -> None:
        self.version += 1
        self._coverage = None
        due = now if at_once else now + STATEMENT_SECONDS
        self._statement_at = due if self._statement_at is None else min(self._statement_at, due)


@lru_cache(maxsize=8192)
def ranked_owners(round_number: int, number: int, peers: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Return the peers in the order in which they may own a microbatch: by a hash that differs for each."""
    return tuple(sorted(peers, key=lambda peer: hashlib.sha256(f"{round_number} {number} {peer}".encode()).digest()))


def owner_of(round_number: int, number: int, peers: tuple[PeerId, ...]) -> PeerId | None:
    """Return the owner of a microbatch among these peers."""
    return next(iter(ranked_owners(round_number, number, peers)), None)
