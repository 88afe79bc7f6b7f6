"""The page as it is sent: the current figures are in it, so that it tells everything but the charts without JavaScript.

Whatever peers say is escaped here, and is text, never HTML, in the scripts. Styles and scripts come from our own files
alone (content security policy), so widths stand in attributes of SVG.
"""

import time
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from node.host.words import short

FOLDER = Path(__file__).parent / "page"
STATIC = FOLDER / "static"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
FEW_LANES = 8  # that have room for broad bars
ROUNDED_UP = 0.9995  # of a unit: to three digits that is a whole one
COLUMNS = 13  # of the table of peers
NONE = "-"  # shown where nothing is known
Values = Mapping[str, Any]


@cache
def _template() -> Template:
    return Template((FOLDER / "index.html").read_text())


def render(values: Values, join: str | None, version: str) -> str:
    """`values`: of `views.snapshot`; `join`: the line to copy, None where there is nothing to join."""
    texts = {**_header(values), **_tiles(values), "version": version}
    shown = {key: escape(str(value)) for key, value in texts.items()}
    timeline = values["timeline"]
    return _template().substitute(
        shown,
        join=_join(join),
        live="yes" if join else "no",
        manifest_link=' · <a href="/run.toml">manifest</a>' if join else "",
        hidden_progress="" if values["progress"] is not None else " hidden",
        lane_round="" if timeline["round"] is None else timeline["round"] + 1,
        few=" few" if len(timeline["lanes"]) <= FEW_LANES else "",
        lanes=_lanes(timeline["lanes"], values["peers"]),
        log="".join(_line(line) for line in reversed(values["log"])),
        peers=_rows(values, join),
    )


def _header(values: Values) -> dict[str, object]:
    return {
        "title": values.get("run", "a run"),
        "status": values["status"],
        "tone": values["tone"],
        "notice": values["reason"],
        "parameters": si(values.get("parameters", 0)),
        "recipe": values.get("recipe", NONE),
        "round": values["round"],
        "age": duration(values["at"] - values["opened"]),
        "organiser": f"Organiser {values.get('organiser', NONE)}, fingerprint {values.get('fingerprint', NONE)}",
    }


def _tiles(values: Values) -> dict[str, object]:
    size, unit = unit_of(values["sending"])
    saved, pace, validation = values["saved"], values["round_seconds"], values["validation"]
    return {
        "tokens": si(values["tokens"]),
        "progress": _or(values["progress"], 0),
        "target": target(values),
        "loss": number(values["loss"], 3),
        "validation": f"validation {number(validation, 3)}",
        "speed": si(values["tokens_per_second"]),
        "active": values["active"],
        "coming": f"{values['joining']} joining · {values['left_today']} left today",
        "sending": f"{values['sending'] / size:.3g}",
        "sending_unit": f"{unit}B",
        "saved": f"{saved:,.0f}\u00d7 below all-reduce" if saved else "of all peers together",
        "pace": number(pace, 1),
        "in_time": f"{values['in_time']} of {values['expected']} in time" if values["expected"] else "no round yet",
    }


def target(values: Values) -> str:
    """`of 10 G · 2 d left`"""
    tokens, rounds, left = values.get("target_tokens"), values.get("target_rounds"), values["seconds_left"]
    aim = f"of {si(tokens)}" if tokens else f"round {values['round']:,} of {rounds:,}" if rounds else "no target"
    return f"{aim} · {duration(left)} left" if left else aim


def si(value: float) -> str:
    """1840000 -> 1.84 M"""
    for size, letter in UNITS:
        if value >= ROUNDED_UP * size:
            return f"{value / size:.3g} {letter}" if value < 1e15 else f"{value / size:.0f} {letter}"
    return f"{value:.3g}"


def unit_of(largest: float) -> tuple[float, str]:
    """The size and letter in which numbers up to `largest` are told; never below a thousand."""
    return next(((size, letter) for size, letter in UNITS if largest >= size), UNITS[-1])


def number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """The largest unit, and the next where it tells something: `2 d 14 h`, `38 min`."""
    whole = max(0, int(seconds))
    for size, letter, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {letter}" + (f" {rest} {small}" if rest and whole < 10 * size else "")
    return f"{whole} s"


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _join(line: str | None) -> str:
    if line is None:
        return ""
    copy = '<button id="copy" type="button" class="needs-script">Copy</button>'
    return f'<div class="join"><code id="join">{escape(line)}</code>{copy}</div>'


def _longest(lanes: Sequence[Values]) -> float:
    return max((lane["compute"] + lane["exchange"] + lane["wait"] for lane in lanes), default=0.0) or 1.0


def _lanes(lanes: Sequence[Values], peers: Sequence[Values]) -> str:
    longest, names = _longest(lanes), {peer["peer"]: peer["name"] or peer["short"] for peer in peers}
    return "".join(_lane(lane, longest, names.get(lane["peer"]) or short(lane["peer"])) for lane in lanes)


def _lane(lane: Values, longest: float, name: str) -> str:
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


def _line(line: Values) -> str:
    clock = time.strftime("%H:%M:%S", time.gmtime(line["at"]))
    return f'<li><time>{clock}</time><span class="{line["tone"]}">{escape(line["text"])}</span></li>'


def _rows(values: Values, join: str | None) -> str:
    present = [_row(peer, values["at"]) for peer in values["peers"] if peer["gone"] is None]
    if present:
        return "".join(present)
    line = f"No peer is in sight. Run: {join}" if join else "No peers."
    return f'<tr><td class="empty" colspan="{COLUMNS}">{escape(line)}</td></tr>'


def _row(peer: Values, now: float) -> str:
    cells = (
        ("", "id", peer["short"]),
        ("", "name", peer["name"]),
        ("", "", peer["device"]),
        ("", peer["tone"], peer["state"]),
        ("round", "n", peer["round"]),
        ("tokens/s", "n", si(peer["tokens_per_second"])),
        ("", "spark needs-script", ""),
        ("loss", "n", number(peer["loss"], 3)),
        ("kB/s up", "n", number(peer["sending"] / 1e3, 1)),
        ("MB sent", "n", number(peer["bytes_sent"] / 1e6, 2)),
        ("", "link", peer["link"]),
        ("given", "n", peer["given"]),
        ("seen", "n", f"{duration(now - peer['seen'])}"),
    )
    shown = "".join(f'<td class="{kind}" data-label="{label}">{escape(str(text))}</td>' for label, kind, text in cells)
    return f'<tr data-peer="{escape(peer["peer"])}">{shown}</tr>'
