"""The report of a run: its figures, and the words for people on a terminal, in Markdown and on the page.

`report.json` holds the figures, `report.md` the words. Names and samples come from other people: they are sanitized
where they are printed, and escaped in Markdown and HTML. The server renders the end screen, and the script of the page
replaces it when its version changes.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from node.commands.eval.results import RESULT_HEADINGS, Result, result_rows
from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.dashboard.log_text import short_id
from node.monitoring.logs import sanitize
from node.units import format_bytes, format_duration, format_number, format_plural, format_share
from protocol.files import write_atomically
from protocol.identity import PeerId

REPORT_JSON, REPORT_MARKDOWN = "report.json", "report.md"
Outcome = Literal["done", "stopped", "running"]
OUTCOME_WORDS: dict[Outcome, str] = {
    "done": "The run has reached its target.",
    "stopped": "The organiser has stopped the run.",
    "running": "The run is under way; these are the figures so far.",
}
MARKDOWN_SPECIAL = r"\`*_[]<#|~&"  # the rest means nothing in the middle of a line
CONTRIBUTOR_HEADINGS = ("tokens", "share", "rounds", "time", "sent")
ROLLOUT_HEADINGS = (*CONTRIBUTOR_HEADINGS, "groups")
MAX_SHOWN_CONTRIBUTORS = 100
EMPTY_SECTION = '<section id="end" data-version="" hidden></section>'


class Figure(NamedTuple):
    """One figure of a report, and its meaning.

    `before` is its value at the beginning, and the page leaves the `note` out.
    """

    label: str
    value: str
    before: str = ""
    note: str = ""
    meaning: str = ""

    @property
    def text(self) -> str:
        start = f"{self.before} -> " if self.before else ""
        return f"{start}{self.value}{self.note}{self.meaning and f', {self.meaning}'}"


class ReportModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ContributorReport(ReportModel):
    """The counted work of one peer; `seconds` are those of the rounds that include it."""

    peer: PeerId
    name: str
    tokens: int
    share: float = Field(description="of the run's tokens, from 0 to 1")
    rounds: int
    seconds: float
    size: int = Field(description="bytes of its counted contributions")
    groups: int = Field(default=0, description="of its rollouts, from which trainers learned")

    def cells(self) -> dict[str, str]:
        """Return the text below each heading."""
        return {
            "tokens": f"{self.tokens:,}",
            "share": format_share(self.share),
            "rounds": f"{self.rounds:,}",
            "time": format_duration(self.seconds),
            "sent": format_bytes(self.size),
            "groups": f"{self.groups:,}",
        }


class RunReport(ReportModel):
    """The figures of a run; losses are in nats per token, and `None` means that nobody measured it."""

    run: str
    run_id: str
    recipe: str
    outcome: Outcome = "done"
    parameters: int
    tokens: int
    rounds: int
    seconds: float = Field(description="of the rounds together, without the time before the first peers came")
    initial_loss: float | None = None
    loss: float | None = None
    initial_validation_loss: float | None = None
    validation_loss: float | None = None
    validation_round: int | None = Field(default=None, description="rounds of the model that was measured")
    contributors: tuple[ContributorReport, ...] = ()
    missing_rounds: int = 0
    evaluations: tuple[Result, ...] = Field(default=(), description="the newest result of each metric of `murmur eval`")
    sample: str = Field(default="", description="text of the final model, beginning with the prompt")

    def figures(self) -> list[Figure]:
        """Return the figures that are known, for the terminal, for Markdown and for the page."""
        missing = f", {self.missing_rounds:,} of them unknown to the host" if self.missing_rounds else ""
        figures = (
            Figure("tokens", f"{self.tokens:,}", note=f" in {format_plural(self.rounds, 'round')}{missing}"),
            Figure("time in rounds", format_duration(self.seconds)),
            _loss_figure("training loss", self.initial_loss, self.loss, "of the peers' own weights"),
            _loss_figure("validation loss", self.initial_validation_loss, self.validation_loss, self._measured_on()),
            Figure("parameters", f"{self.parameters:,}"),
        )
        return [figure for figure in figures if figure.value]

    def _measured_on(self) -> str:
        """Return the words for the model whose validation loss the report has."""
        is_final = self.validation_round in (None, self.rounds)
        return "of the shared model" + ("" if is_final else f" after round {self.validation_round:,}")

    def lines(self) -> list[str]:
        """Return the report for a terminal."""
        sample = sanitize(self.sample, allowed="\n").splitlines()
        return [
            *(f"{figure.label:<17}{figure.text}" for figure in self.figures()),
            *(["sample", *(f"    {line}" for line in sample)] if sample else ()),
        ]

    def markdown(self) -> str:
        """Return the report as a Markdown page."""
        figures = [Figure("recipe", self.recipe), *self.figures()]
        rows = "".join(f"| {figure.label} | {escape_markdown(figure.text)} |\n" for figure in figures)
        parts = [
            f"# {escape_markdown(self.run)}\n\n{OUTCOME_WORDS[self.outcome]}\n\n",
            f"| figure | value |\n|---|---|\n| run | `{self.run_id}` |\n{rows}",
        ]
        if self.contributors:
            parts.append(f"\n## Who gave what\n\n{self._contributor_table()}")
        if self.evaluations:
            parts.append(f"\n## Evaluations\n\n{self._evaluation_table()}")
        if self.sample:
            text = "".join(f"    {line}\n" for line in sanitize(self.sample, allowed="\n").splitlines())
            parts.append(f"\n## Text that the model writes\n\n{text}")
        return "".join(parts)

    def _evaluation_table(self) -> str:
        head = f"| {' | '.join(RESULT_HEADINGS)} |\n|---|---|{'---:|' * (len(RESULT_HEADINGS) - 2)}\n"
        rows = result_rows(self.evaluations)
        return head + "".join(f"| {' | '.join(map(escape_markdown, row))} |\n" for row in rows)

    def _contributor_table(self) -> str:
        headings = _headings_of(self.contributors)
        head = f"| name | {' | '.join(headings)} | peer |\n|---|{'---:|' * len(headings)}---|\n"
        rows = [(one, [one.cells()[heading] for heading in headings]) for one in self.contributors]
        return head + "".join(
            f"| {escape_markdown(one.name)} | {' | '.join(cells)} | `{one.peer}` |\n" for one, cells in rows
        )


def _headings_of(contributors: Sequence[ContributorReport]) -> tuple[str, ...]:
    """Return the headings of their table; groups only where somebody drew some."""
    return ROLLOUT_HEADINGS if any(one.groups for one in contributors) else CONTRIBUTOR_HEADINGS


def _loss_figure(label: str, before: float | None, after: float | None, meaning: str) -> Figure:
    """Return how a loss changed, with its meaning; without a value if it is not known."""
    if after is None:
        return Figure(label, "")
    start = "" if before is None else format_number(before, 3)
    return Figure(label, format_number(after, 3), start, " nats per token", meaning)


def escape_markdown(text: str) -> str:
    """Return text that Markdown shows as it is, on one line."""
    return "".join(f"\\{char}" if char in MARKDOWN_SPECIAL else char for char in sanitize(text))


def write_report(folder: Path, report: RunReport) -> None:
    """Write the report as JSON and as Markdown. Raises StorageError."""
    write_atomically(folder / REPORT_JSON, report.model_dump_json(indent=2).encode() + b"\n")
    write_atomically(folder / REPORT_MARKDOWN, report.markdown().encode())


def render_end(report: RunReport | None, values: Mapping[str, Any], has_receipts: bool) -> str:
    """Return the section; it is hidden while the run goes on, for which `report` is `None`."""
    if report is None:
        return EMPTY_SECTION
    ending = "has ended" if report.outcome == "stopped" else "is complete"
    return (
        f'<section id="end" class="end" data-version="{escape(version_of(values))}">'
        f"<h2>{escape(report.run)} {ending}</h2><p>{_describe(report)}</p>"
        f"{_render_figures(report)}{_render_links(values, has_receipts)}{_render_sample(report)}"
        f"{_render_contributors(report.contributors, has_receipts)}</section>"
    )


def version_of(values: Mapping[str, Any]) -> str:
    """Return a text that changes with the content of the section, as `static/end.js` makes it too."""
    model = values.get("model")
    return f"{values['end_version']}/{model['round'] if model else ''}" if values["end_version"] else ""


def _describe(report: RunReport) -> str:
    people = format_plural(len(report.contributors), "volunteer")
    missing = (
        f" The host does not know {format_plural(report.missing_rounds, 'round')}." if report.missing_rounds else ""
    )
    return (
        f"{OUTCOME_WORDS[report.outcome]} {people} gave {report.tokens:,} tokens "
        f"in {format_plural(report.rounds, 'round')}.{missing}"
    )


def _render_figures(report: RunReport) -> str:
    shown = "".join(
        f"<div><dt>{escape(figure.label.capitalize())}</dt><dd>{_render_value(figure)}</dd></div>"
        for figure in report.figures()
    )
    return f'<dl class="result">{shown}</dl>'


def _render_value(figure: Figure) -> str:
    value = escape(figure.value)
    shown = f'<span class="from">{escape(figure.before)} \u2192</span> <b>{value}</b>' if figure.before else value
    return f"{shown}<small>{escape(figure.meaning)}</small>" if figure.meaning else shown


def _render_links(values: Mapping[str, Any], has_receipts: bool) -> str:
    model = values.get("model")
    links = [
        *([("/model", f"Download the model ({format_bytes(model['size'])})", "main")] if model else ()),
        (f"/{REPORT_MARKDOWN}", "Report", ""),
        (f"/{REPORT_JSON}", "Report as JSON", ""),
        *([(f"/{COMMIT_FILE_NAME}", "Signed commits", "")] if has_receipts else ()),
    ]
    shown = "".join(f'<a class="{kind}" href="{escape(path)}">{text}</a>' for path, text, kind in links)
    return f'<p class="links">{shown}</p>'


def _render_sample(report: RunReport) -> str:
    if not report.sample:
        return ""
    return f"<h3>Text that the model writes</h3><pre>{escape(report.sample)}</pre>"


def _render_contributors(contributors: Sequence[ContributorReport], has_receipts: bool) -> str:
    if not contributors:
        return ""
    largest = max(one.share for one in contributors) or 1.0
    headings = _headings_of(contributors)
    rows = "".join(_render_row(one, headings, largest, has_receipts) for one in contributors[:MAX_SHOWN_CONTRIBUTORS])
    rest = len(contributors) - MAX_SHOWN_CONTRIBUTORS
    more = f'<p class="empty">and {rest:,} more, in the report</p>' if rest > 0 else ""
    head = "".join(f'<th scope="col" class="n">{heading.capitalize()}</th>' for heading in headings)
    receipt = '<th scope="col" class="receipt">Receipt</th>' if has_receipts else ""
    return (
        '<h3>Who gave what</h3><div class="wide" tabindex="0" role="region" aria-label="Who gave what">'
        '<table class="given-by"><thead><tr><th scope="col">Name</th>'
        f'<th scope="col"><span class="hidden">Part</span></th>{head}{receipt}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _render_row(one: ContributorReport, headings: Sequence[str], largest: float, has_receipts: bool) -> str:
    peer, name = escape(one.peer), escape(one.name or short_id(one.peer))
    bar = f'<svg aria-hidden="true"><rect width="{100 * one.share / largest:.1f}%" height="100%"/></svg>'
    cells = "".join(f'<td class="n" data-label="{heading}">{one.cells()[heading]}</td>' for heading in headings)
    receipt = f'<td class="receipt"><a href="/receipts/{peer}.json">Receipt</a></td>' if has_receipts else ""
    return (
        f'<tr data-peer="{peer}"><td class="name" title="{peer}">{name}</td><td class="part">{bar}</td>'
        f"{cells}{receipt}</tr>"
    )
