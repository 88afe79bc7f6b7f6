"""Render the end screen: the result of a finished run, the text that its model writes, and the work of each volunteer.

The server renders it, and the script of the page replaces it when its version changes. All text of others is escaped.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from node.daemon.receipts.commit_file import COMMIT_FILE_NAME
from node.dashboard.log_text import short_id
from node.dashboard.page.formats import format_duration, format_number, format_share, format_si
from node.dashboard.report.run_report import OUTCOME_WORDS, REPORT_JSON, REPORT_MARKDOWN, ContributorReport, RunReport
from node.units import format_bytes, format_plural

MAX_SHOWN_CONTRIBUTORS = 100
EMPTY_SECTION = '<section id="end" data-version="" hidden></section>'


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
    figures = [
        ("Validation loss", _render_change(report.initial_validation_loss, report.validation_loss)),
        ("Training loss", _render_change(report.initial_loss, report.loss)),
        ("Tokens", format_si(report.tokens)),
        ("Time in rounds", format_duration(report.seconds)),
        ("Parameters", format_si(report.parameters)),
    ]
    shown = "".join(f"<div><dt>{label}</dt><dd>{text}</dd></div>" for label, text in figures if text)
    return f'<dl class="result">{shown}</dl>'


def _render_change(before: float | None, after: float | None) -> str:
    if after is None:
        return ""
    end = f"<b>{format_number(after, 3)}</b>"
    return end if before is None else f'<span class="from">{format_number(before, 3)} \u2192</span> {end}'


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
    rows = "".join(_render_row(one, largest, has_receipts) for one in contributors[:MAX_SHOWN_CONTRIBUTORS])
    rest = len(contributors) - MAX_SHOWN_CONTRIBUTORS
    more = f'<p class="empty">and {rest:,} more, in the report</p>' if rest > 0 else ""
    titles = ("Share", "Tokens", "Rounds", "Time", "Sent")
    head = "".join(f'<th scope="col" class="n">{title}</th>' for title in titles)
    receipt = '<th scope="col" class="receipt">Receipt</th>' if has_receipts else ""
    return (
        '<h3>Who gave what</h3><div class="wide" tabindex="0" role="region" aria-label="Who gave what">'
        '<table class="given-by"><thead><tr><th scope="col">Name</th>'
        f'<th scope="col"><span class="hidden">Part</span></th>{head}{receipt}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _render_row(one: ContributorReport, largest: float, has_receipts: bool) -> str:
    peer, name = escape(one.peer), escape(one.name or short_id(one.peer))
    bar = f'<svg aria-hidden="true"><rect width="{100 * one.share / largest:.1f}%" height="100%"/></svg>'
    receipt = f'<td class="receipt"><a href="/receipts/{peer}.json">Receipt</a></td>' if has_receipts else ""
    return (
        f'<tr data-peer="{peer}"><td class="name" title="{peer}">{name}</td><td class="part">{bar}</td>'
        f'<td class="n" data-label="share">{format_share(one.share)}</td>'
        f'<td class="n" data-label="tokens">{one.tokens:,}</td>'
        f'<td class="n" data-label="rounds">{one.rounds:,}</td>'
        f'<td class="n" data-label="time">{format_duration(one.seconds)}</td>'
        f'<td class="n" data-label="sent">{format_bytes(one.size)}</td>{receipt}</tr>'
    )
