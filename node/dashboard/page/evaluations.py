"""Render the table of results of `murmur eval`. The script evaluations.js makes the same one."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

HEADINGS: Final = {"Task": "", "Metric": "", "Value": "n", "\u00b1": "n", "First": "n", "Over tokens": "", "Round": "n"}
Values = Mapping[str, Any]


def render_evaluations(rows: Sequence[Values]) -> str:
    """Return the section; hidden while there is no result."""
    head = "".join(f'<th scope="col" class="{kind}">{heading}</th>' for heading, kind in HEADINGS.items())
    return (
        f'<section id="evaluations"{"" if rows else " hidden"}><h2>Evaluations</h2>'
        '<div class="wide" tabindex="0" role="region" aria-label="Evaluations"><table>'
        f"<thead><tr>{head}</tr></thead>"
        f'<tbody id="results">{"".join(map(_render_row, rows))}</tbody></table></div></section>'
    )


def _render_row(row: Values) -> str:
    error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
    before = "" if row["first"] == row["value"] else f"{row['first']:.4f}"
    number = "" if row["round"] is None else f"{row['round']}"
    line = f'<polyline points="{escape(row["points"])}"/>' if row["points"] else ""
    course = f'<svg class="course" viewBox="-2 -2 104 24" aria-hidden="true">{line}</svg>'
    return (
        f'<tr><td>{escape(row["task"])}</td><td>{escape(row["metric"])}</td><td class="n">{row["value"]:.4f}</td>'
        f'<td class="n">{error}</td><td class="n">{before}</td><td>{course}</td><td class="n">{number}</td></tr>'
    )
