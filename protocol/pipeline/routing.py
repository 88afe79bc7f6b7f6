"""Routing: which peer of a stage computes the next microbatch.

Stride scheduling by compute rate: each peer has a virtual time, which advances by 1 / rate with each microbatch that it
gets; the next microbatch goes to the peer with the lowest virtual time. Servers report their rates, measured from
compute time only. Weights from round trips would equalise the requests in flight instead of the use of the machines
(SWARM's routing reaches 0.78 of the ideal where this one reaches 0.99).

A reported rate counts only up to a multiple of what this owner has measured at the peer, and a peer without outcomes
has few tasks. A peer that accepts work and does not do it gets none for a while, twice as long each time.

A peer has at most one second of work, plus what is in flight: `ceil(2 rate (2 RTT + 1 s)) + 1` tasks, because a
microbatch has two tasks at a stage, and a task takes two round trips. A busy peer is skipped, without a ban, until it
invites us or its pause has passed; an unreachable one is banned for 5 s, doubling to 5 minutes. If all peers
are banned, bans do not count.

Announcing a server costs a stranger nothing, and a task for one that does not answer holds up its step. So while some
peers of a stage answer, one that has answered no call of this node yet, or not the last one, is probed once its ban has
passed, and gets tasks when it has answered.

Two peers that are both hidden behind NAT cannot exchange activations (see `protocol.transport.nat`). So a microbatch
that comes from a hidden peer, or returns to one, goes to a peer that others can call, and waits while that peer is
busy. If the stage has no such peer, a hidden one gets it anyway.
"""

import math
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from protocol.conduct import Suspension
from protocol.identity import PeerId
from protocol.pipeline.messages import MAX_ROUND_DISTANCE
from protocol.recent import RecentTable

FIRST_BAN_SECONDS, MAX_BAN_SECONDS = 5.0, 300.0
AHEAD_SECONDS = 1.0  # of work that a peer holds in addition to the round trips
MAX_PROBES = 16  # at a time at one stage
REPORT_SECONDS = 10.0  # between two reports of a stage without peers
CREDIT_SECONDS = 2.0  # of missed work that a peer may catch up on after it was busy or banned
SMOOTHING = 0.25
DEFAULT_RATE = 1.0  # microbatches a second, until a peer reports its rate
MIN_RATE = 1e-4
BELIEF = 4.0  # multiple of the rate measured here, up to which a reported rate counts
KEPT_MEASURE = 0.98  # of the best measured rate, with each outcome
FIRST_TASKS, PROBATION_TASKS = 8, 1  # before the first outcome; and after work was lost
FORGIVEN_AFTER = 16  # outcomes
REMEMBERED_LOSSES = 1024  # peers


@dataclass(frozen=True)
class StagePeer:
    """A live peer of a stage, as its record shows it; rate 0 is unknown, and hidden peers cannot be called.

    `answers`: it has answered this node's last call.
    """

    peer: PeerId
    life: int
    round: int
    rate: float = 0.0
    draining: bool = False
    hidden: bool = False
    answers: bool = True


@dataclass
class _Route:
    reported: float
    virtual_time: float
    tie: float
    first_tasks: int = FIRST_TASKS
    outcomes: int = 0
    measured: float = 0.0  # microbatches a second; 0 before the first outcome
    outstanding: int = 0
    round_trip: float = 0.0
    failures: int = 0
    banned_until: float = 0.0
    busy_until: float = 0.0
    invited: float = -math.inf  # when the peer last invited us
    answers_node: bool = False  # as `StagePeer.answers` says
    answers_owner: bool = False  # it answered the last task or probe
    is_probed: bool = False

    @property
    def rate(self) -> float:
        """Return the reported rate, as far as this owner believes it."""
        return max(MIN_RATE, min(self.reported, BELIEF * self.measured)) if self.measured else self.reported

    @property
    def answers(self) -> bool:
        return self.answers_node or self.answers_owner

    @property
    def limit(self) -> int:
        """The most tasks it may have: two for each microbatch, each with two round trips."""
        wanted = math.ceil(2 * self.rate * (2 * self.round_trip + AHEAD_SECONDS)) + 1
        return min(wanted, self.first_tasks + self.outcomes)


def task_round(own: int, peers: Iterable[StagePeer]) -> int:
    """Return the round to put into tasks for a stage: ours, or the stage's if all of its peers are far from ours.

    A stage that restarted from a kept state is many rounds behind, and its servers would refuse tasks of our round.
    """
    rounds = [entry.round for entry in peers]
    is_far = all(abs(number - own) > MAX_ROUND_DISTANCE for number in rounds)
    return max(rounds) if rounds and is_far else own


class Router:
    """The peers of one stage, as one owner sees them; times are in seconds of the caller's clock."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._routes: dict[PeerId, _Route] = {}
        self._away: dict[PeerId, _Route] = {}  # peers that take no new work and still have some
        # Peers that accepted work and did not do it, until they get work again; also those that left since.
        self._losses = RecentTable[PeerId, Suspension](REMEMBERED_LOSSES)
        self._hidden: frozenset[PeerId] = frozenset()
        self._silent: set[PeerId] = set()  # those of the routes that do not answer
        self._now_virtual = 0.0
        self._reported_at = -math.inf  # the last report of a stage without peers

    def reports_emptiness(self, now: float) -> bool:
        """Return whether to report now that no peer serves the stage, at most once in `REPORT_SECONDS`."""
        if self._routes or now - self._reported_at < REPORT_SECONDS:
            return False
        self._reported_at = now
        return True

    def all_within(self, peers: Collection[PeerId]) -> bool:
        """Return whether the stage has peers, and all of them are among these."""
        return bool(self._routes) and self._routes.keys() <= set(peers)

    def update(self, peers: Iterable[StagePeer]) -> None:
        """Update the live peers of the stage that take new microbatches."""
        listed = {entry.peer: entry for entry in peers if not entry.draining}
        self._hidden = frozenset(peer for peer, entry in listed.items() if entry.hidden)
        for peer in self._routes.keys() - listed.keys():
            self.remove(peer)
        start = min((route.virtual_time for route in self._routes.values()), default=self._now_virtual)
        for peer, entry in listed.items():
            if peer not in self._routes:
                self._enter(peer, entry.rate, start)
            self._routes[peer].answers_node = entry.answers
            self._note_silence(peer)

    def _enter(self, peer: PeerId, rate: float, start: float) -> None:
        route = self._away.pop(peer, None) or _Route(self._seed_rate(rate), start, self._rng.random())
        route.virtual_time = max(route.virtual_time, start)
        if peer in self._losses:
            route.first_tasks = PROBATION_TASKS
        self._routes[peer] = route

    def _seed_rate(self, rate: float) -> float:
        if rate > 0:
            return max(MIN_RATE, rate)
        return median([route.rate for route in self._routes.values()] or [DEFAULT_RATE])

    def remove(self, peer: PeerId) -> None:
        """Give a peer no new microbatches until a record lists it again."""
        self._silent.discard(peer)
        route = self._routes.pop(peer, None)
        if route is not None and route.outstanding:
            self._away[peer] = route

    def choose(self, now: float, excluded: Collection[PeerId] = (), beside_hidden: bool = False) -> PeerId | None:
        """Return the peer for the next microbatch and charge it; None if all are busy or full.

        `beside_hidden`: whether the peer exchanges activations with a hidden one.
        """
        open_routes = self._open_routes(now, excluded, beside_hidden)
        if not open_routes:
            return None
        floor = self._now_virtual
        for route in self._routes.values():
            route.virtual_time = max(route.virtual_time, floor - CREDIT_SECONDS)
        peer = min(open_routes, key=lambda each: self._rank(open_routes[each]))
        chosen = open_routes[peer]
        self._now_virtual = max(floor, chosen.virtual_time)
        chosen.virtual_time += 1 / chosen.rate
        chosen.tie = self._rng.random()
        return peer

    def _rank(self, route: _Route) -> tuple[float, float]:
        return route.virtual_time, route.tie

    def _open_routes(self, now: float, excluded: Collection[PeerId], beside_hidden: bool) -> Mapping[PeerId, _Route]:
        wanted = {peer: route for peer, route in self._routes.items() if peer not in excluded}
        if beside_hidden:
            wanted = {peer: route for peer, route in wanted.items() if peer not in self._hidden} or wanted
        wanted = {peer: route for peer, route in wanted.items() if self._loss_until(peer) <= now} or wanted
        if self._silent:
            wanted = {peer: route for peer, route in wanted.items() if peer not in self._silent} or wanted
        reachable = {peer: route for peer, route in wanted.items() if route.banned_until <= now} or wanted
        return {
            peer: route
            for peer, route in reachable.items()
            if route.outstanding < route.limit and route.busy_until <= now
        }

    def wake_time(self, now: float) -> float | None:
        """Return when a busy or banned peer may be asked again; None if only outcomes can free a peer."""
        times = [time for route in self._routes.values() for time in (route.busy_until, route.banned_until)]
        times += map(self._loss_until, self._routes)
        return min((time for time in times if time > now), default=None)

    def take_probes(self, now: float) -> list[PeerId]:
        """Return the peers to probe now: those that do not answer, while another one does."""
        unprobed = self._unprobed()
        room = MAX_PROBES - len(self._silent) + len(unprobed)
        due = [(route.failures, peer) for peer, route in unprobed.items() if route.banned_until <= now]
        chosen = [peer for _, peer in sorted(due)[: max(0, room)]]
        for peer in chosen:
            self._routes[peer].is_probed = True
        return chosen

    def probe_time(self, now: float) -> float | None:
        """Return when `take_probes` may return more, if nothing happens before."""
        times = [route.banned_until for route in self._unprobed().values()]
        return min((time for time in times if time > now), default=None)

    def _unprobed(self) -> dict[PeerId, _Route]:
        if len(self._silent) == len(self._routes):
            return {}
        return {peer: self._routes[peer] for peer in self._silent if not self._routes[peer].is_probed}

    def is_silent(self, peer: PeerId) -> bool:
        """Return whether a listed peer does not answer."""
        return peer in self._silent

    def _note_silence(self, peer: PeerId) -> None:
        """Note whether a peer answers, after something was recorded of it."""
        route = self._routes.get(peer)
        if route is not None and not route.answers:
            self._silent.add(peer)
        else:
            self._silent.discard(peer)

    def record_probe(self, peer: PeerId, answers: bool, now: float) -> None:
        """Record whether a peer has answered a probe; its failures count until it answers a task."""
        route = self._find(peer)
        if route is None:
            return
        route.is_probed = False
        if answers:
            route.answers_owner = True
            self._note_silence(peer)
        else:
            self.record_silence(peer, now)

    def begin(self, peer: PeerId) -> None:
        """Count a task that is sent to a peer."""
        route = self._find(peer)
        if route is not None:
            route.outstanding += 1

    def end(self, peer: PeerId) -> None:
        """Count the end of a task, whatever its result."""
        route = self._find(peer)
        if route is not None:
            route.outstanding = max(0, route.outstanding - 1)
            if peer in self._away and not route.outstanding:
                del self._away[peer]

    def refund(self, peer: PeerId) -> None:
        """Take back the charge for a microbatch that the peer did not accept."""
        route = self._routes.get(peer)
        if route is not None:
            route.virtual_time -= 1 / route.rate

    def record_rate(self, peer: PeerId, rate: float) -> None:
        """Record the compute rate that a server reports."""
        route = self._find(peer)
        if route is not None and rate > 0:
            route.reported = max(MIN_RATE, rate)

    def tasks_of(self, peer: PeerId) -> int:
        """Return how many tasks a peer has."""
        route = self._find(peer)
        return route.outstanding if route is not None else 0

    def is_proven(self, peer: PeerId) -> bool:
        """Return whether a peer has sent an outcome since it entered or lost work."""
        route = self._find(peer)
        return route is not None and route.outcomes > 0

    def record_outcome(self, peer: PeerId, seconds: float, tasks: int) -> None:
        """Record an outcome after so many seconds, while the peer had `tasks`: two for each microbatch."""
        route = self._find(peer)
        if route is None:
            return
        route.outcomes += 1
        route.measured = max(KEPT_MEASURE * route.measured, max(1, tasks) / (2 * max(seconds, 1e-3)))
        loss = self._losses.get(peer)
        if loss is not None and loss.count_good(FORGIVEN_AFTER):
            del self._losses[peer]

    def record_loss(self, peer: PeerId, now: float) -> None:
        """Give a peer that accepted work and did not do it no more for a while, and little afterwards."""
        loss = self._losses.get(peer) or Suspension()
        if loss.raise_level(now):
            loss.until = now + min(MAX_BAN_SECONDS, FIRST_BAN_SECONDS * 2.0 ** min(loss.level, 16))
        self._losses[peer] = loss
        route = self._find(peer)
        if route is not None:
            route.first_tasks, route.outcomes, route.measured = PROBATION_TASKS, 0, route.measured / 2

    def _loss_until(self, peer: PeerId) -> float:
        loss = self._losses.get(peer)
        return loss.until if loss is not None else 0.0

    def record_answer(self, peer: PeerId, round_trip: float) -> None:
        """Record an answer, and the time that it took."""
        route = self._find(peer)
        if route is not None:
            route.failures, route.banned_until, route.answers_owner = 0, 0.0, True
            self._note_silence(peer)
            route.round_trip += (SMOOTHING if route.round_trip else 1.0) * (round_trip - route.round_trip)

    def record_busy(self, peer: PeerId, sent: float, until: float) -> None:
        """Skip a peer until this time, unless it has invited us since the task was sent."""
        route = self._routes.get(peer)
        if route is not None and route.invited < sent:
            route.busy_until = max(route.busy_until, until)

    def record_invitation(self, peer: PeerId, now: float) -> None:
        """Stop skipping a peer, because it can take forwards again."""
        route = self._routes.get(peer)
        if route is not None:
            route.busy_until, route.invited = now, now

    def record_silence(self, peer: PeerId, now: float) -> float:
        """Ban a peer that does not answer until it answers a probe; return when it may be asked again."""
        route = self._find(peer)
        if route is not None:
            route.answers_owner = False
            self._note_silence(peer)
        return self.record_failure(peer, now)

    def record_failure(self, peer: PeerId, now: float) -> float:
        """Ban a peer that cannot be reached or refuses; return when it may be asked again."""
        route = self._find(peer)
        if route is None:
            return now + FIRST_BAN_SECONDS
        if now >= route.banned_until:
            pause = min(MAX_BAN_SECONDS, FIRST_BAN_SECONDS * 2.0 ** min(route.failures, 16))
            route.failures, route.banned_until = route.failures + 1, now + pause
        return route.banned_until

    def expected_seconds(self, peer: PeerId) -> float:
        """Estimate when a peer should finish all of this owner's work."""
        route = self._find(peer)
        if route is None:
            return 0.0
        return route.round_trip + (route.outstanding + 1) / route.rate

    def _find(self, peer: PeerId) -> _Route | None:
        return self._routes.get(peer) or self._away.get(peer)
