"""The report of a run as its host saw it, the files that hold it, and the routes that serve it."""

import asyncio
import logging
import shlex
import time
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from node.commands.eval.results import newest_of_each
from node.commands.receipts import receipt_file_name
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.daemon.receipts.receipt import ReceiptIssuer
from node.dashboard.contributors import mean_seconds
from node.dashboard.event_log import EventLog
from node.dashboard.run_report import REPORT_JSON, REPORT_MARKDOWN, ContributorReport, RunReport, write_report
from node.dashboard.state import RunState
from node.paths import read_peer_id
from node.units import format_plural
from protocol.errors import MissingFileError, ReceiptError, StorageError

logger = logging.getLogger(__name__)
WRITE_SECONDS = 2.0  # between two looks whether the report of a finished run has changed
MEASURED_SECONDS = 30.0  # after the end, for the loss of the final model


def build_host_report(state: RunState) -> RunReport:
    """Return the report of the run so far; unknown rounds have the mean duration of the others."""
    rows = list(state.rows)
    facts, last, validations = state.facts, state.rows.last, [row.validation_loss for row in rows]
    measured = [loss for loss in validations if loss is not None]
    measured_rounds = [row.round + 1 for row in rows if row.validation_loss is not None]
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
        validation_round=measured_rounds[-1] if measured else None,
        contributors=_count_contributors(state),
        missing_rounds=state.missing_rounds,
        evaluations=tuple(newest_of_each(state.evaluations)),
        sample=state.sample.prompt + state.sample.text if state.sample else "",
    )


def _count_contributors(state: RunState) -> tuple[ContributorReport, ...]:
    total = state.rows.last.tokens if state.rows.last else 0
    sums = sorted(state.contributors.by_peer.items(), key=lambda item: (-item[1].tokens, -item[1].groups, item[0]))
    return tuple(
        ContributorReport(
            peer=peer,
            name=state.name_of(peer),
            tokens=one.tokens,
            share=one.tokens / total if total else 0.0,
            rounds=one.rounds,
            seconds=round(one.seconds, 1),
            size=one.size,
            groups=one.groups,
        )
        for peer, one in sums
    )


def describe_end(report: RunReport) -> str:
    """Return the end of a run in one line, as `murmur join` prints it."""
    loss = "" if report.validation_loss is None else f", validation loss {report.validation_loss:.3f}"
    if loss and report.validation_round not in (None, report.rounds):
        loss += f" after round {report.validation_round:,}"
    return f"the run is over: round {report.rounds:,}, {report.tokens:,} tokens{loss}"


def end_lines(report: RunReport, folder: Path) -> list[str]:
    """Return the last lines of a host about its run: the end, the report, the model, and its own part if it trained."""
    peer, place = read_peer_id(folder), shlex.quote(str(folder))
    own = [one for one in report.contributors if one.peer == peer]
    return [
        describe_end(report),
        f"its report is {folder / REPORT_MARKDOWN}",
        f"to get the model as a folder: murmur export {place} OUT",
        *(
            f"your part: {one.tokens:,} tokens in {format_plural(one.rounds, 'round')} ({one.share:.1%}); thank you"
            for one in own
        ),
        "the page and the model are served until Ctrl-C",
    ]


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
        self._announce_at: float | None = None
        self._has_announced = False

    async def run(self) -> None:
        """Write whenever the report of a finished run has changed, until cancelled."""
        index = -1
        while True:
            state = self._event_log.state
            if state.is_over and state.index != index:
                index = state.index
                await asyncio.to_thread(self.write)
            if self._written is not None:
                self.announce_end(self._written, time.monotonic())
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
        self._written = report

    def announce_end(self, report: RunReport, now: float) -> None:
        """Print the end once: with the loss of the final model, or without it if nobody measures it for a while."""
        if self._has_announced or report.outcome == "running":
            return
        if self._announce_at is None:
            self._announce_at = now + MEASURED_SECONDS if now < float("inf") else now
        is_measured = report.validation_round == report.rounds
        if not is_measured and now < self._announce_at:
            return
        self._has_announced = True
        for line in end_lines(report, self._folder):
            logger.info("%s", line)

    def close(self) -> None:
        """Write the report of the run so far, and print its end if that is still missing."""
        self.write()
        if self._written is not None:
            self.announce_end(self._written, float("inf"))


def receipt_routes(issuer: ReceiptIssuer) -> list[Route]:
    """Return the routes of a host that keeps the commits of its run."""

    async def overview(_: Request) -> Response:
        return JSONResponse(issuer.overview())

    async def receipt(request: Request) -> Response:
        try:
            found = await issuer.issue(request.path_params["peer"])
        except (MissingFileError, ReceiptError) as error:  # the swarm switches to another chain at this moment
            raise HTTPException(503, f"{error}; try again") from error
        if found is None:
            raise HTTPException(404, "no commit of this run counts work of that peer")
        return Response(found.to_json(), media_type="application/json", headers=attachment(receipt_file_name(found)))

    async def commits(_: Request) -> Response:
        return FileResponse(issuer.path, media_type="application/octet-stream", filename=COMMIT_FILE_NAME)

    return [
        Route("/receipts.json", overview),
        Route("/receipts/{peer}.json", receipt),
        Route(f"/{COMMIT_FILE_NAME}", commits),
    ]


def report_routes(report: CurrentReport) -> list[Route]:
    """Return the routes of the report, which is that of the run so far before its end."""

    async def report_json(_: Request) -> Response:
        return JSONResponse(report.get().model_dump(mode="json"))

    async def report_markdown(_: Request) -> Response:
        return Response(
            report.get().markdown(), media_type="text/markdown; charset=utf-8", headers=attachment(REPORT_MARKDOWN)
        )

    return [Route(f"/{REPORT_JSON}", report_json), Route(f"/{REPORT_MARKDOWN}", report_markdown)]


def attachment(name: str) -> dict[str, str]:
    """Return the header that makes a browser save the answer under `name`, which has only plain characters."""
    return {"content-disposition": f'attachment; filename="{name}"'}
