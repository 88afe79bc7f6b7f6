"""Check a work record before its work is repeated: does it belong to its contribution, and can we repeat it? PURE."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from optim.round_plan import RoundPlanner
from protocol.audits import BlobName, Conditions, Verdict, WorkRecord
from protocol.blobs.blob import Blob
from protocol.consensus.messages.contributions import Contribution

MAX_PLANS = 4  # maximal steps of an audit, in planned rounds
CPU = "cpu "  # two kinds of CPUs differ little; bf16, as on cards, differs from fp32 more than half of the steps do
PLAIN = (CPU, "cuda ")  # neither compiled nor on several ranks: as an audit repeats it
MAX_LINKS = 4  # maximal number of records back to the last contribution that the chain includes


@dataclass(frozen=True)
class AuditResult:
    """The verdict of an audit and its reason; "skipped" if this auditor could not repeat the work."""

    verdict: Verdict | Literal["skipped"]
    reason: str = ""


class RecordCheck:
    """Checks the work records of other peers against the limits and the conditions of this auditor."""

    def __init__(self, planner: RoundPlanner, own: Conditions, max_state_bytes: int) -> None:
        self._planner = planner
        self._own = own
        self._max_state_bytes = max_state_bytes

    def check(self, record: WorkRecord, contribution: Contribution, rounds: Collection[int]) -> AuditResult | None:
        """Return the result if it is clear from the record; `None` if the work can be repeated.

        `rounds` are the rounds whose anchors this auditor has.
        """
        if record.round != contribution.round - contribution.age:
            return AuditResult("different", "its record is of another round")
        if obstacle := record.find_obstacle() or self._find_excess(record):
            return AuditResult("not auditable", obstacle)
        lack = self._find_lack(record, rounds)
        return AuditResult("skipped", lack) if lack else None

    def is_other_kind(self, record: WorkRecord) -> bool:
        """Return whether the last bits of the work are others than those of our repetition."""
        return record.conditions.device != self._own.device

    def _find_excess(self, record: WorkRecord) -> str:
        if record.trace.steps > MAX_PLANS * self._planner.plan(record.round).steps:
            return "too many steps"
        if record.before is not None and record.before.size > self._max_state_bytes:
            return "too large a state"
        return ""

    def _find_lack(self, record: WorkRecord, rounds: Collection[int]) -> str:
        """Return what this auditor lacks to repeat the work, through no fault of the audited peer."""
        if record.conditions.text != self._own.text:
            return "other text"
        if not record.conditions.device.startswith(PLAIN):
            return "another way of training"
        is_measured = record.conditions.device.startswith(CPU) and self._own.device.startswith(CPU)
        if self.is_other_kind(record) and not is_measured:
            return "another kind of device"
        return "" if set(record.anchor_rounds) <= set(rounds) else "an old anchor"


def next_link(records: Sequence[WorkRecord], last_work: Blob | None) -> Blob | None:
    """Return the next earlier record to read; `None` if no other is needed.

    Args:
        records: the record of the work and its predecessors, newest first.
        last_work: the record of the last contribution that the chain includes; `None` if it is unknown.
    """
    if last_work is None or records[-1].previous is None or len(records) > MAX_LINKS or _reaches(records, last_work):
        return None
    return records[-1].previous.blob


def find_broken_link(records: Sequence[WorkRecord], last_work: Blob | None) -> str:
    """Return why the state before the work does not follow from included work; empty if it does."""
    if last_work is None:
        return ""
    if records[0].before is None:
        return "started again"
    if any(earlier.after != record.before for record, earlier in itertools.pairwise(records)):
        return "another state than the one after its last contribution"
    return "" if _reaches(records, last_work) else "a state of unknown origin"


def _reaches(records: Sequence[WorkRecord], last_work: Blob) -> bool:
    """Return whether the record of the last included contribution has been read."""
    return any(record.previous == BlobName.of(last_work) for record in records[:-1])
