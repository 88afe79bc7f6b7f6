"""The round machine, fed with all that came in while its peer was busy, at the price of one.

What follows from the events is worked out once for all of them, as a daemon would for the statements of one delivery.
With hundreds of peers that is the difference between minutes and days.
"""

from collections.abc import Iterable

from protocol.rounds.events import Action, Event
from protocol.rounds.round import Round


class BatchRound(Round):
    def handle_all(self, events: Iterable[Event], now: float) -> list[Action]:
        """As `handle`, one after the other."""
        if self.commit is None:
            self._state.electorate.advance(now)
            for event in events:
                self._apply(event, now)
            self._progress(now)
        actions, self._actions = self._actions, []
        return actions
