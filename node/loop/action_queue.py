"""Collect the actions of a round loop until they are carried out; a phase that is repeated is reported once. PURE."""

from collections.abc import Iterable

from node.loop.actions import LoopAction, ReportPhase
from node.monitoring.status import Phase


class ActionQueue:
    """The actions since the last `take`, in order."""

    def __init__(self) -> None:
        self._actions: list[LoopAction] = []
        self._phase: ReportPhase | None = None

    def add(self, actions: Iterable[LoopAction]) -> None:
        """Add actions, but for reports of the phase that was reported last."""
        for action in actions:
            if isinstance(action, ReportPhase):
                if action == self._phase:
                    continue
                self._phase = action
            self._actions.append(action)

    def report_phase(self, phase: Phase, reason: str = "") -> None:
        """Report a phase, unless it was reported last."""
        self.add([ReportPhase(phase, reason)])

    def take(self) -> list[LoopAction]:
        """Remove the actions and return them."""
        actions, self._actions = self._actions, []
        return actions
