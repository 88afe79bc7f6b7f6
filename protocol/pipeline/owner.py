"""Send the microbatches of one owner through all stages and back. Events in, actions out; no I/O.

After a timeout the owner asks the same peer again, because that peer knows the microbatch and adds nothing twice. It
asks another peer for a gradient only once the first is gone, is leaving or has refused.

The owner reports ended microbatches to servers in batches (`Releases`). A server that seems gone may only be slow: it
gets the report once it is back, because it would hold its step open for them until their deadline.
"""

import heapq
import random
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from protocol.identity import PeerId
from protocol.manifest.run import RunId
from protocol.pipeline.audits import AUDIT_SECONDS, ResultAudit
from protocol.pipeline.messages import MAX_RELEASED, Answer, HeldBlob, Outcome, Task
from protocol.pipeline.microbatch import (
    DropReason,
    EndedMicrobatches,
    ExactPart,
    OwnedMicrobatch,
    OwnerSettings,
    Request,
    StagePass,
)
from protocol.pipeline.owner_events import (
    Action,
    Answered,
    Ask,
    AskFailed,
    Event,
    Finished,
    Invited,
    OutcomeReceived,
    OwnerCounts,
    PeersChanged,
    Probe,
    Probed,
    Release,
    ReleaseFailed,
    ResultsDiffer,
    StageEmpty,
    WrongResult,
)
from protocol.pipeline.routing import REPORT_SECONDS, Router, task_round

RELEASE_SECONDS = 0.2
MAX_SERVERS = 256  # with ended microbatches
ASK_SECONDS, RETRY_SECONDS = 5.0, 0.5  # the deadline of a call, and the pause after one without an answer
MIN_PATIENCE, MAX_PATIENCE = 5.0, 120.0  # from an accepted task to the next request
PATIENCE = 4.0  # multiple of the expected time
OVERDUE_PATIENCES, UNPROVEN_PATIENCES = 3.0, 2.0  # until accepted work is lost; the second before any outcome
STUCK_SECONDS = 60.0  # more for a gradient, which no other peer may add
STALL_SECONDS = 600.0  # after which a peer that has a task counts as stuck
SEALED_SECONDS = 0.5  # until a server that has sealed its exact step is asked again


class AskAgain(NamedTuple):
    """Resend a microbatch's request if this attempt is unanswered."""

    serial: int
    attempt: int


class Wake(NamedTuple):
    """Look at the waiting microbatches of a stage again."""

    stage: int


class Timers:
    """All timers of an owner: one for each request, and at most one wake-up for each stage."""

    def __init__(self, stages: int) -> None:
        self._heap: list[tuple[float, int, AskAgain | Wake]] = []
        self._count = 0
        self._wake_at: list[float | None] = [None] * stages

    @property
    def due(self) -> float | None:
        """When the next timer is due."""
        return self._heap[0][0] if self._heap else None

    def ask_again(self, time: float, serial: int, attempt: int) -> None:
        self._push(time, AskAgain(serial, attempt))

    def wake(self, stage: int, time: float | None) -> None:
        """Wake a stage at this time, unless an earlier wake-up is set; `None` does nothing."""
        planned = self._wake_at[stage]
        if time is not None and (planned is None or time < planned):
            self._wake_at[stage] = time
            self._push(time, Wake(stage))

    def take(self, now: float) -> Iterator[AskAgain | Wake]:
        """Yield the timers that are due, including ones that are set meanwhile."""
        while self._heap and self._heap[0][0] <= now:
            _, _, timer = heapq.heappop(self._heap)
            if isinstance(timer, Wake):
                self._wake_at[timer.stage] = None
            yield timer

    def _push(self, time: float, timer: AskAgain | Wake) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, timer))


class Releases:
    """Ended microbatches not yet reported to servers; `due` is when the next reports are sent."""

    def __init__(self) -> None:
        self.due: float | None = None
        self._serials: OrderedDict[tuple[int, PeerId], set[int]] = OrderedDict()
        self._live: Sequence[Collection[PeerId]] = ()

    def add(self, stage: int, peer: PeerId, serials: Iterable[int], now: float) -> None:
        """Send these serials with the next messages, or when the server is back."""
        ended = self._serials.setdefault((stage, peer), set())
        ended.update(list(serials)[: MAX_RELEASED - len(ended)])
        if len(self._serials) > MAX_SERVERS:
            self._serials.popitem(last=False)
        self._plan(now)

    def set_live(self, live: Sequence[Collection[PeerId]], now: float) -> None:
        """Update the live peers of each stage."""
        self._live = live
        self._plan(now)

    def take(self, now: float) -> list[Release]:
        """Return the messages that are due."""
        if self.due is None or self.due > now:
            return []
        self.due = None
        return [Release(peer, stage, frozenset(self._serials.pop((stage, peer)))) for stage, peer in self._reachable()]

    def _plan(self, now: float) -> None:
        if self.due is None and self._reachable():
            self.due = now + RELEASE_SECONDS

    def _reachable(self) -> list[tuple[int, PeerId]]:
        return [(stage, peer) for stage, peer in self._serials if peer in self._live[stage]]


class Owner:
    """The microbatches of one peer. `runs`: the ids of the stages, in order."""

    def __init__(self, settings: OwnerSettings, runs: Sequence[RunId], rng: random.Random) -> None:
        self.settings = settings
        self._rng = rng
        self._auditors: frozenset[PeerId] | None = None
        self.counts = OwnerCounts()
        self._runs = tuple(runs)
        self._stage_of = {run: stage for stage, run in enumerate(self._runs)}
        self._routers = [Router(rng) for _ in self._runs]
        self._live: list[frozenset[PeerId]] = [frozenset() for _ in self._runs]
        self._draining: list[frozenset[PeerId]] = [frozenset() for _ in self._runs]
        self._hidden: frozenset[PeerId] = frozenset()
        self._lives: dict[tuple[int, PeerId], int] = {}  # by stage and peer
        self._rounds = [0 for _ in self._runs]
        self._microbatches: dict[int, OwnedMicrobatch] = {}
        self._waiting: list[list[int]] = [[] for _ in self._runs]
        self._changed: set[int] = set()  # stages that may admit microbatches again
        self._ended = EndedMicrobatches()
        self._releases = Releases()
        self._timers = Timers(len(self._runs))
        self._actions: list[Action] = []

    def run_of(self, stage: int) -> RunId:
        return self._runs[stage]

    def stage_of(self, run: RunId) -> int | None:
        """Return the stage with an id; None for another run."""
        return self._stage_of.get(run)

    @property
    def room(self) -> int:
        """The number of microbatches that may begin now."""
        return self.settings.in_flight - len(self._microbatches)

    @property
    def waiting(self) -> tuple[int, ...]:
        """The number of microbatches that wait for a peer, by stage."""
        return tuple(map(len, self._waiting))

    @property
    def open_serials(self) -> frozenset[int]:
        """The microbatches that have not ended."""
        return frozenset(self._microbatches)

    def next_deadline(self) -> float | None:
        """Return when to call `advance`."""
        return min((time for time in (self._timers.due, self._releases.due) if time is not None), default=None)

    def begin(self, serial: int, tokens: HeldBlob, now: float, exact: ExactPart | None = None) -> list[Action]:
        """Start a microbatch; its serial must be new, and `room` above 0."""
        assert self.room > 0 and serial not in self._microbatches
        microbatch = self._microbatches[serial] = OwnedMicrobatch(
            serial, tokens, len(self._runs), self.settings.needs_tokens, exact
        )
        self._send_next(microbatch, now)
        return self._take_actions()

    def leave(self, now: float) -> list[Action]:
        """Drop the microbatches that no stage can have counted; the others may still finish."""
        for serial in [serial for serial, microbatch in self._microbatches.items() if not microbatch.is_partly_counted]:
            self._end(self._microbatches[serial], "left", now)
        return self._take_actions()

    def end_round(self, now: float) -> list[Action]:
        """End all microbatches of an exact step whose round is over."""
        for microbatch in list(self._microbatches.values()):
            self._end(microbatch, "round over", now)
        return self._take_actions()

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event and return the resulting actions."""
        match event:
            case PeersChanged():
                self._change_peers(event, now)
            case Answered():
                self._on_answer(event, now)
            case AskFailed():
                self._on_failure(event, now)
            case OutcomeReceived():
                self._on_outcome(event.peer, event.outcome, now)
            case Invited(peer, run) if (stage := self._stage_of.get(run)) is not None:
                self._routers[stage].record_invitation(peer, now)
                self._changed.add(stage)
            case ReleaseFailed():
                self._releases.add(event.stage, event.peer, event.serials, now)
            case Probed():
                self._routers[event.stage].record_probe(event.peer, event.answers, now)
                self._changed.add(event.stage)
        self._serve_changed(now)
        return self._take_actions()

    def advance(self, now: float) -> list[Action]:
        """Return the actions that are due; call it at `next_deadline`."""
        for timer in self._timers.take(now):
            if isinstance(timer, Wake):
                self._serve(timer.stage, now)
            elif (microbatch := self._microbatches.get(timer.serial)) is not None:
                self._on_due(microbatch, timer.attempt, now)
        self._actions += self._releases.take(now)
        self._serve_changed(now)
        return self._take_actions()

    def _serve_changed(self, now: float) -> None:
        while self._changed:
            self._serve(self._changed.pop(), now)

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def distrust(self, peer: PeerId, now: float) -> None:
        """Give a peer whose results harm us no work for a while, at any stage."""
        for router in self._routers:
            router.record_loss(peer, now)

    def _change_peers(self, event: PeersChanged, now: float) -> None:
        self._auditors = event.standing
        self.counts.lost += self._ended.update(event.stages)
        for stage, peers in enumerate(event.stages):
            self._routers[stage].update(peers)
            self._rounds[stage] = task_round(event.round, peers)
            self._live[stage] = frozenset(entry.peer for entry in peers)
            self._draining[stage] = frozenset(entry.peer for entry in peers if entry.draining)
        self._lives = {server: life for server, life in self._lives.items() if server[1] in self._live[server[0]]}
        self._hidden = frozenset(entry.peer for peers in event.stages for entry in peers if entry.hidden)
        for stage, entry in [(stage, entry) for stage, peers in enumerate(event.stages) for entry in peers]:
            self._record_life(stage, entry.peer, entry.life, now)
        self._releases.set_live(self._live, now)
        for microbatch in list(self._microbatches.values()):
            self._leave_gone_peers(microbatch, now)
        self._changed.update(range(len(self._runs)))

    def _leave_gone_peers(self, microbatch: OwnedMicrobatch, now: float) -> None:
        gone = sorted({peer for stage, peer in microbatch.visited if peer not in self._live[stage]})
        for peer in gone:
            microbatch.forget_peer(peer)
        request = microbatch.request
        if request is not None and request.peer in gone:
            self._abandon(microbatch, request)
            self._send_next(microbatch, now)
        if microbatch.audit is not None and any(map(microbatch.audit.expects, gone)):
            for peer in gone:
                microbatch.audit.give_up(peer)
            self._go_on_with_audit(microbatch, microbatch.audit, now)
        microbatch.left |= {server for server in microbatch.visited if server[1] in gone}
        microbatch.visited -= microbatch.left

    def _record_life(self, stage: int, peer: PeerId, life: int, now: float) -> None:
        known = self._lives.get((stage, peer), 0)
        self._lives[stage, peer] = max(known, life)
        if life <= known or not known:
            return
        for microbatch in list(self._microbatches.values()):
            microbatch.record_life(stage, peer, life)
            request = microbatch.request
            if (
                request is not None
                and (request.stage_pass.stage, request.peer) == (stage, peer)
                and request.life < life
            ):
                self._ask(microbatch, request, now)

    def _send_next(self, microbatch: OwnedMicrobatch, now: float) -> None:
        """Send the next request of a microbatch, or let it wait for a peer."""
        stage_pass = microbatch.goal()
        live = self._live[stage_pass.stage]
        candidates = live if stage_pass.direction == "backward" else live - self._draining[stage_pass.stage]
        peer = microbatch.preferred(stage_pass, candidates - microbatch.refused_by)
        if peer is not None:
            self._open_request(microbatch, stage_pass, peer, now)
        else:
            self._waiting[stage_pass.stage].append(microbatch.serial)
            self._serve(stage_pass.stage, now)

    def _serve(self, stage: int, now: float) -> None:
        """Assign waiting microbatches of a stage to peers that can take them."""
        self._note_emptiness(stage, now)
        router, left = self._routers[stage], list[int]()
        full = set[tuple[frozenset[PeerId], bool]]()  # demands that no peer can meet now
        for microbatch in [
            self._microbatches[serial] for serial in self._waiting[stage] if serial in self._microbatches
        ]:
            demand = frozenset(microbatch.refused_by), not self._hidden.isdisjoint(microbatch.neighbours(stage))
            peer = router.choose(now, *demand) if demand not in full else None
            if peer is not None:
                self._open_request(microbatch, microbatch.goal(), peer, now)
            elif router.all_within(microbatch.refused_by):
                self._end(microbatch, "refused", now)
            else:
                full.add(demand)
                left.append(microbatch.serial)
        self._waiting[stage] = left
        self._timers.wake(stage, router.wake_time(now) if left else None)
        self._actions += [Probe(peer, stage) for peer in router.take_probes(now)]
        self._timers.wake(stage, router.probe_time(now))

    def _open_request(self, microbatch: OwnedMicrobatch, stage_pass: StagePass, peer: PeerId, now: float) -> None:
        microbatch.attempt += 1
        microbatch.refused_by &= self._live[stage_pass.stage]
        microbatch.visited.add((stage_pass.stage, peer))
        request = Request(
            stage_pass,
            peer,
            0,
            microbatch.attempt,
            now,
            now,
            now,
            microbatch.inputs_for(stage_pass),
            microbatch.is_replay(stage_pass),
        )
        microbatch.request = request
        self._routers[stage_pass.stage].begin(peer)
        request.tasks = self._routers[stage_pass.stage].tasks_of(peer)
        self._ask(microbatch, request, now)

    def _ask(self, microbatch: OwnedMicrobatch, request: Request, now: float) -> None:
        """Send the request of a microbatch, again if it has been sent."""
        request.life, request.sent = self._lives.get((request.stage_pass.stage, request.peer), 0), now
        self._schedule(microbatch, request, now + 2 * ASK_SECONDS)
        stage = request.stage_pass.stage
        task = microbatch.task(request, self._runs[stage], self.settings, self._rounds[stage])
        self._actions.append(Ask(request.peer, task))

    def _abandon(self, microbatch: OwnedMicrobatch, request: Request) -> None:
        microbatch.request = None
        self._routers[request.stage_pass.stage].end(request.peer)
        self._changed.add(request.stage_pass.stage)

    def _schedule(self, microbatch: OwnedMicrobatch, request: Request, due: float) -> None:
        request.due = due
        self._timers.ask_again(due, microbatch.serial, request.attempt)

    def _find(self, peer: PeerId, task: Task) -> tuple[OwnedMicrobatch, Request] | None:
        microbatch = self._microbatches.get(task.serial)
        request = microbatch.request if microbatch is not None else None
        if microbatch is None or request is None or (request.peer, request.attempt) != (peer, task.attempt):
            return None
        return microbatch, request

    def _on_answer(self, event: Answered, now: float) -> None:
        peer, answer = event.peer, event.answer
        self.counts.answers[answer.kind] += 1
        found = self._find(peer, event.task)
        stage = self._stage_of[event.task.run]
        if self._is_audit(peer, event.task):
            self._on_audit_answer(peer, event.task.serial, answer, now)
            return
        if found is not None:
            was_silent = self._routers[stage].is_silent(peer)
            self._routers[stage].record_answer(peer, max(0.0, now - found[1].sent))
            if was_silent:
                self._changed.add(stage)
        self._routers[stage].record_rate(peer, answer.rate)
        self._record_life(stage, peer, answer.life, now)
        if found is None or answer.life < self._lives[stage, peer]:
            return
        microbatch, request = found
        if answer.kind == "known" and answer.outcome is not None:
            self._on_outcome(peer, answer.outcome, now)
        elif microbatch.request is request:
            self._react(microbatch, request, answer, now)

    def _react(self, microbatch: OwnedMicrobatch, request: Request, answer: Answer, now: float) -> None:
        router = self._routers[request.stage_pass.stage]
        match answer.kind:
            case "accepted":
                patience = min(MAX_PATIENCE, max(MIN_PATIENCE, PATIENCE * router.expected_seconds(request.peer)))
                patiences = OVERDUE_PATIENCES if router.is_proven(request.peer) else UNPROVEN_PATIENCES
                request.overdue = min(request.overdue, now + patiences * patience)
                self._schedule(microbatch, request, now + patience)
            case "busy":
                self._on_busy(microbatch, request, now + answer.retry_ms / 1000, now)
            case "other life":
                if request.life < answer.life:
                    self._ask(microbatch, request, now)
            case "other round":
                self._on_busy(microbatch, request, now + self.settings.round_pause, now)
            case "refused":
                self._on_refusal(microbatch, request, now)
            case "no forward":
                microbatch.forget_server(request.stage_pass, request.peer)
                self._on_refusal(microbatch, request, now, is_fault=False)
            case _:
                if answer.kind == "sealed" and microbatch.exact is not None:
                    router.record_busy(request.peer, request.sent, now + SEALED_SECONDS)
                else:
                    router.remove(request.peer)
                microbatch.forget_server(request.stage_pass, request.peer)
                self._go_elsewhere(microbatch, request, now)

    def _on_busy(self, microbatch: OwnedMicrobatch, request: Request, until: float, now: float) -> None:
        router = self._routers[request.stage_pass.stage]
        if request.stage_pass.direction == "backward" and request.peer in self._live[request.stage_pass.stage]:
            self._schedule(microbatch, request, until)
            return
        router.record_busy(request.peer, request.sent, until)
        router.refund(request.peer)
        self._go_elsewhere(microbatch, request, now)

    def _on_refusal(self, microbatch: OwnedMicrobatch, request: Request, now: float, *, is_fault: bool = True) -> None:
        microbatch.refused_by.add(request.peer)
        microbatch.refusals += 1
        if is_fault:
            self._routers[request.stage_pass.stage].record_failure(request.peer, now)
        if microbatch.is_refused:
            self._end(microbatch, "refused", now)
        else:
            self._go_elsewhere(microbatch, request, now)

    def _go_elsewhere(self, microbatch: OwnedMicrobatch, request: Request, now: float) -> None:
        self._abandon(microbatch, request)
        self._send_next(microbatch, now)

    def _on_failure(self, event: AskFailed, now: float) -> None:
        stage = self._stage_of[event.task.run]
        until = self._routers[stage].record_silence(event.peer, now)
        if self._routers[stage].is_silent(event.peer):
            self._changed.add(stage)
        if self._is_audit(event.peer, event.task):
            self._on_audit_answer(event.peer, event.task.serial, None, now)
            return
        found = self._find(event.peer, event.task)
        if found is None:
            return
        microbatch, request = found
        if event.unreachable and not request.is_bound:
            microbatch.forget_server(request.stage_pass, request.peer)
            self._go_elsewhere(microbatch, request, now)
        else:
            self._schedule(microbatch, request, until if event.unreachable else now + RETRY_SECONDS)

    def _on_outcome(self, peer: PeerId, outcome: Outcome, now: float) -> None:
        stage = self._stage_of.get(outcome.run)
        if stage is None:
            return
        self._routers[stage].record_rate(peer, outcome.rate)
        self._record_life(stage, peer, outcome.life, now)
        if outcome.life < self._lives[stage, peer]:
            self.counts.outdated += 1
            return
        microbatch = self._microbatches.get(outcome.serial)
        request = microbatch.request if microbatch is not None else None
        stage_pass = StagePass(outcome.direction, stage)
        if microbatch is not None and self._is_of_audit(microbatch, peer, stage_pass):
            self._on_audit_outcome(microbatch, peer, outcome, now)
        elif microbatch is None or request is None or (request.peer, request.stage_pass) != (peer, stage_pass):
            self._on_late_outcome(peer, stage_pass, outcome)
        else:
            self._on_expected_outcome(microbatch, request, outcome, now)

    def _on_expected_outcome(self, microbatch: OwnedMicrobatch, request: Request, outcome: Outcome, now: float) -> None:
        if outcome.status == "void":
            self._ask(microbatch, request, now)
        elif outcome.status == "ended":
            self._end(microbatch, "expired", now)
        elif not microbatch.fits(request.stage_pass, outcome, self.settings.activation_bytes):
            self._on_wrong_result(microbatch, request, outcome, now)
        elif outcome.status == "invalid":
            self._on_refusal(microbatch, request, now)
        else:
            self._abandon(microbatch, request)
            if outcome.status == "done":
                router = self._routers[request.stage_pass.stage]
                router.record_outcome(request.peer, now - request.opened, request.tasks)
            self.counts.replayed += microbatch.record(request, outcome)
            if not self._begin_audit(microbatch, request, outcome, now):
                self._continue(microbatch, now)

    def _on_wrong_result(self, microbatch: OwnedMicrobatch, request: Request, outcome: Outcome, now: float) -> None:
        """Let another peer replay the result; the gradient counts, because no other peer may add it."""
        if outcome.added:
            microbatch.record_gradient(request, outcome)
        self._actions.append(WrongResult(request.peer))
        self._on_refusal(microbatch, request, now)

    def _continue(self, microbatch: OwnedMicrobatch, now: float) -> None:
        if microbatch.is_done:
            self._end(microbatch, None, now)
        elif microbatch.is_replayed_too_often:
            self._end(microbatch, "replayed too often", now)
        else:
            self._send_next(microbatch, now)

    # Audits of results.

    def _begin_audit(self, microbatch: OwnedMicrobatch, request: Request, outcome: Outcome, now: float) -> bool:
        """Let another server compute a result again if it is drawn; return whether the microbatch waits for that."""
        signed, share = outcome.signed, self.settings.audit_share
        is_ours = request.peer == self.settings.me
        if not share or signed is None or is_ours or request.replay or not signed.body.is_comparable:
            return False
        if self._rng.random() >= share:
            return False
        stage = request.stage_pass.stage
        task = microbatch.task(request, self._runs[stage], self.settings, self._rounds[stage])
        microbatch.audit = audit = ResultAudit(
            signed, replace(task, replay=True), self._draw_auditors(stage, request.peer), now + AUDIT_SECONDS
        )
        self._go_on_with_audit(microbatch, audit, now)
        return True

    def _draw_auditors(self, stage: int, audited: PeerId) -> list[PeerId]:
        """Return the servers that may compute a result again, in the order in which they are asked."""
        live, me = self._live[stage] - self._draining[stage] - {audited}, self.settings.me
        others = sorted(live - {me} if self._auditors is None else live & self._auditors - {me})
        self._rng.shuffle(others)
        # Nobody else is as sure to tell us the truth as our own server.
        return [me, *others] if me in live else others

    def _go_on_with_audit(self, microbatch: OwnedMicrobatch, audit: ResultAudit, now: float) -> None:
        stage = self._stage_of[audit.task.run]
        for peer in audit.next_peers() if now < audit.deadline else ():
            microbatch.attempt += 1
            audit.asked[peer] = microbatch.attempt
            microbatch.visited.add((stage, peer))
            life = self._lives.get((stage, peer), 0)
            self._actions.append(Ask(peer, replace(audit.task, attempt=microbatch.attempt, life=life)))
            self._timers.ask_again(audit.deadline, microbatch.serial, microbatch.attempt)
        if audit.is_over or now >= audit.deadline:
            self._end_audit(microbatch, audit, stage, now)

    def _end_audit(self, microbatch: OwnedMicrobatch, audit: ResultAudit, stage: int, now: float) -> None:
        """Give less work to servers that most others contradict; a microbatch with a wrong result begins again."""
        microbatch.audit, end = None, audit.end()
        self.counts.audited += end.verdict != "unanswered"
        self.counts.unaudited += end.verdict == "unanswered"
        self.counts.contradicted += len(end.wrong)
        for peer in sorted(end.wrong):
            self.distrust(peer, now)
        if end.results:
            self._actions.append(ResultsDiffer(stage, end.wrong, end.results))
        if audit.first.maker in end.wrong:
            self._end(microbatch, "contradicted", now)
        else:
            self._continue(microbatch, now)

    def _is_audit(self, peer: PeerId, task: Task) -> bool:
        microbatch = self._microbatches.get(task.serial)
        audit = microbatch.audit if microbatch is not None else None
        return audit is not None and audit.asked.get(peer) == task.attempt

    def _is_of_audit(self, microbatch: OwnedMicrobatch, peer: PeerId, stage_pass: StagePass) -> bool:
        audit = microbatch.audit
        if audit is None or not audit.expects(peer):
            return False
        return (audit.task.direction, self._stage_of[audit.task.run]) == stage_pass

    def _on_audit_answer(self, peer: PeerId, serial: int, answer: Answer | None, now: float) -> None:
        microbatch = self._microbatches[serial]
        audit = microbatch.audit
        if audit is None or (answer is not None and answer.kind == "accepted"):
            return
        if answer is not None and answer.outcome is not None:
            self._on_audit_outcome(microbatch, peer, answer.outcome, now)
        else:
            audit.give_up(peer)
            self._go_on_with_audit(microbatch, audit, now)

    def _on_audit_outcome(self, microbatch: OwnedMicrobatch, peer: PeerId, outcome: Outcome, now: float) -> None:
        audit = microbatch.audit
        assert audit is not None
        if outcome.status == "done" and outcome.signed is not None:
            audit.add(outcome.signed)
        else:
            audit.give_up(peer)
        self._go_on_with_audit(microbatch, audit, now)

    def _on_late_outcome(self, peer: PeerId, stage_pass: StagePass, outcome: Outcome) -> None:
        """Count a gradient that another server of the stage counts too."""
        microbatch = self._microbatches.get(outcome.serial)
        added = microbatch.added if microbatch is not None else self._ended.servers(outcome.serial)
        server = added.get(stage_pass.stage)
        if outcome.added and server is not None and server.peer != peer:
            self.counts.duplicates += 1

    def _end(self, microbatch: OwnedMicrobatch, reason: DropReason | None, now: float) -> None:
        is_partly_counted = microbatch.is_partly_counted
        if microbatch.request is not None:
            self._abandon(microbatch, microbatch.request)
        del self._microbatches[microbatch.serial]
        self._ended.add(microbatch.serial, microbatch.added, microbatch.lost)
        for stage, peer in sorted(microbatch.visited | microbatch.left):
            self._releases.add(stage, peer, [microbatch.serial], now)
        self.counts.lost += len(microbatch.lost)
        if reason is None:
            self.counts.done += 1
        else:
            self.counts.dropped[reason] += 1
            self.counts.partly_counted += is_partly_counted and reason != "round over"
        self._actions.append(Finished(microbatch.serial, microbatch.loss, reason, microbatch.added))

    def _on_due(self, microbatch: OwnedMicrobatch, attempt: int, now: float) -> None:
        request, audit = microbatch.request, microbatch.audit
        if audit is not None and now >= audit.deadline:
            self._go_on_with_audit(microbatch, audit, now)
        if request is None or request.attempt != attempt or request.due > now:
            return
        if now > request.overdue + (STUCK_SECONDS if request.is_bound else 0.0):
            self._on_lost_work(microbatch, request, now)
        elif now - request.opened > STALL_SECONDS:
            self._end(microbatch, "stalled", now)
        else:
            self._ask(microbatch, request, now)

    def _on_lost_work(self, microbatch: OwnedMicrobatch, request: Request, now: float) -> None:
        """Take work back that a peer accepted and does not do; a gradient is given up."""
        self.counts.overdue += 1
        self._routers[request.stage_pass.stage].record_loss(request.peer, now)
        if request.is_bound:
            self._end(microbatch, "stalled", now)
        else:
            microbatch.forget_server(request.stage_pass, request.peer)
            self._go_elsewhere(microbatch, request, now)

    def _note_emptiness(self, stage: int, now: float) -> None:
        """Report a stage that nobody serves while microbatches wait for it."""
        if self._waiting[stage] and self._routers[stage].reports_emptiness(now):
            self._actions.append(StageEmpty(stage, len(self._waiting[stage])))
            self._timers.wake(stage, now + REPORT_SECONDS)
