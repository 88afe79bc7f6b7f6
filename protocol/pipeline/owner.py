"""The owner of microbatches: sends each through all stages and back. Events in, actions out; no I/O.

The same peer is asked again after a timeout, because it knows the microbatch and adds nothing twice. Another peer is
asked for a gradient only once the first is gone, is leaving or has refused.
"""

import random
from collections.abc import Sequence

from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.course import Course, DropReason, ExactPart, OwnerSettings, Request, Step
from protocol.pipeline.ended import EndedMicrobatches
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
    PeersChanged,
    ReleaseFailed,
    StageEmpty,
    Told,
    WrongResult,
)
from protocol.pipeline.releases import Releases
from protocol.pipeline.routing import REPORT_SECONDS, Router, task_round
from protocol.pipeline.timers import Timers, Wake

ASK_SECONDS, RETRY_SECONDS = 5.0, 0.5  # the deadline of a call, and the pause after one without an answer
MIN_PATIENCE, MAX_PATIENCE = 5.0, 120.0  # from an accepted task to the next request for it
PATIENCE, STALL_SECONDS = 4.0, 600.0  # times the expected time; until a peer that has a task counts as stuck
SEALED_SECONDS = 0.5  # until a server that has sealed its exact step is asked again


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
        self._hidden: frozenset[PeerId] = frozenset()
        self._lives: dict[tuple[int, PeerId], int] = {}  # by stage and peer
        self._rounds = [0 for _ in self._runs]
        self._courses: dict[int, Course] = {}
        self._waiting: list[list[int]] = [[] for _ in self._runs]
        self._changed: set[int] = set()  # stages that may have room again
        self._ended = EndedMicrobatches()
        self._releases = Releases()
        self._timers = Timers(len(self._runs))
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
        """Return when to call `advance`."""
        return min((time for time in (self._timers.due, self._releases.due) if time is not None), default=None)

    def begin(self, serial: int, tokens: HeldBlob, now: float, exact: ExactPart | None = None) -> list[Action]:
        """Start a microbatch; its serial must be new, and `room` above 0."""
        assert self.room > 0 and serial not in self._courses
        course = self._courses[serial] = Course(serial, tokens, len(self._runs), self.settings.needs_tokens, exact)
        self._send_next(course, now)
        return self._take_actions()

    def leave(self, now: float) -> list[Action]:
        """Give up the microbatches that no stage can have counted; the others may still end."""
        for serial in [serial for serial, course in self._courses.items() if not course.is_torn]:
            self._end(self._courses[serial], "left", now)
        return self._take_actions()

    def end_round(self, now: float) -> list[Action]:
        """End all microbatches of an exact step whose round is over."""
        for course in list(self._courses.values()):
            self._end(course, "round over", now)
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
                self._releases.add(event.stage, event.peer, event.serials, now)
        self._serve_changed(now)
        return self._take_actions()

    def advance(self, now: float) -> list[Action]:
        """Return the actions that are due; call it at `next_deadline`."""
        for timer in self._timers.take(now):
            if isinstance(timer, Wake):
                self._serve(timer.stage, now)
            elif (course := self._courses.get(timer.serial)) is not None:
                self._on_due(course, timer.attempt, now)
        self._actions += self._releases.take(now)
        self._serve_changed(now)
        return self._take_actions()

    def _serve_changed(self, now: float) -> None:
        while self._changed:
            self._serve(self._changed.pop(), now)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _change_peers(self, event: PeersChanged, now: float) -> None:
        self.counts.lost += self._ended.update(event.stages)
        for stage, peers in enumerate(event.stages):
            self._routers[stage].update(peers)
            self._rounds[stage] = task_round(event.round, peers)
            self._live[stage] = frozenset(entry.peer for entry in peers)
            self._draining[stage] = frozenset(entry.peer for entry in peers if entry.draining)
        self._lives = {place: life for place, life in self._lives.items() if place[1] in self._live[place[0]]}
        self._hidden = frozenset(entry.peer for peers in event.stages for entry in peers if entry.hidden)
        for stage, entry in [(stage, entry) for stage, peers in enumerate(event.stages) for entry in peers]:
            self._record_life(stage, entry.peer, entry.life, now)
        self._releases.set_live(self._live, now)
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
            self._send_next(course, now)
        course.left |= {place for place in course.visited if place[1] in gone}
        course.visited -= course.left

    def _record_life(self, stage: int, peer: PeerId, life: int, now: float) -> None:
        known = self._lives.get((stage, peer), 0)
        self._lives[stage, peer] = max(known, life)
        if life <= known or not known:
            return
        for course in list(self._courses.values()):
            course.record_life(stage, peer, life)
            request = course.request
            if request is not None and (request.step.stage, request.peer) == (stage, peer) and request.life < life:
                self._ask(course, request, now)

    def _send_next(self, course: Course, now: float) -> None:
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
        self._note_emptiness(stage, now)
        router, left = self._routers[stage], list[int]()
        full = set[tuple[frozenset[PeerId], bool]]()  # demands that no peer can meet now
        for course in [self._courses[serial] for serial in self._waiting[stage] if serial in self._courses]:
            demand = frozenset(course.refused_by), not self._hidden.isdisjoint(course.neighbours(stage))
            peer = router.choose(now, *demand) if demand not in full else None
            if peer is not None:
                self._open_request(course, course.goal(), peer, now)
            elif router.all_within(course.refused_by):
                self._end(course, "refused", now)
            else:
                full.add(demand)
                left.append(course.serial)
        self._waiting[stage] = left
        self._timers.wake(stage, router.wake_time(now) if left else None)

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
        request.life, request.sent = self._lives.get((request.step.stage, request.peer), 0), now
        self._schedule(course, request, now + 2 * ASK_SECONDS)
        stage = request.step.stage
        task = course.task(request, self._runs[stage], self.settings, self._rounds[stage])
        self._actions.append(Ask(request.peer, task))

    def _abandon(self, course: Course, request: Request) -> None:
        course.request = None
        self._routers[request.step.stage].end(request.peer)
        self._changed.add(request.step.stage)

    def _schedule(self, course: Course, request: Request, due: float) -> None:
        request.due = due
        self._timers.ask_again(due, course.serial, request.attempt)

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
        self._record_life(stage, peer, answer.life, now)
        if found is None or answer.life < self._lives[stage, peer]:
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
                self._on_busy(course, request, now + self.settings.round_pause, now)
            case "refused":
                self._on_refusal(course, request, now)
            case _:
                if answer.kind == "sealed" and course.exact is not None:
                    router.record_busy(request.peer, request.sent, now + SEALED_SECONDS)
                else:
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
        if course.is_refused:
            self._end(course, "refused", now)
        else:
            self._go_elsewhere(course, request, now)

    def _go_elsewhere(self, course: Course, request: Request, now: float) -> None:
        self._abandon(course, request)
        self._send_next(course, now)

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
        self._record_life(stage, peer, outcome.life, now)
        if outcome.life < self._lives[stage, peer]:
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
        elif not course.fits(request.step, outcome, self.settings.activation_bytes):
            self._on_wrong_result(course, request, outcome, now)
        elif outcome.status == "invalid":
            self._on_refusal(course, request, now)
        else:
            self._abandon(course, request)
            self.counts.replayed += course.record(request, outcome)
            self._continue(course, now)

    def _on_wrong_result(self, course: Course, request: Request, outcome: Outcome, now: float) -> None:
        """Let another peer make the result again; the gradient counts, because no other peer may add it."""
        if outcome.added:
            course.record_gradient(request, outcome)
        self._actions.append(WrongResult(request.peer))
        self._on_refusal(course, request, now)

    def _continue(self, course: Course, now: float) -> None:
        if course.is_done:
            self._end(course, None, now)
        elif course.is_replayed_too_often:
            self._end(course, "replayed too often", now)
        else:
            self._send_next(course, now)

    def _on_late_outcome(self, peer: PeerId, step: Step, outcome: Outcome) -> None:
        """Count a gradient that another server of the stage counts too."""
        course = self._courses.get(outcome.serial)
        added = course.added if course is not None else self._ended.places(outcome.serial)
        place = added.get(step.stage)
        if outcome.added and place is not None and place.peer != peer:
            self.counts.duplicates += 1

    def _end(self, course: Course, reason: DropReason | None, now: float) -> None:
        is_torn = course.is_torn
        if course.request is not None:
            self._abandon(course, course.request)
        del self._courses[course.serial]
        self._ended.add(course.serial, course.added, course.lost)
        for stage, peer in sorted(course.visited | course.left):
            self._releases.add(stage, peer, [course.serial], now)
        self.counts.lost += len(course.lost)
        if reason is None:
            self.counts.done += 1
        else:
            self.counts.dropped[reason] += 1
            self.counts.torn += is_torn and reason != "round over"
        self._actions.append(Finished(course.serial, course.loss, reason, course.added))

    def _on_due(self, course: Course, attempt: int, now: float) -> None:
        request = course.request
        if request is None or request.attempt != attempt or request.due > now:
            return
        if now - request.opened > STALL_SECONDS:
            self._end(course, "stalled", now)
        else:
            self._ask(course, request, now)

    def _note_emptiness(self, stage: int, now: float) -> None:
        """Report a stage that nobody serves while microbatches wait for it."""
        if self._waiting[stage] and self._routers[stage].reports_emptiness(now):
            self._actions.append(StageEmpty(stage, len(self._waiting[stage])))
            self._timers.wake(stage, now + REPORT_SECONDS)
