"""Render the page with the current figures, so that only the charts need JavaScript.

Text from peers is escaped here, and the scripts insert it as text, never as HTML. Styles and scripts come only from
our own files (content security policy), so the widths of bars are SVG attributes, not inline styles.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from node.dashboard.log_text import short_id

ASSETS_DIR = Path(__file__).parent / "assets"
STATIC_DIR = ASSETS_DIR / "static"
SI_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MAX_BROAD_LANES = 8  # lanes that have room for broad bars
ROUNDS_UP_FROM = 0.9995  # of a unit: rounds to 1.00 with three digits
PEER_COLUMNS = 13  # columns of the table of peers
UNKNOWN_TEXT = "-"  # shown for an unknown value
Values = Mapping[str, Any]


@cache
def _load_template() -> Template:
    return Template((ASSETS_DIR / "index.html").read_text())


def render_page(values: Values, join_line: str | None, version: str) -> str:
    """Return the HTML page of `values`, the result of `json_views.snapshot`.

    `join_line` is the command to copy; `None` for a replay, which nobody can join.
    """
    texts = {**_header_texts(values), **_tile_texts(values), "version": version}
    shown = {key: escape(str(value)) for key, value in texts.items()}
    timeline = values["timeline"]
    return _load_template().substitute(
        shown,
        join=_render_join(join_line),
        live="yes" if join_line else "no",
        manifest_link=' · <a href="/run.toml">manifest</a>' if join_line else "",
        hidden_progress="" if values["progress"] is not None else " hidden",
        lane_round="" if timeline["round"] is None else timeline["round"] + 1,
        few=" few" if len(timeline["lanes"]) <= MAX_BROAD_LANES else "",
        lanes=_render_lanes(timeline["lanes"], values["peers"]),
        log="".join(_render_log_line(line) for line in reversed(values["log"])),
        peers=_render_peers(values, join_line),
    )


def _header_texts(values: Values) -> dict[str, object]:
    return {
        "title": values.get("run", "a run"),
        "status": values["status"],
        "tone": values["tone"],
        "notice": values["reason"],
        "parameters": format_si(values.get("parameters", 0)),
        "recipe": values.get("recipe", UNKNOWN_TEXT),
        "round": values["round"],
        "age": format_duration(values["at"] - values["opened"]),
        "organiser": f"Organiser {values.get('organiser', UNKNOWN_TEXT)}, "
        f"fingerprint {values.get('fingerprint', UNKNOWN_TEXT)}",
    }


def _tile_texts(values: Values) -> dict[str, object]:
    size, unit = choose_unit(values["sending"])
    saved, pace, validation = values["saved"], values["round_seconds"], values["validation"]
    return {
        "tokens": format_si(values["tokens"]),
        "progress": _default_if_none(values["progress"], 0),
        "target": format_target(values),
        "loss": format_number(values["loss"], 3),
        "validation": f"validation {format_number(validation, 3)}",
        "speed": format_si(values["tokens_per_second"]),
        "active": values["active"],
        "coming": f"{values['joining']} joining · {values['left_today']} left today",
        "sending": f"{values['sending'] / size:.3g}",
        "sending_unit": f"{unit}B",
        "saved": f"{saved:,.0f}\u00d7 below all-reduce" if saved else "of all peers together",
        "pace": format_number(pace, 1),
        "in_time": f"{values['in_time']} of {values['expected']} in time" if values["expected"] else "no round yet",
    }


def format_target(values: Values) -> str:
    """Return the text below the token count, such as `of 10 G · 2 d left`."""
    tokens, rounds, left = values.get("target_tokens"), values.get("target_rounds"), values["seconds_left"]
    aim = f"of {format_si(tokens)}" if tokens else f"round {values['round']:,} of {rounds:,}" if rounds else "no target"
    return f"{aim} · {format_duration(left)} left" if left else aim


def format_si(value: float) -> str:
    """Format with three digits and an SI prefix: 1840000 gives `1.84 M`."""
    for size, letter in SI_UNITS:
        if value >= ROUNDS_UP_FROM * size:
            return f"{value / size:.3g} {letter}" if value < 1e15 else f"{value / size:.0f} {letter}"
    return f"{value:.3g}"


def choose_unit(largest: float) -> tuple[float, str]:
    """Return the size and letter of the unit for numbers up to `largest`; never below a thousand."""
    return next(((size, letter) for size, letter in SI_UNITS if largest >= size), SI_UNITS[-1])


def format_number(value: float | None, digits: int) -> str:
    return UNKNOWN_TEXT if value is None else f"{value:,.{digits}f}"


def format_duration(seconds: float) -> str:
    """Format with the largest unit and, below ten of it, the next smaller one: `2 d 14 h`, `38 min`."""
    whole = max(0, int(seconds))
    for size, letter, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {letter}" + (f" {rest} {small}" if rest and whole < 10 * size else "")
    return f"{whole} s"


def _default_if_none(value: Any, default: Any) -> Any:
    return default if value is None else value


def _render_join(line: str | None) -> str:
    if line is None:
        return ""
    copy = '<button id="copy" type="button" class="needs-script">Copy</button>'
    return f'<div class="join"><code id="join">{escape(line)}</code>{copy}</div>'


def _longest_seconds(lanes: Sequence[Values]) -> float:
    return max((lane["compute"] + lane["exchange"] + lane["wait"] for lane in lanes), default=0.0) or 1.0


def _render_lanes(lanes: Sequence[Values], peers: Sequence[Values]) -> str:
    longest, names = _longest_seconds(lanes), {peer["peer"]: peer["name"] or peer["short"] for peer in peers}
    return "".join(_render_lane(lane, longest, names.get(lane["peer"]) or short_id(lane["peer"])) for lane in lanes)


def _render_lane(lane: Values, longest: float, name: str) -> str:
    bars, start = "", 0.0
    for kind in ("compute", "exchange", "wait"):
        width = 100 * lane[kind] / longest
        bars += f'<rect class="{kind}" x="{start:.2f}%" width="{width:.2f}%" height="100%"/>'
        start += width
    seconds = lane["compute"] + lane["exchange"] + lane["wait"]
    return (
        f'<div class="lane"><span class="id">{escape(name)}</span><svg aria-hidden="true">{bars}</svg>'
        f'<span class="n">{seconds:.1f}</span></div>'
    )


def _render_log_line(line: Values) -> str:
    clock = time.strftime("%H:%M:%S", time.gmtime(line["at"]))
    return f'<li><time>{clock}</time><span class="{line["tone"]}">{escape(line["text"])}</span></li>'


def _render_peers(values: Values, join_line: str | None) -> str:
    present = [_render_peer(peer, values["at"]) for peer in values["peers"] if peer["gone"] is None]
    if present:
        return "".join(present)
    line = f"No peers visible. Run: {join_line}" if join_line else "No peers."
    return f'<tr><td class="empty" colspan="{PEER_COLUMNS}">{escape(line)}</td></tr>'


def _render_peer(peer: Values, now: float) -> str:
    cells = (
        ("", "id", peer["short"]),
        ("", "name", peer["name"]),
        ("", "", peer["device"]),
        ("", peer["tone"], peer["state"]),
        ("round", "n", peer["round"]),
        ("tokens/s", "n", format_si(peer["tokens_per_second"])),
        ("", "spark needs-script", ""),
        ("loss", "n", format_number(peer["loss"], 3)),
        ("kB/s up", "n", format_number(peer["sending"] / 1e3, 1)),
        ("MB sent", "n", format_number(peer["bytes_sent"] / 1e6, 2)),
        ("", "link", peer["link"]),
        ("included", "n", peer["given"]),
        ("seen", "n", f"{format_duration(now - peer['seen'])}"),
    )
    shown = "".join(f'<td class="{kind}" data-label="{label}">{escape(str(text))}</td>' for label, kind, text in cells)
    return f'<tr data-peer="{escape(peer["peer"])}">{shown}</tr>'
