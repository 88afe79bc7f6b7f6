"""The report of a run as its host saw it, and the files that hold it."""

import asyncio
import logging
from pathlib import Path

from node.commands.eval.results import newest_of_each
from node.dashboard.event_log import EventLog
from node.dashboard.report.run_report import REPORT_MARKDOWN, ContributorReport, RunReport, write_report
from node.dashboard.run_state.contributors import mean_seconds
from node.dashboard.state import RunState
from protocol.errors import StorageError

logger = logging.getLogger(__name__)

WRITE_SECONDS = 2.0  # between two looks whether the report of a finished run has changed


def build_host_report(state: RunState) -> RunReport:
    """Return the report of the run so far; unknown rounds have the mean duration of the others."""
    rows = list(state.rows)
    facts, last, validations = state.facts, state.rows.last, [row.validation_loss for row in rows]
    measured = [loss for loss in validations if loss is not None]
    mean = mean_seconds(row.seconds for row in rows)
    return RunReport(
        run=facts.run if facts else "",
        run_id=facts.run_id if facts else "",
        recipe=facts.recipe if facts else "",
        outcome="stopped" if state.was_stopped else "done" if state.is_over else "running",
        parameters=facts.parameters if facts else 0,
        tokens=last.tokens if last else 0,
        rounds=last.round + 1 if last else 0,
        seconds=round(sum(mean if row.seconds is None else row.seconds for row in rows), 1),
        initial_loss=rows[0].loss if rows else None,
        loss=last.loss if last else None,
        initial_validation_loss=measured[0] if measured else None,
        validation_loss=measured[-1] if measured else None,
        contributors=_count_contributors(state),
        missing_rounds=state.missing_rounds,
        evaluations=tuple(newest_of_each(state.evaluations)),
        sample=state.sample.prompt + state.sample.text if state.sample else "",
    )


def _count_contributors(state: RunState) -> tuple[ContributorReport, ...]:
    total = state.rows.last.tokens if state.rows.last else 0
    sums = sorted(state.contributors.by_peer.items(), key=lambda item: (-item[1].tokens, item[0]))
    return tuple(
        ContributorReport(
            peer=peer,
            name=state.name_of(peer),
            tokens=one.tokens,
            share=one.tokens / total if total else 0.0,
            rounds=one.rounds,
            seconds=round(one.seconds, 1),
            size=one.size,
        )
        for peer, one in sums
    )


class CurrentReport:
    """The report of the newest state; it is built once per event, because it reads all rounds."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._index = -1
        self._report = build_host_report(RunState())

    def get(self) -> RunReport:
        """Return the report of the run so far."""
        state = self._event_log.state
        if state.index != self._index:
            self._index, self._report = state.index, build_host_report(state)
        return self._report

    def get_if_over(self) -> RunReport | None:
        """Return the report of a finished run; `None` while it goes on."""
        return self.get() if self._event_log.state.is_over else None


class ReportWriter:
    """Keeps report.json and report.md of a finished run up to date in the host's folder."""

    def __init__(self, folder: Path, event_log: EventLog) -> None:
        self._folder = folder
        self._event_log = event_log
        self._written: RunReport | None = None

    async def run(self) -> None:
        """Write whenever the report of a finished run has changed, until cancelled."""
        index = -1
        while True:
            state = self._event_log.state
            if state.is_over and state.index != index:
                index = state.index
                await asyncio.to_thread(self.write)
            await asyncio.sleep(WRITE_SECONDS)

    def write(self) -> None:
        """Write the report of the run so far, unless there is no round or nothing has changed."""
        report = build_host_report(self._event_log.state)
        if not report.rounds or report == self._written:
            return
        try:
            write_report(self._folder, report)
        except StorageError as error:
            logger.warning("the report of the run is not written: %s", error)
            return
        if report.outcome != "running" and (self._written is None or self._written.outcome == "running"):
            logger.info("the run is over; its report is %s", self._folder / REPORT_MARKDOWN)
        self._written = report
