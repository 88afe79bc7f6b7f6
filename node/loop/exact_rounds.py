"""The void rule: a round of exact steps changes nothing unless the commits of all stages cover their step. PURE.

The commits of the other stages count by their certificates alone (`StepDecisions`).
Without exact steps every round counts.
"""

from dataclasses import dataclass

from node.loop.actions import LoopAction, PublishStep, ReportPhase, ReportRecovered
from protocol.consensus.messages.contributions import Commit
from protocol.pipeline.exact import StepReports, commit_covers_step, lacking_microbatches

VOID_ROUND = "the step is made again, because a stage lacks microbatches or counts some twice"


@dataclass(frozen=True)
class ExactOptions:
    """`microbatches`: of a step; `stage`: ours."""

    microbatches: int
    stage: int


class ExactRounds:
    """The verdicts on the rounds of one replica."""

    def __init__(self, options: ExactOptions | None) -> None:
        self._options = options
        self._published: PublishStep | None = None

    def review(self, commit: Commit, reports: StepReports) -> tuple[bool | None, list[LoopAction]]:
        """Return the verdict on a round that our stage has decided, and let the other stages know of the decision."""
        verdict, actions = self.verdict(commit, reports), list[LoopAction]()
        if self._options is None:
            return verdict, actions
        count = self._options.microbatches
        decision = PublishStep(commit.round, commit_covers_step(commit, count), lacking_microbatches(commit, count))
        if decision != self._published:
            self._published = decision
            actions.append(decision)
        if verdict is None:
            actions.append(ReportPhase("waiting for peers", f"other stages have not decided round {commit.round} yet"))
        return verdict, actions

    def verdict(self, commit: Commit, reports: StepReports) -> bool | None:
        """Return whether a decided round counts; None until all stages have decided it, or one without its step."""
        if self._options is None:
            return True
        covers = commit_covers_step(commit, self._options.microbatches)
        return reports.verdict(commit.round, {self._options.stage: covers})

    def apply(self, commit: Commit, counts: bool) -> list[LoopAction]:
        """Record a round that was applied, or passed over as void."""
        if self._options is None or counts:
            return []
        return [ReportRecovered("step void", f"{VOID_ROUND} in round {commit.round}")]
