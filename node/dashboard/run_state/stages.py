"""The stages of a pipelined run, by the records of its peers. Pure."""

from collections.abc import Iterable

from node.dashboard.events import PeerReport, RunFacts
from node.monitoring.stage_table import ServedStage, StageEntry, build_stage_table


def served_stages(facts: RunFacts | None, reports: Iterable[PeerReport]) -> tuple[StageEntry, ...]:
    """Return the stages of a run that is cut; empty for another run."""
    if facts is None or facts.stages == 1:
        return ()
    served = [(report, report.stage) for report in reports if report.role == "trainer"]
    peers = [
        ServedStage(stage, report.stage_rate, report.round)
        for report, stage in served
        if stage is not None and stage < facts.stages
    ]
    return build_stage_table(peers, [0] * facts.stages)


def lowest_sum(stages: int, figures: Iterable[tuple[int | None, float]]) -> float:
    """Return the lowest sum of a stage, for example of tokens, because each token passes all stages.

    `figures` has the stage and the figure of each peer.
    """
    sums = [0.0] * stages
    for stage, figure in figures:
        if stage is not None and stage < stages:
            sums[stage] += figure
    return min(sums)
