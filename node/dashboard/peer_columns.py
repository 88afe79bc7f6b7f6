"""The columns of the table of peers: one list, from which the server and the script render all rows.

A column shows `key` of `json_views.peer_values`. To add a figure, put it there and add a row here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from node.units import (
    UNKNOWN_TEXT,
    format_duration,
    format_number,
    format_share,
    format_short,
    format_si,
)

Format = Literal["text", "state", "count", "si", "short", "decimal", "share", "age", "spark"]
View = Literal["", "now", "given"]  # shown always, among the live figures, or among those of the whole run
TEXT_FORMATS = ("text", "state", "spark")
Values = Mapping[str, Any]


@dataclass(frozen=True)
class PeerColumn:
    """A column; it shows `value / unit` with `digits` decimals, and `label` before the value in stacked rows.

    An unknown value of a column that is `optional` is left empty, and a column without any is hidden.
    """

    key: str
    title: str
    format: Format = "text"
    view: View = ""
    label: str = ""
    digits: int = 0
    unit: float = 1.0
    optional: bool = False

    @property
    def css(self) -> str:
        kind = self.key if self.format in TEXT_FORMATS else "n"
        return " ".join(filter(None, (kind, self.view, "needs-script" if self.format == "spark" else "")))


PEER_COLUMNS = (
    PeerColumn("short", "Peer"),
    PeerColumn("name", "Name"),
    PeerColumn("device", "Device"),
    PeerColumn("state", "State", "state"),
    PeerColumn("stage", "Stage", "count", "now", "stage", optional=True),
    PeerColumn("round", "Round", "count", "now", "round"),
    PeerColumn("tokens_per_second", "tokens/s", "si", "now", "tokens/s"),
    PeerColumn("speeds", "Recent speed", "spark", "now"),
    PeerColumn("loss", "Loss", "decimal", "now", "loss", digits=3),
    PeerColumn("reward", "Reward", "decimal", "now", "reward", digits=3, optional=True),
    PeerColumn("rollouts", "Groups", "count", "now", "groups", optional=True),
    PeerColumn("learning_rate", "Rate", "short", "now", "rate"),
    PeerColumn("gradient_norm", "Gradient", "short", "now", "gradient"),
    PeerColumn("device_use", "GPU", "share", "now", "GPU", optional=True),
    PeerColumn("device_memory", "GPU GB", "decimal", "now", "GPU GB", digits=1, unit=1e9, optional=True),
    PeerColumn("sending", "kB/s up", "decimal", "now", "kB/s up", digits=1, unit=1e3),
    PeerColumn("receiving", "kB/s down", "decimal", "now", "kB/s down", digits=1, unit=1e3),
    PeerColumn("seen", "Seen", "age", "now", "seen"),
    PeerColumn("given_tokens", "Tokens", "si", "given", "tokens"),
    PeerColumn("share", "Share", "share", "given", "share"),
    PeerColumn("given_seconds", "Hours", "decimal", "given", "hours", digits=1, unit=3600.0),
    PeerColumn("given_rounds", "Rounds", "count", "given", "rounds"),
    PeerColumn("accepted", "In time", "share", "given", "in time"),
    PeerColumn("bytes_sent", "MB sent", "decimal", "given", "MB sent", digits=2, unit=1e6),
    PeerColumn("link", "Link", "text", "given"),
)


def render_head() -> str:
    """Return the header cells; the script reads the columns from their attributes."""
    return "".join(_render_header(column) for column in PEER_COLUMNS)


def _render_header(column: PeerColumn) -> str:
    title = escape(column.title)
    inside = (
        f'<span class="hidden">{title}</span>'
        if column.format == "spark"
        else f'<button type="button" class="plain">{title}</button>'
    )
    return (
        f'<th scope="col" class="{column.css}" data-key="{column.key}" data-format="{column.format}" '
        f'data-digits="{column.digits}" data-unit="{column.unit:g}" data-label="{escape(column.label)}" '
        f'data-optional="{"yes" if column.optional else "no"}">{inside}</th>'
    )


def render_row(peer: Values, now: float) -> str:
    """Return the row of one peer, a value of `json_views.peer_values`."""
    cells = "".join(_render_cell(column, peer, now) for column in PEER_COLUMNS)
    return f'<tr data-peer="{escape(peer["peer"])}">{cells}</tr>'


def _render_cell(column: PeerColumn, peer: Values, now: float) -> str:
    css = f"{column.css} {peer['tone']}" if column.format == "state" else column.css
    text = escape(format_value(column, peer.get(column.key), now))
    return f'<td class="{css}" data-label="{escape(column.label)}">{text}</td>'


def format_value(column: PeerColumn, value: Any, now: float) -> str:
    """Return the text of a value in this column."""
    if value is None and column.optional:
        return ""
    return _FORMATTERS[column.format](column, value, now)


def _format_decimal(column: PeerColumn, value: Any, now: float) -> str:
    return UNKNOWN_TEXT if value is None else format_number(value / column.unit, column.digits)


_FORMATTERS: dict[Format, Callable[[PeerColumn, Any, float], str]] = {
    "text": lambda column, value, now: str(value),
    "state": lambda column, value, now: str(value),
    "spark": lambda column, value, now: "",
    "count": lambda column, value, now: format_number(value, 0),
    "si": lambda column, value, now: UNKNOWN_TEXT if value is None else format_si(value),
    "short": lambda column, value, now: format_short(value),
    "decimal": _format_decimal,
    "share": lambda column, value, now: format_share(value),
    "age": lambda column, value, now: format_duration(int(now - value)),
}
