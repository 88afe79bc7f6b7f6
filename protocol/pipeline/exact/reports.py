"""Collect the reports of all stages about exact steps: how rounds were decided, and which were void. PURE.

A round changes a stage only if the commits of all stages cover their step. So a stage that has decided its commit waits
until it knows the others' verdicts; one that is incomplete makes the round void for all.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from protocol.murmur_pb2 import PeerRecord

APPLIED, VOID = "a", "v"
MAX_VERDICTS = 64  # rounds that a peer reports


@dataclass(frozen=True)
class StepReports:
    """`decided`: by round and stage, whether the commit covers the step; `verdicts`: whether rounds were applied."""

    stages: int
    decided: Mapping[int, Mapping[int, bool]] = field(default_factory=dict)
    verdicts: Mapping[int, bool] = field(default_factory=dict)

    def verdict(self, round_number: int, own: Mapping[int, bool]) -> bool | None:
        """Return whether a round counts; None while it is open. `own`: what our own commit says, by stage."""
        if round_number in self.verdicts:
            return self.verdicts[round_number]
        known = {**self.decided.get(round_number, {}), **own}
        if not all(known.values()):
            return False
        return True if len(known) == self.stages else None

    def covered_stages(self, round_number: int) -> frozenset[int]:
        """Return the stages whose commit to a round covers the step; all of them if the round was applied."""
        if self.verdicts.get(round_number):
            return frozenset(range(self.stages))
        return frozenset(stage for stage, covers in self.decided.get(round_number, {}).items() if covers)

    def is_doomed(self, round_number: int) -> bool:
        """Return whether a round cannot count any more."""
        return self.verdict(round_number, {}) is False


class StepHistory:
    """The verdicts on the last rounds that this peer has applied, and its open decision."""

    def __init__(self) -> None:
        self._round = 0  # the round after the last verdict
        self._verdicts = ""
        self._decided = 0

    def decide(self, round_number: int, is_complete: bool) -> None:
        """Record how our stage has decided a round."""
        self._decided = 2 * round_number + is_complete + 1

    def apply(self, round_number: int, counts: bool) -> None:
        """Record a round that was applied, or passed over as void."""
        kept = self._verdicts if round_number == self._round else ""
        self._round, self._verdicts = round_number + 1, (kept + (APPLIED if counts else VOID))[-MAX_VERDICTS:]

    def record_fields(self) -> dict[str, int | str]:
        """Return the fields of our peer record."""
        return {"step_decided": self._decided, "step_round": self._round, "step_verdicts": self._verdicts}


def read_step_reports(records: Iterable[PeerRecord], stages: int) -> StepReports:
    """Return what the trainers of all stages report; of two that contradict each other, either one."""
    decided: dict[int, dict[int, bool]] = {}
    verdicts: dict[int, bool] = {}
    for record in records:
        if record.role != "trainer" or not 0 < record.stage <= stages:
            continue
        if record.step_decided:
            number, is_complete = divmod(record.step_decided - 1, 2)
            decided.setdefault(number, {})[record.stage - 1] = bool(is_complete)
        first = max(0, record.step_round - len(record.step_verdicts))
        verdicts |= {first + index: letter == APPLIED for index, letter in enumerate(record.step_verdicts)}
    return StepReports(stages, decided, verdicts)
