"""Track one microbatch of an owner: forward through all stages, then backward through the same peers. No I/O.

The 2 S passes of a microbatch have a fixed order, and each needs results of others. If the holder of a result
disappears, the result is computed again, from the stage before or, at worst, from the tokens. Such a replay takes no
place in a step and adds no gradient, so a microbatch counts at most once at each stage.

A server's gradients are lost if its node or its trainer crashes before they are in a contribution. Owners do not see
contributions, so `EndedMicrobatches` counts by rounds: a gradient added in round r is in the server's contribution to
r or, if that was already sent, in the next one. Records may be a round late, hence UNSAFE_ROUNDS = 3.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.audits import ResultAudit
from protocol.pipeline.messages import Direction, HeldBlob, Inputs, Outcome, Task
from protocol.pipeline.routing import StagePeer

MAX_REFUSALS = 3  # peers
MAX_MISSES = 2  # failed downloads of one result before another peer makes it
MAX_REPLAYS = 16
DropReason = Literal[
    "refused",  # three peers found a wrong input, or a value that is not finite
    "replayed too often",
    "expired",  # a server counts it and has forgotten it since
    "left",  # the owner leaves, and no stage counts it
    "stalled",  # one peer had it for too long and did not leave
    "round over",  # of an exact step, which counts what it has, or is made again
    "contradicted",  # an audit found one of its results wrong
]
REMEMBERED = 1024  # microbatches, to recognise late outcomes
UNSAFE_ROUNDS = 3


@dataclass(frozen=True)
class OwnerSettings:
    """The settings of an owner.

    Args:
        in_flight: microbatches at a time.
        deadline_ms: until servers may forget one.
        needs_tokens: each stage needs the tokens, not only the first and the last.
        round_pause: seconds until a server at another round is asked again.
        activation_bytes: the size of each result; 0 allows any.
        audit_share: of the results that other servers compute again.
    """

    me: PeerId
    in_flight: int
    deadline_ms: int = 600_000
    needs_tokens: bool = False
    round_pause: float = 1.0
    activation_bytes: int = 0
    audit_share: float = 0.0


class StagePass(NamedTuple):
    """The forward or backward of a microbatch at one stage."""

    direction: Direction
    stage: int


@dataclass
class ServerLife:
    """A server that a microbatch has used, in the life that accepted the work."""

    peer: PeerId
    life: int


@dataclass
class Request:
    """The open request of a microbatch, which has no outcome yet."""

    stage_pass: StagePass
    peer: PeerId
    life: int
    attempt: int
    opened: float
    sent: float
    due: float  # when the same peer is asked again
    inputs: Inputs
    replay: bool
    tasks: int = 0  # of the peer, including this one
    overdue: float = math.inf  # when an accepted task counts as lost

    @property
    def is_bound(self) -> bool:
        """Whether only this peer may compute it while it is live, because it may have added the gradient."""
        return self.stage_pass.direction == "backward" and not self.replay


class ExactPart(NamedTuple):
    """The id of a microbatch in the exact step of a round; stages in `counted_at` only replay it."""

    round: int
    number: int
    counted_at: frozenset[int]


class OwnedMicrobatch:
    """One microbatch of `stages` stages.

    Args:
        tokens: the blob of its tokens, which the owner holds.
        needs_tokens: each stage needs them, not only the first and the last.
        exact: its part in an exact step.
    """

    def __init__(
        self, serial: int, tokens: HeldBlob, stages: int, needs_tokens: bool = False, exact: ExactPart | None = None
    ) -> None:
        self.serial = serial
        self.exact = exact
        self.tokens = tokens
        self.stages = stages
        self.needs_tokens = needs_tokens
        self.reached = 0  # passes made at least once
        self.request: Request | None = None
        self.audit: ResultAudit | None = None  # of its last result; it waits for that
        self.attempt = 0
        self.loss: float | None = None
        self.refused_by: set[PeerId] = set()  # peers that do not compute the current pass
        self.refusals = 0
        self.added: dict[int, ServerLife] = {}  # where the gradient of a stage counts
        self.lost: set[int] = set()  # stages whose gradient was lost with its server
        self.replays = 0
        self.visited: set[tuple[int, PeerId]] = set()
        self.left: set[tuple[int, PeerId]] = set()  # visited peers that are gone; if they return, they still hold it
        self._servers: dict[int, ServerLife] = {}  # where forward was
        self._results: dict[StagePass, HeldBlob] = {}
        self._makers: dict[StagePass, PeerId] = {}
        self._misses = Counter[StagePass]()

    @property
    def is_done(self) -> bool:
        """Whether the backward of stage 0 has ended."""
        return self.reached == 2 * self.stages

    @property
    def is_partly_counted(self) -> bool:
        """Whether some stages may count this microbatch and others not, if it ended now."""
        return bool(self.added) or (self.request is not None and self.request.is_bound)

    @property
    def is_refused(self) -> bool:
        return self.refusals >= MAX_REFUSALS

    @property
    def is_replayed_too_often(self) -> bool:
        return self.replays > MAX_REPLAYS

    def goal(self) -> StagePass:
        """Return the next pass: the first one not made yet, or one that replays a lost input."""
        stage_pass = self._pass_at(self.reached)
        while (needed := self._needed(stage_pass)) is not None:
            stage_pass = needed
        return stage_pass

    def is_replay(self, stage_pass: StagePass) -> bool:
        """Return whether a pass has been made before, or its stage counts the microbatch already."""
        return self._index(stage_pass) < self.reached or (
            self.exact is not None and stage_pass.stage in self.exact.counted_at
        )

    def preferred(self, stage_pass: StagePass, live: Collection[PeerId]) -> PeerId | None:
        """Return the live peer that made the result before, or made the forward; None if any peer will do."""
        server = self._servers.get(stage_pass.stage) if stage_pass.direction == "backward" else None
        maker = self._makers.get(stage_pass) or (server.peer if server is not None else None)
        return maker if maker in live else None

    def neighbours(self, stage: int) -> frozenset[PeerId]:
        """Return the peers with which a peer of this stage exchanges activations."""
        beside = (self._servers.get(stage - 1), self._servers.get(stage + 1))
        sources = (StagePass("forward", stage - 1), StagePass("backward", stage + 1))
        holders = (self._results[source].holder for source in sources if source in self._results)
        return frozenset([*(server.peer for server in beside if server is not None), *holders])

    def inputs_for(self, stage_pass: StagePass) -> Inputs:
        """Return the inputs of a pass."""
        last = self.stages - 1
        is_middle_backward = stage_pass.direction == "backward" and stage_pass.stage < last
        return Inputs(
            activation=self._results[StagePass("forward", stage_pass.stage - 1)] if stage_pass.stage else None,
            tokens=self.tokens if self.needs_tokens or stage_pass.stage in (0, last) else None,
            gradient=self._results[StagePass("backward", stage_pass.stage + 1)] if is_middle_backward else None,
        )

    def task(self, request: Request, run: RunId, settings: OwnerSettings, round_number: int) -> Task:
        """Return the message of a request to the server of a stage, whose id is `run`."""
        return Task(
            run=run,
            owner=settings.me,
            serial=self.serial,
            direction=request.stage_pass.direction,
            attempt=request.attempt,
            life=request.life,
            round=round_number if self.exact is None else self.exact.round,
            inputs=request.inputs,
            deadline_ms=settings.deadline_ms,
            replay=request.replay,
            loss=self.loss,
            number=None if self.exact is None else self.exact.number,
        )

    def fits(self, stage_pass: StagePass, outcome: Outcome, size: int) -> bool:
        """Return whether an outcome has the result that another stage needs, of `size` bytes if not 0."""
        if outcome.status != "done" or stage_pass in (StagePass("forward", self.stages - 1), StagePass("backward", 0)):
            return True
        return outcome.result is not None and size in (0, outcome.result.size)

    def record_gradient(self, request: Request, outcome: Outcome) -> None:
        """Count a gradient whose result is unusable; another peer replays the result."""
        self._complete(request, replace(outcome, result=None))

    def record(self, request: Request, outcome: Outcome) -> bool:
        """Record an outcome; return whether it was a replay."""
        if outcome.missing is not None:
            self._miss(request, outcome.missing)
        elif outcome.status == "done":
            self._complete(request, outcome)
        return outcome.status == "done" and request.replay

    def _complete(self, request: Request, outcome: Outcome) -> None:
        stage_pass, server = request.stage_pass, ServerLife(request.peer, outcome.life)
        self.refused_by.clear()
        self.replays += self._index(stage_pass) < self.reached
        if outcome.loss is not None and self.loss is None:
            self.loss = outcome.loss
        if stage_pass.direction == "forward":
            self._servers[stage_pass.stage] = server
        elif outcome.added:
            known = self.added.setdefault(stage_pass.stage, server)
            known.life = max(known.life, server.life) if known.peer == server.peer else known.life
            self.lost.discard(stage_pass.stage)
        if outcome.result is not None:
            signed = outcome.signed.signed if outcome.signed is not None else None
            self._results[stage_pass] = HeldBlob(outcome.result, request.peer, signed)
            self._makers[stage_pass] = request.peer
        self.reached = max(self.reached, self._index(stage_pass) + 1)

    def _miss(self, request: Request, name: str) -> None:
        """Record that a server could not fetch an input; after MAX_MISSES another peer replays it."""
        self.replays += 1
        source = self._source(request.stage_pass, name)
        if source is None:
            return
        self._misses[source] += 1
        self._results.pop(source, None)
        if self._misses[source] >= MAX_MISSES:
            self._makers.pop(source, None)

    def forget_server(self, stage_pass: StagePass, peer: PeerId) -> None:
        """Let any peer compute a pass that this peer does not accept."""
        if self._makers.get(stage_pass) == peer:
            del self._makers[stage_pass]
        server = self._servers.get(stage_pass.stage)
        if server is not None and server.peer == peer:
            del self._servers[stage_pass.stage]

    def forget_peer(self, peer: PeerId) -> None:
        """Forget the results that a peer held before it disappeared, and count its lost gradients."""
        for stage_pass in [stage_pass for stage_pass, held in self._results.items() if held.holder == peer]:
            del self._results[stage_pass]
        for stage_pass in [stage_pass for stage_pass, maker in self._makers.items() if maker == peer]:
            del self._makers[stage_pass]
        for stage in [stage for stage, server in self._servers.items() if server.peer == peer]:
            del self._servers[stage]
        self.lost |= {stage for stage, server in self.added.items() if server.peer == peer}

    def record_life(self, stage: int, peer: PeerId, life: int) -> None:
        """Count the gradient as lost if an earlier life of the server had it."""
        server = self.added.get(stage)
        if server is not None and server.peer == peer and server.life < life:
            self.lost.add(stage)

    def _source(self, stage_pass: StagePass, name: str) -> StagePass | None:
        if name == "activation":
            return StagePass("forward", stage_pass.stage - 1)
        return StagePass("backward", stage_pass.stage + 1) if name == "gradient" else None

    def _needed(self, stage_pass: StagePass) -> StagePass | None:
        """Return a pass whose result this one needs and no peer holds."""
        before, after = StagePass("forward", stage_pass.stage - 1), StagePass("backward", stage_pass.stage + 1)
        if stage_pass.stage and before not in self._results:
            return before
        if stage_pass.direction == "backward" and stage_pass.stage < self.stages - 1 and after not in self._results:
            return after
        return None

    def _pass_at(self, index: int) -> StagePass:
        if index < self.stages:
            return StagePass("forward", index)
        return StagePass("backward", 2 * self.stages - 1 - index)

    def _index(self, stage_pass: StagePass) -> int:
        return stage_pass.stage if stage_pass.direction == "forward" else 2 * self.stages - 1 - stage_pass.stage


class EndedMicrobatches:
    """The ended microbatches of one owner."""

    def __init__(self) -> None:
        self._added: OrderedDict[int, dict[int, ServerLife]] = OrderedDict()
        self._unsafe: dict[tuple[int, PeerId, int], Counter[int]] = {}  # by stage, peer and life: gradients by round
        self._rounds: dict[tuple[int, PeerId], int] = {}

    def add(self, serial: int, added: dict[int, ServerLife], lost: Collection[int]) -> None:
        """Remember where gradients count, by stage; `lost` stages are in the counts already."""
        self._added[serial] = added
        if len(self._added) > REMEMBERED:
            self._added.popitem(last=False)
        for stage, counted in added.items():
            if stage not in lost:
                life = stage, counted.peer, counted.life
                self._unsafe.setdefault(life, Counter())[self._rounds.get((stage, counted.peer), 0)] += 1

    def servers(self, serial: int) -> Mapping[int, ServerLife]:
        """Return where the gradients of a microbatch count, by stage."""
        return self._added.get(serial, {})

    def update(self, stages: Sequence[Iterable[StagePeer]]) -> int:
        """Update the live peers of all stages; return an upper bound of the gradients lost since."""
        entries = {(stage, entry.peer): entry for stage, peers in enumerate(stages) for entry in peers}
        self._rounds = {server: entry.round for server, entry in entries.items()}
        lives = {server: entry.life for server, entry in entries.items()}
        gone = [life for life in self._unsafe if lives.get(life[:2], life[2] + 1) > life[2]]
        lost = sum(self._unsafe.pop(life).total() for life in gone)
        for life, gradients in self._unsafe.items():
            safe = entries[life[:2]].round - UNSAFE_ROUNDS
            self._unsafe[life] = Counter({number: count for number, count in gradients.items() if number > safe})
        return lost
