"""Drive a round loop in virtual time: its events one after another, its actions at once, and its clock."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from node.loop.events import LoopEvent, TimePassed
from node.loop.round_loop import RoundLoop
from protocol.identity import PeerId
from tests.simulation.virtual.network import Network

Watcher = Callable[[PeerId, Any], None]  # of the actions of all peers


class LoopDriver:
    """The process of a peer, which dies, freezes and begins again with its loop."""

    loop: RoundLoop

    def __init__(self, name: PeerId, network: Network, watchers: Sequence[Watcher]) -> None:
        self.name = name
        self.network = network
        self._watchers = watchers
        self.actions: deque[Any] = deque()  # of the loop, on their way
        self._life = 0  # how often it restarted
        self.begin_loop()

    def begin_loop(self) -> None:
        """Forget what was on its way to and from the loop before."""
        self.actions.clear()
        self._is_running = False
        self._events: deque[LoopEvent] = deque()
        self._tick_at = 0.0

    def carry_out(self, action: Any) -> None:
        """Carry out an action of the loop."""
        raise NotImplementedError

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Act later, unless dead by then; a frozen process goes on when it thaws."""
        life = self._life

        def act() -> None:
            link = self.network.link
            if self.name in link.frozen:
                self.network.schedule(max(0.0, link.frozen[self.name] - self.network.now) + 0.001, act)
            elif self.name not in link.dead and life == self._life:
                action()

        self.network.schedule(delay, act)

    def feed(self, event: LoopEvent) -> None:
        """Hand an event to the loop, after those that are on their way."""
        self._events.append(event)
        if self._is_running:
            return
        self._is_running = True
        while self._events and self.name not in self.network.link.dead:
            event = self._events.popleft()
            if not isinstance(event, TimePassed):
                self.network.record(self.name, event)
            self.actions.extend(self.loop.handle(event, self.network.now))
            self._run_actions()
        self._is_running = False
        if self.name not in self.network.link.dead:
            self._schedule_tick()

    def _run_actions(self) -> None:
        dead = self.network.link.dead
        while self.actions and self.name not in dead:
            action = self.actions.popleft()
            self.network.record(self.name, action)
            for watch in self._watchers:
                watch(self.name, action)
            if self.name not in dead:
                self.carry_out(action)

    def _schedule_tick(self) -> None:
        deadline = self.loop.next_deadline(self.network.now)
        if deadline is None or self.network.now < self._tick_at <= deadline:
            return
        self._tick_at = deadline
        self.after(deadline - self.network.now, lambda: self._tick(deadline))

    def _tick(self, deadline: float) -> None:
        if deadline == self._tick_at:
            self.feed(TimePassed())
