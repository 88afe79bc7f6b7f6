"""Sum up in one line the rounds that a peer missed and what became of its contributions. Pure."""

from node.trainer.ipc.channel import ContributionOutcome
from node.units import format_plural


class ReturnSummary:
    """Collects the rounds that a peer catches up with, from round `start` on."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._included: list[int | None] = []  # the round of each contribution, if it is known
        self._given_back = 0
        self._unknown = 0

    def add(self, outcome: ContributionOutcome, included_in: int | None = None) -> None:
        """Record the outcome of a contribution; `included_in` is the number of the round that includes it."""
        match outcome:
            case "included":
                self._included.append(included_in)
            case "excluded":
                self._given_back += 1
            case "lost":
                self._unknown += 1

    def rounds_until(self, round_number: int) -> int:
        return max(0, round_number - self._start)

    def describe(self, round_number: int) -> str:
        """Return the line for a peer that has caught up with round `round_number`; empty if there is nothing to say."""
        rounds = self.rounds_until(round_number)
        if not rounds and not (self._included or self._given_back or self._unknown):
            return ""
        if self._start == 0:
            return f"caught up with round {round_number}"
        outcomes = [*self._describe_included()]
        if self._given_back:
            outcomes.append(f"{self._given_back} given back; later ones carry their work")
        if self._unknown:
            outcomes.append(f"{self._unknown} with an unknown outcome")
        away = f"back after {format_plural(rounds, 'round')}"
        return f"{away}: {', '.join(outcomes)}" if outcomes else away

    def _describe_included(self) -> list[str]:
        rounds = sorted(number for number in self._included if number is not None)
        if not self._included:
            return []
        where = f" in round {', '.join(map(str, rounds))}" if rounds else ""
        return [f"{format_plural(len(self._included), 'contribution')} included{where}"]
