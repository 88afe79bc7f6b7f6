"""Render the list of the organiser's revisions."""

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

Values = Mapping[str, Any]


def render_revisions(revisions: Sequence[Values]) -> str:
    """Return the section with the revisions, the newest first; hidden while there is none."""
    lines = "".join(_render_line(revision) for revision in reversed(revisions))
    return (
        f'<section id="steering"{"" if revisions else " hidden"}><h2>Changes by the organiser</h2>'
        f'<ol id="revisions" class="log revisions">{lines}</ol></section>'
    )


def _render_line(revision: Values) -> str:
    written = time.strftime("%Y-%m-%d %H:%M", time.gmtime(revision["time"]))
    return f"<li><time>{written}</time><span>{escape(revision['text'])}</span></li>"
