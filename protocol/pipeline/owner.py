"""The owner of microbatches: sends each through all stages and back. Events in, actions out; no I/O.

The same peer is asked again after a timeout, because it knows the microbatch and adds nothing twice. Another peer is
asked for a gradient only once the first is gone, is leaving or has refused.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Sequence

from protocol.identity import PeerId
from protocol.manifest import RunId
from protocol.pipeline.course import MAX_REFUSALS, MAX_REPLAYS, Course, DropReason, Place, Request, Step
from protocol.pipeline.messages import Answer, HeldBlob, Outcome, Task
from protocol.pipeline.owner_events import (
    Action,
    Answered,
    Ask,
    AskFailed,
    Event,
    Finished,
    Invited,
    OwnerCounts,
    OwnerSettings,
    PeersChanged,
    ReleaseFailed,
    StageEmpty,
    Tick,
    Told,
)
from protocol.pipeline.releases import Releases
from protocol.pipeline.routing import REPORT_SECONDS, Router

ASK_SECONDS, RETRY_SECONDS = 5.0, 0.5  # the deadline of a call, and the pause after one without an answer
MIN_PATIENCE, MAX_PATIENCE = 5.0, 120.0  # from an accepted task to the next request for it
PATIENCE = 4.0  # times the expected time
STALL_SECONDS = 600.0
REMEMBERED = 1024  # ended microbatches, to recognise late outcomes


class Owner:
    """The microbatches of one peer. `runs`: the ids of the stages, in order."""

    def __init__(self, settings: OwnerSettings, runs: Sequence[RunId], rng: random.Random) -> None:
        self.settings = settings
        self.counts = OwnerCounts()
        self._runs = tuple(runs)
        self._stage_of = {run: stage for stage, run in enumerate(self._runs)}
        self._routers = [Router(rng) for _ in self._runs]
        self._live: list[frozenset[PeerId]] = [frozenset() for _ in self._runs]
        self._draining: list[frozenset[PeerId]] = [frozenset() for _ in self._runs]
        self._lives: dict[PeerId, int] = {}
        self._round = 0
        self._courses: dict[int, Course] = {}
        self._waiting: list[deque[int]] = [deque() for _ in self._runs]
        self._changed: set[int] = set()  # stages that may have room again
        self._wake_at: list[float | None] = [None for _ in self._runs]
        self._ended: OrderedDict[int, dict[int, Place]] = OrderedDict()
        self._releases = Releases()
        self._timers: list[tuple[float, int, int]] = []  # time, serial or -1 - stage, attempt
        self._actions: list[Action] = []

    def run_of(self, stage: int) -> RunId:
        """Return the id of a stage."""
        return self._runs[stage]

    @property
    def room(self) -> int:
        """Return the number of microbatches that may begin now."""
        return self.settings.in_flight - len(self._courses)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the number of microbatches that wait for a peer, by stage."""
        return tuple(map(len, self._waiting))

    @property
    def open_serials(self) -> frozenset[int]:
        """Return the microbatches that have not ended."""
        return frozenset(self._courses)

    def next_deadline(self) -> float | None:
        """Return the time of the next Tick that does something."""
        times = [self._timers[0][0] if self._timers else None, self._releases.due]
        return min((time for time in times if time is not None), default=None)

    def begin(self, serial: int, tokens: HeldBlob, now: float) -> list[Action]:
        """Start a microbatch; its serial must be new, and `room` above 0."""
        assert self.room > 0 and serial not in self._courses
        course = self._courses[serial] = Course(serial, tokens, len(self._runs))
        self._advance(course, now)
        return self._take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event and return the actions that follow from it."""
        match event:
            case PeersChanged():
                self._change_peers(event, now)
            case Answered():
                self._on_answer(event, now)
            case AskFailed():
                self._on_failure(event, now)
            case Told():
                self._on_outcome(event.peer, event.outcome, now)
            case Invited(peer, run) if (stage := self._stage_of.get(run)) is not None:
                self._routers[stage].record_invitation(peer, now)
                self._changed.add(stage)
            case ReleaseFailed():
                if event.peer in self._live[event.stage]:
                    self._releases.add(event.stage, event.peer, event.serials, now)
            case Tick():
                self._on_tick(now)
        while self._changed:
            self._serve(self._changed.pop(), now)
        return self._take_actions()

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _change_peers(self, event: PeersChanged, now: float) -> None:
        self._round = event.round
        before = frozenset[PeerId]().union(*self._live)
        for stage, peers in enumerate(event.stages):
            self._routers[stage].update(peers)
            self._live[stage] = frozenset(entry.peer for entry in peers)
            self._draining[stage] = frozenset(entry.peer for entry in peers if entry.draining)
        for peer in before - frozenset[PeerId]().union(*self._live):
            self._lives.pop(peer, None)
        for entry in [entry for peers in event.stages for entry in peers]:
            self._record_life(entry.peer, entry.life, now)
        self._releases.keep_only(self._live)
        for course in list(self._courses.values()):
            self._leave_gone_peers(course, now)
        self._changed.update(range(len(self._runs)))

    def _leave_gone_peers(self, course: Course, now: float) -> None:
        gone = sorted({peer for stage, peer in course.visited if peer not in self._live[stage]})
        for peer in gone:
            course.forget_peer(peer)
        request = course.request
        if request is not None and request.peer in gone:
            self._abandon(course, request)
            self._advance(course, now)
        course.visited = {(stage, peer) for stage, peer in course.visited if peer not in gone}

    def _record_life(self, peer: PeerId, life: int, now: float) -> None:
        known = self._lives.get(peer, 0)
        self._lives[peer] = max(known, life)
        if life <= known or not known:
            return
        for course in list(self._courses.values()):
            course.record_life(peer, life)
            request = course.request
            if request is not None and request.peer == peer and request.life < life:
                self._ask(course, request, now)

    def _advance(self, course: Course, now: float) -> None:
        """Send the next request of a course, or let it wait for a peer."""
        step = course.goal()
        live = self._live[step.stage]
        candidates = live if step.direction == "backward" else live - self._draining[step.stage]
        peer = course.preferred(step, candidates - course.refused_by)
        if peer is not None:
            self._open_request(course, step, peer, now)
        else:
            self._waiting[step.stage].append(course.serial)
            self._serve(step.stage, now)

    def _serve(self, stage: int, now: float) -> None:
        """Give waiting microbatches of a stage to peers that have room."""
        waiting, router = self._waiting[stage], self._routers[stage]
        self._note_emptiness(stage, now)
        while waiting:
            course = self._courses.get(waiting[0])
            peer = router.choose(now, course.refused_by) if course is not None else None
            if course is not None and peer is None and not router.all_within(course.refused_by):
                self._wake_later(stage, router.wake_time(now))
                return
            waiting.popleft()
            if course is not None and peer is not None:
                self._open_request(course, course.goal(), peer, now)
            elif course is not None:
                self._end(course, "refused", now)

    def _open_request(self, course: Course, step: Step, peer: PeerId, now: float) -> None:
        course.attempt += 1
        course.refused_by &= self._live[step.stage]
        course.visited.add((step.stage, peer))
        request = Request(step, peer, 0, course.attempt, now, now, now, course.inputs_for(step), course.is_replay(step))
        course.request = request
        self._routers[step.stage].begin(peer)
        self._ask(course, request, now)

    def _ask(self, course: Course, request: Request, now: float) -> None:
        """Send the request of a course, again if it has been sent."""
        request.life, request.sent = self._lives.get(request.peer, 0), now
        self._schedule(course, request, now + 2 * ASK_SECONDS)
        self._actions.append(Ask(request.peer, self._task_of(course, request)))

    def _task_of(self, course: Course, request: Request) -> Task:
        return Task(
            run=self._runs[request.step.stage],
            owner=self.settings.me,
            serial=course.serial,
            direction=request.step.direction,
            attempt=request.attempt,
            life=request.life,
            round=self._round,
            inputs=request.inputs,
            deadline_ms=self.settings.deadline_ms,
            replay=request.replay,
            loss=course.loss,
        )

    def _abandon(self, course: Course, request: Request) -> None:
        course.request = None
        self._routers[request.step.stage].end(request.peer)
        self._changed.add(request.step.stage)

    def _schedule(self, course: Course, request: Request, due: float) -> None:
        request.due = due
        heapq.heappush(self._timers, (due, course.serial, request.attempt))

    def _find(self, peer: PeerId, task: Task) -> tuple[Course, Request] | None:
        course = self._courses.get(task.serial)
        request = course.request if course is not None else None
        if course is None or request is None or (request.peer, request.attempt) != (peer, task.attempt):
            return None
        return course, request

    def _on_answer(self, event: Answered, now: float) -> None:
        peer, answer = event.peer, event.answer
        self.counts.answers[answer.kind] += 1
        found = self._find(peer, event.task)
        stage = self._stage_of[event.task.run]
        if found is not None:
            self._routers[stage].record_answer(peer, max(0.0, now - found[1].sent))
        self._routers[stage].record_rate(peer, answer.rate)
        self._record_life(peer, answer.life, now)
        if found is None or answer.life < self._lives[peer]:
            return
        course, request = found
        if answer.kind == "known" and answer.outcome is not None:
            self._on_outcome(peer, answer.outcome, now)
        elif course.request is request:
            self._react(course, request, answer, now)

    def _react(self, course: Course, request: Request, answer: Answer, now: float) -> None:
        router = self._routers[request.step.stage]
        match answer.kind:
            case "accepted":
                patience = PATIENCE * router.expected_seconds(request.peer)
                self._schedule(course, request, now + min(MAX_PATIENCE, max(MIN_PATIENCE, patience)))
            case "busy":
                self._on_busy(course, request, now + answer.retry_ms / 1000, now)
            case "other life":
                if request.life < answer.life:
                    self._ask(course, request, now)
            case "other round":
                self._on_busy(course, request, now + 1.0, now)
            case "refused":
                self._on_refusal(course, request, now)
            case _:
                router.remove(request.peer)
                course.forget_place(request.step, request.peer)
                self._go_elsewhere(course, request, now)

    def _on_busy(self, course: Course, request: Request, until: float, now: float) -> None:
        router = self._routers[request.step.stage]
        if request.step.direction == "backward" and request.peer in self._live[request.step.stage]:
            self._schedule(course, request, until)
            return
        router.record_busy(request.peer, request.sent, until)
        router.refund(request.peer)
        self._go_elsewhere(course, request, now)

    def _on_refusal(self, course: Course, request: Request, now: float) -> None:
        course.refused_by.add(request.peer)
        course.refusals += 1
        self._routers[request.step.stage].record_failure(request.peer, now)
        if course.refusals >= MAX_REFUSALS:
            self._end(course, "refused", now)
        else:
            self._go_elsewhere(course, request, now)

    def _go_elsewhere(self, course: Course, request: Request, now: float) -> None:
        self._abandon(course, request)
        self._advance(course, now)

    def _on_failure(self, event: AskFailed, now: float) -> None:
        stage = self._stage_of[event.task.run]
        until = self._routers[stage].record_failure(event.peer, now)
        found = self._find(event.peer, event.task)
        if found is None:
            return
        course, request = found
        if event.unreachable and not request.is_bound:
            course.forget_place(request.step, request.peer)
            self._go_elsewhere(course, request, now)
        else:
            self._schedule(course, request, until if event.unreachable else now + RETRY_SECONDS)

    def _on_outcome(self, peer: PeerId, outcome: Outcome, now: float) -> None:
        stage = self._stage_of.get(outcome.run)
        if stage is None:
            return
        self._routers[stage].record_rate(peer, outcome.rate)
        self._record_life(peer, outcome.life, now)
        if outcome.life < self._lives.get(peer, 0):
            self.counts.void += 1
            return
        course = self._courses.get(outcome.serial)
        request = course.request if course is not None else None
        step = Step(outcome.direction, stage)
        if course is None or request is None or (request.peer, request.step) != (peer, step):
            self._on_late_outcome(peer, step, outcome)
        else:
            self._on_expected_outcome(course, request, outcome, now)

    def _on_expected_outcome(self, course: Course, request: Request, outcome: Outcome, now: float) -> None:
        if outcome.status == "void":
            self._ask(course, request, now)
        elif outcome.status == "ended":
            self._end(course, "expired", now)
        elif outcome.status == "invalid" or not course.fits(request.step, outcome):
            self._on_refusal(course, request, now)
        else:
            self._abandon(course, request)
            self.counts.replayed += course.record(request, outcome)
            self._continue(course, now)

    def _continue(self, course: Course, now: float) -> None:
        if course.is_done:
            self._end(course, None, now)
        elif course.replays > MAX_REPLAYS:
            self._end(course, "replayed too often", now)
        else:
            self._advance(course, now)

    def _on_late_outcome(self, peer: PeerId, step: Step, outcome: Outcome) -> None:
        """Count a gradient that another server of the stage counts too."""
        course = self._courses.get(outcome.serial)
        added = course.added if course is not None else self._ended.get(outcome.serial, {})
        place = added.get(step.stage)
        if outcome.added and place is not None and place.peer != peer:
            self.counts.duplicates += 1

    def _end(self, course: Course, reason: DropReason | None, now: float) -> None:
        is_torn = course.is_torn
        if course.request is not None:
            self._abandon(course, course.request)
        del self._courses[course.serial]
        self._ended[course.serial] = course.added
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        for stage, peer in sorted(course.visited):
            self._releases.add(stage, peer, [course.serial], now)
        self.counts.lost += len(course.lost)
        if reason is None:
            self.counts.done += 1
        else:
            self.counts.dropped[reason] += 1
            self.counts.torn += is_torn
        self._actions.append(Finished(course.serial, course.loss, reason))

    def _on_tick(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            _, number, attempt = heapq.heappop(self._timers)
            if number < 0:
                self._wake_at[-1 - number] = None
                self._serve(-1 - number, now)
            elif (course := self._courses.get(number)) is not None:
                self._on_due(course, attempt, now)
        self._actions += self._releases.take(now)

    def _on_due(self, course: Course, attempt: int, now: float) -> None:
        request = course.request
        if request is None or request.attempt != attempt or request.due > now:
            return
        if now - request.opened > STALL_SECONDS:
            self._end(course, "stalled", now)
        else:
            self._ask(course, request, now)

    def _wake_later(self, stage: int, time: float | None) -> None:
        planned = self._wake_at[stage]
        if time is not None and (planned is None or time < planned):
            self._wake_at[stage] = time
            heapq.heappush(self._timers, (time, -1 - stage, 0))

    def _note_emptiness(self, stage: int, now: float) -> None:
        """Report a stage that nobody serves while microbatches wait for it."""
        if self._waiting[stage] and self._routers[stage].reports_emptiness(now):
            self._actions.append(StageEmpty(stage, len(self._waiting[stage])))
            self._wake_later(stage, now + REPORT_SECONDS)
