"""The agreement of exact steps: which peer owns which microbatch, when a server seals, and what it offers. No I/O.

A round is one step of the microbatches 0 .. count - 1. Each server reports to all others what its sum contains. A
server seals its sum once, as far as it knows, every microbatch counts at every stage; it reopens if a crash has lost
some. When all servers of its stage that have reported have sealed, it offers its sum. It first removes microbatches
that another server counts too: the lower peer id keeps them, unless the other server has offered already.

Owners are peers with standing, so a key that only announces owns nothing. If no microbatch of an owner has come to
count anywhere for a grace, those that are missing pass to the next peer by hash, and an owner that made none in a whole
round owns none in the next ones. Microbatches that two owners begin are counted once.

This only makes void rounds rare. Whether a round counts is decided by its commit alone (`ledger.covers_step`).

A statement is the word of one key. It counts only from servers with standing, and the others neither get microbatches
nor add any. The certified commits show whose word was false: a server that stated microbatches which its stage's commit
lacks, twice in late rounds, is not believed for some rounds. It knows that itself, and adds nothing meanwhile.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Literal, NamedTuple, Self, TypeVar, get_args

from protocol import murmur_pb2 as wire
from protocol.conduct import GOOD_ROUNDS, MAX_LEVEL, Suspension
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
Found = TypeVar("Found")


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
    """How the stages decided, by round and stage.

    Args:
        decided: whether the certified commit covers the step.
        lacking: the microbatches that no contribution of the commit has, if there are any.
    """

    stages: int
    decided: Mapping[int, Mapping[int, bool]] = field(default_factory=dict)
    lacking: Mapping[int, Mapping[int, StepLedger]] = field(default_factory=dict)

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


def lacking_microbatches(commit: Commit, count: int) -> StepLedger:
    """Return the microbatches of a step that no contribution of a commit has."""
    ledgers = (StepLedger.from_bytes(entry.body.ledger, count) for entry in commit.contributions)
    return StepLedger.full(count) - reduce(StepLedger.__or__, ledgers, StepLedger(count))


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
        self._lacking = [RecentTable[int, StepLedger](MAX_DECISIONS) for _ in range(stages)]

    def record(self, stage: int, commit: Commit) -> None:
        """Record a certified commit."""
        covers = commit_covers_step(commit, self._count)
        self.note(stage, commit.round, covers, lacking_microbatches(commit, self._count))

    def note(self, stage: int, round_number: int, is_complete: bool, lacking: StepLedger) -> None:
        """Record whether a certified commit covers its step, and the microbatches that it lacks."""
        self._by_stage[stage][round_number] = is_complete
        if len(lacking):
            self._lacking[stage][round_number] = lacking

    def reports(self) -> StepReports:
        """Return the known decisions."""
        return StepReports(self._stages, _by_round(self._by_stage), _by_round(self._lacking))


def _by_round(tables: Sequence[Mapping[int, Found]]) -> dict[int, dict[int, Found]]:
    """Return what the tables of the stages have, by round and stage."""
    found: dict[int, dict[int, Found]] = {}
    for stage, rounds in enumerate(tables):
        for number, entry in rounds.items():
            found.setdefault(number, {})[stage] = entry
    return found


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
        self.grace = FIRST_GRACE_SECONDS  # how long an owner may make no progress

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

    def start(self, number: int, now: float) -> None:
        """Record that we begin a microbatch."""
        self._started[number] = now

    def end(self, number: int, now: float) -> None:
        """Record that a microbatch of ours counts."""
        began = self._started.pop(number, None)
        if began is not None:
            self._slowest = max(0.9 * self._slowest, now - began)
            self.grace = max(GRACE_SECONDS, GRACE_FACTOR * self._slowest)

    def count(self, owner: PeerId | None, now: float) -> None:
        """Record that a microbatch of an owner has come to count at a stage, unless it has passed to another peer."""
        if owner is not None and now < self.passes_at(owner, 1):
            self._newest[owner] = now

    def passes_at(self, owner: PeerId, rank: int) -> float:
        """Return when the microbatches of an owner pass to the peer that follows it at a rank."""
        return self._newest.get(owner, self._began_at) + rank * self.grace


class StatedWork(NamedTuple):
    """The microbatches that a server has stated in a round, and those of them that it has offered."""

    stated: StepLedger
    offered: StepLedger


def _find_guilty(lacking: Iterable[int], promises: Mapping[PeerId, StatedWork]) -> set[PeerId]:
    """Return the servers that should have contributed the microbatches that the commit of their stage lacks.

    Of servers that state the same microbatch, one that has offered it keeps it, and otherwise the lowest id.
    """
    guilty = set[PeerId]()
    for number in lacking:
        offered = {peer for peer, promise in promises.items() if number in promise.offered}
        stated = [peer for peer, promise in promises.items() if number in promise.stated]
        guilty |= offered or set(sorted(stated)[:1])
    return guilty


class Credibility:
    """Whose statements count: not those of servers that the certified commits of late rounds have belied.

    A first time may be the death of a server, or a leader that left it out. From the second one on nobody believes it
    for twice as long each time; good rounds are forgiven as those of `protocol.conduct`.
    """

    def __init__(self) -> None:
        self._round = 0
        self._stated: dict[int, dict[PeerId, StatedWork]] = {}  # in the open round, by stage
        self._before: tuple[int, dict[int, dict[PeerId, StatedWork]]] = (0, {})
        self._judged: set[tuple[int, int]] = set()
        self._records = RecentTable[PeerId, Suspension](MAX_STATEMENTS)
        self._slow = RecentTable[PeerId, Suspension](MAX_STATEMENTS)  # that let others wait with their sums

    def begin(self, round_number: int) -> None:
        """Begin a round; the last one may still be judged."""
        self._before, self._stated, self._round = (self._round, self._stated), {}, round_number
        self._judged = {place for place in self._judged if place[0] >= self._before[0]}

    def state(self, peer: PeerId, stage: int, ledger: StepLedger, phase: Phase) -> None:
        """Record what a server says of the open round; to take it back changes nothing, because others relied on it."""
        nothing = StepLedger(ledger.count)
        known = self._stated.setdefault(stage, {}).get(peer, StatedWork(nothing, nothing))
        offered = known.offered | ledger if phase == "offered" else known.offered
        self._stated[stage][peer] = StatedWork(known.stated | ledger, offered)

    def judge(self, reports: StepReports) -> None:
        """Compare the statements about the last two rounds with the commits."""
        for number, stated in (self._before, (self._round, self._stated)):
            for stage in reports.decided.get(number, {}).keys() & stated.keys():
                if (number, stage) not in self._judged:
                    self._judged.add((number, stage))
                    lacking = reports.lacking.get(number, {}).get(stage, ())
                    self._compare(number, _find_guilty(lacking, stated[stage]), stated[stage])

    def _compare(self, number: int, guilty: Collection[PeerId], stated: Iterable[PeerId]) -> None:
        for peer in stated:
            if peer in guilty:
                record = self._records.setdefault(peer, Suspension())
                if record.raise_level(number, MAX_LEVEL) and record.level > 1:
                    record.suspend_rounds(number)
            elif peer in self._records and self._records[peer].count_good(GOOD_ROUNDS):
                del self._records[peer]

    def is_awaited(self, peer: PeerId) -> bool:
        """Return whether to wait with our sum for a server that may still add to its own."""
        return peer not in self._slow or self._round >= self._slow[peer].until

    def wait_in_vain(self, peer: PeerId) -> None:
        """Record that a server still adds, long after all microbatches count."""
        record = self._slow.setdefault(peer, Suspension())
        if record.raise_level(self._round, MAX_LEVEL):
            record.suspend_rounds(self._round)

    def end_wait(self, peer: PeerId) -> None:
        """Record that a server has sealed its sum in time."""
        if peer in self._slow and self._slow[peer].count_good(GOOD_ROUNDS):
            del self._slow[peer]

    def believed(self, peers: Mapping[PeerId, int]) -> Mapping[PeerId, int]:
        """Return the servers of a stage that are believed in the open round; all of them if none is."""
        found = {peer: life for peer, life in peers.items() if not self.is_doubted(peer)}
        return found or peers

    def is_doubted(self, peer: PeerId) -> bool:
        """Return whether the word of a server does not count in the open round."""
        return peer in self._records and self._round < self._records[peer].until


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
        self._known: tuple[Mapping[PeerId, int], ...] = self._live  # those without standing, or belied, included
        self._credibility = Credibility()
        self._standing: Collection[PeerId] | None = None
        self._owners: tuple[PeerId, ...] = ()
        self._statements: dict[PeerId, Statement] = {}
        self._acknowledged: dict[tuple[int, int], tuple[ServerLife, float]] = {}  # by stage and id, since when
        self._retry_at: dict[int, float] = {}
        self._statement_at: float | None = 0.0
        self._coverage: list[StepLedger] | None = None  # by stage, until something changes
        # microbatches by their owner and our rank after it, until something changes
        self._turns: dict[tuple[PeerId, int], list[int]] | None = None
        self.progress = OwnerProgress()
        self._looked_at = 0.0  # microbatches that had passed to us by then were seen
        self._sealed_at = 0.0

    def begin(self, round_number: int, life: int, now: float) -> None:
        """Begin the step of a round with an empty sum."""
        if round_number != self.round:
            self.progress.begin(round_number, {owner for owner, _ in self._our_turns()}, now)
            self._credibility.begin(round_number)
        self.round, self.life = round_number, life
        self._is_void, self._decided = False, frozenset()
        self._clear()
        self._acknowledged.clear()
        self._retry_at.clear()
        self._coverage = self._turns = None
        self._believe()
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

    def set_peers(
        self,
        stages: Sequence[Mapping[PeerId, int]],
        owners: Collection[PeerId],
        standing: Collection[PeerId] | None = None,
    ) -> None:
        """Update the live servers of each stage with their lives, and the peers that own microbatches.

        `standing`: the peers whose statements count; `None` for all.
        """
        self._known, self._standing = tuple(stages), standing
        self._owners = tuple(sorted(owners))
        self._turns = None
        self._believe()
        known = {peer for stage in stages for peer in stage}
        self._statements = {peer: each for peer, each in self._statements.items() if peer in known}

    def _believe(self) -> None:
        """Choose the servers of each stage that count: those with standing that commits have not belied.

        Where none of a stage has standing, all of it do.
        """
        standing = self._standing
        found = []
        for known in self._known:
            entitled = {peer: life for peer, life in known.items() if standing is None or peer in standing}
            found.append(self._credibility.believed(entitled or known))
        self._live = tuple(found)
        self._coverage = None

    def is_believed(self, stage: int, peer: PeerId) -> bool:
        """Return whether a server's word on its sum counts."""
        return peer in self._live[stage]

    @property
    def may_add(self) -> bool:
        """Return whether others count on our sum; a server that they do not believe adds nothing."""
        return self.is_believed(self._stage, self._me) or self._me not in self._known[self._stage]

    def next_deadline(self) -> float | None:
        """Return when `advance` or `wanted` may change without an event."""
        passes = (self.progress.passes_at(owner, rank) for owner, rank in self._our_turns() if rank)
        times = [*self._retry_at.values(), *(time for time in passes if time > self._looked_at)]
        if self.phase == "sealed" and (ends := self._sealed_at + self.progress.grace) > self._looked_at:
            times.append(ends)
        return min([*times, *([] if self._statement_at is None else [self._statement_at])], default=None)

    def take_reports(self, reports: StepReports) -> None:
        """Update how the stages have decided the round."""
        self._is_void = reports.is_void(self.round)
        self._decided = reports.covered_stages(self.round)
        self._credibility.judge(reports)
        self._believe()

    def record(self, peer: PeerId, statement: Statement, now: float) -> None:
        """Record a statement of another server, unless we know a newer one.

        A statement without a microbatch revokes its acknowledgement: the server has dropped its sum. A recent
        acknowledgement stays until the statement is repeated, because it may have overtaken the statement.
        """
        known = self._statements.get(peer)
        is_news = known.age <= statement.age if known is not None else len(self._statements) < MAX_STATEMENTS
        if is_news and statement.run in self._runs:
            stage = self._runs.index(statement.run)
            if statement.round == self.round and self.is_believed(stage, peer):
                self._credibility.state(peer, stage, statement.ledger, statement.phase)
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
        return frozenset(peer for stage in self._known for peer in stage) - {self._me}

    # Owners

    def counted_at(self, number: int) -> frozenset[int]:
        """Return the stages at which a live server counts a microbatch, as far as we know."""
        return frozenset(stage for stage in range(len(self._runs)) if self._is_counted(stage, number))

    def wanted(self, started: Collection[int], now: float) -> list[int]:
        """Return our microbatches that some stage lacks and that are not in flight."""
        return sorted(
            number
            for (owner, rank), numbers in self._our_turns().items()
            if not rank or self.progress.passes_at(owner, rank) <= now
            for number in numbers
            if number not in started and self._retry_at.get(number, now) <= now and not self._is_complete(number)
        )

    def _our_turns(self) -> dict[tuple[PeerId, int], list[int]]:
        """Return the microbatches by owner and by how many peers come before us; none if we own nothing."""
        if self._turns is None:
            owners = self.progress.active(self._owners, self.round)
            self._turns = {}
            for number in range(self.count if self._me in owners else 0):
                order = ranked_owners(self.round, number, owners)
                self._turns.setdefault((order[0], order.index(self._me)), []).append(number)
        return self._turns

    def _note_progress(self, numbers: Iterable[int], now: float) -> None:
        for number in numbers:
            owner = next((owner for (owner, _), numbers in self._our_turns().items() if number in numbers), None)
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
            if (self.phase == "sealed" and self._may_offer(now)) or self._is_void:
                self.is_offering = True
                actions.append(OfferStep(self._duplicates()))
        if self._statement_at is not None and self._statement_at <= now:
            self._statement_at = now + REPEAT_SECONDS
            self._credibility.state(self._me, self._stage, self.ledger, self.phase)
            actions.append(SendStatement(self._listeners, self.statement))
        return actions

    @property
    def statement(self) -> Statement:
        """Our newest statement."""
        return Statement(self._runs[self._stage], self.round, self.life, self.version, self.ledger, self.phase)

    def _seal_or_open(self, now: float) -> None:
        is_complete = all(covered.is_complete for covered in self._covered())
        if is_complete != (self.phase == "sealed"):
            self.phase, self._sealed_at = "sealed" if is_complete else "open", now
            self._change(now, at_once=True)

    def _may_offer(self, now: float) -> bool:
        """Return whether no other server may still add; we wait for a grace, and in later rounds not at all."""
        credibility, is_overdue = self._credibility, now >= self._sealed_at + self.progress.grace
        phases = {peer: each.phase for peer, each in self._valid_statements(self._stage).items()}
        adding = {peer for peer, phase in phases.items() if phase == "open" and credibility.is_awaited(peer)}
        if adding and not is_overdue:
            return False
        for peer, phase in phases.items():
            if phase != "open":
                credibility.end_wait(peer)
            elif peer in adding:
                credibility.wait_in_vain(peer)
        return True

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
