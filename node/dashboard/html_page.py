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
from typing import Any, Final

from node.dashboard.log_text import short_id
from node.dashboard.peer_columns import PEER_COLUMNS, render_head, render_row
from node.dashboard.run_report import EMPTY_SECTION
from node.units import UNKNOWN_TEXT, choose_unit, format_duration, format_number, format_plural, format_si

ASSETS_DIR = Path(__file__).parent / "assets"
STATIC_DIR = ASSETS_DIR / "static"
MAX_BROAD_LANES = 8  # lanes that have room for broad bars
WEB_ADDRESS_PREFIXES = ("https://", "http://")
Values = Mapping[str, Any]
NO_ROUND: Final = '<p class="empty no-round needs-script">The first round is not finished yet.</p>'
RESULT_COLUMNS: Final = {
    "Task": "",
    "Metric": "",
    "Value": "n",
    "\u00b1": "n",
    "First": "n",
    "Over tokens": "",
    "Round": "n",
}


@cache
def _load_template() -> Template:
    return Template((ASSETS_DIR / "index.html").read_text(encoding="utf-8"))


def render_page(values: Values, join_line: str | None, version: str, end: str = EMPTY_SECTION) -> str:
    """Return the HTML page of `values`, the result of `json_views.snapshot`.

    Args:
        values: the figures.
        join_line: the command to copy; `None` for a replay, which nobody can join.
        version: of the program.
        end: the HTML of the end screen.
    """
    texts = {**_header_texts(values), **_tile_texts(values), "version": version}
    shown = {key: escape(str(value)) for key, value in texts.items()}
    timeline = values["timeline"]
    return _load_template().substitute(
        shown,
        join=_render_join(join_line),
        live="yes" if join_line else "no",
        over="yes" if values["end_version"] else "no",
        end=end,
        manifest_link=' · <a href="/run.toml">manifest</a>' if join_line else "",
        no_round="" if values["round"] else NO_ROUND,
        hidden_progress="" if values["progress"] is not None else " hidden",
        lane_round="" if timeline["round"] is None else timeline["round"] + 1,
        few=" few" if len(timeline["lanes"]) <= MAX_BROAD_LANES else "",
        lanes=_render_lanes(timeline["lanes"], values["peers"]),
        log="".join(_render_log_line(line) for line in reversed(values["log"])),
        peers=_render_peers(values, join_line),
        peers_head=render_head(),
        about=_render_about(values.get("about", {})),
        warnings=_render_warnings(values["warnings"]),
        sample=_render_sample(values["sample"]),
        model=_render_model(values.get("model")),
        cut="yes" if values["stages"] else "no",
        stages=render_stages(values["stages"], values["microbatches"]),
        steering=render_revisions(values["revisions"]),
        evaluations=render_evaluations(values["evaluations"]),
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
        "age": format_duration(int(values["at"] - values["opened"])),
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
        "validation": _describe_validation(validation, values["validation_by_source"], values["reward"]),
        "speed": format_si(values["tokens_per_second"]),
        "active": values["active"],
        "coming": f"{values['joining']} joining · {values['left_today']} left today",
        "sending": f"{values['sending'] / size:.3g}",
        "sending_unit": f"{unit}B",
        "saved": f"{saved:,.0f}\u00d7 below all-reduce" if saved else "of all peers together",
        "pace": format_number(pace, 1),
        "in_time": _describe_in_time(values),
    }


def _describe_validation(loss: float | None, by_source: Mapping[str, float], reward: float | None) -> str:
    """Return the text below the training loss, which the script writes too: its meaning, the validation loss."""
    validation = f"validation {format_number(loss, 3)}{_describe_sources(by_source)}"
    meaning = "of the peers' own weights" if reward is None else "the entropy of answers, while scores are learned"
    return f"{meaning}; of the shared model: {validation}"


def _describe_sources(losses: Mapping[str, float]) -> str:
    """Return the validation losses of the sources of a mixture in brackets; empty for a single source."""
    words = ", ".join(f"{name} {format_number(loss, 3)}" for name, loss in losses.items())
    return f" ({words})" if words else ""


def _describe_in_time(values: Values) -> str:
    if not values["round"]:
        return "no round yet"
    where = " at the last stage" if values["stages"] else ""
    return f"{values['in_time']} of {values['expected']} in time{where}"


def format_target(values: Values) -> str:
    """Return the text below the token count, such as `of 10 G · 2 d left`."""
    tokens, rounds, left = values.get("target_tokens"), values.get("target_rounds"), values["seconds_left"]
    aim = f"of {format_si(tokens)}" if tokens else f"round {values['round']:,} of {rounds:,}" if rounds else "no target"
    return f"{aim} · {format_duration(left)} left" if left else aim


def _default_if_none(value: Any, default: Any) -> Any:
    return default if value is None else value


def _render_about(about: Values) -> str:
    """Return the organiser's facts about the run; they are escaped, and only a web address is a link."""
    facts = [
        ("Data", about.get("data") or about.get("source")),
        ("Organiser", about.get("organiser")),
        ("Licence", about.get("licence")),
    ]
    items = [f"<div><dt>{term}</dt><dd>{escape(text)}</dd></div>" for term, text in facts if text]
    url = about.get("url", "")
    if url.startswith(WEB_ADDRESS_PREFIXES):
        link = f'<a href="{escape(url)}" rel="noopener noreferrer">{escape(url)}</a>'
        items.append(f"<div><dt>More</dt><dd>{link}</dd></div>")
    description = about.get("description")
    text = f'<p class="description">{escape(description)}</p>' if description else ""
    return text + (f'<dl class="about">{"".join(items)}</dl>' if items else "")


def _render_warnings(warnings: Sequence[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in warnings)


def _render_sample(sample: Values | None) -> str:
    """Return the sample; the page hides the section while there is none."""
    if sample is None:
        return '<section id="sample" hidden><h2></h2><pre></pre></section>'
    return (
        f'<section id="sample"><h2>Text that the model writes after round {sample["round"]}</h2>'
        f"<pre><b>{escape(sample['prompt'])}</b>{escape(sample['text'])}</pre></section>"
    )


def _render_model(model: Values | None) -> str:
    if model is None:
        return '<p id="model" class="model" hidden></p>'
    which = "The final model" if model["is_final"] else "The model"
    text = f"{which}, after round {model['round']:,} ({format_si(model['size'])}B)"
    return f'<p id="model" class="model">{text}: <a href="/model">download</a></p>'


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
    is_done = bool(values["end_version"])
    present = [render_row(peer, values["at"]) for peer in values["peers"] if is_done or peer["gone"] is None]
    if present:
        return "".join(present)
    line = f"No peers visible. Run: {join_line}" if join_line else "No peers."
    return f'<tr><td class="empty" colspan="{len(PEER_COLUMNS)}">{escape(line)}</td></tr>'


def render_revisions(revisions: Sequence[Values]) -> str:
    """Return the section with the revisions, the newest first; hidden while there is none."""
    lines = "".join(_render_revision(revision) for revision in reversed(revisions))
    return (
        f'<section id="steering"{"" if revisions else " hidden"}><h2>Changes by the organiser</h2>'
        f'<ol id="revisions" class="log revisions">{lines}</ol></section>'
    )


def _render_revision(revision: Values) -> str:
    written = time.strftime("%Y-%m-%d %H:%M", time.gmtime(revision["time"]))
    return f"<li><time>{written}</time><span>{escape(revision['text'])}</span></li>"


def render_stages(stages: Sequence[Values], microbatches: Mapping[str, int]) -> str:
    """Return the section with a row for each stage; hidden for a model that is not cut."""
    rows = "".join(_render_stage(stage) for stage in stages)
    return (
        f'<section id="stages"{"" if stages else " hidden"}><h2>Stages of the model</h2>'
        f'<div id="stage-rows" class="lanes few stages">{rows}</div>'
        f'<p id="microbatches" class="legend">{escape(describe_microbatches(microbatches))}</p></section>'
    )


def _render_stage(stage: Values) -> str:
    bar = f'<rect class="compute" x="0%" width="{100 * stage["share"]:.2f}%" height="100%"/>'
    return (
        f'<div class="lane{"" if stage["peers"] else " late"}"><span class="id">stage {stage["stage"]}</span>'
        f'<svg aria-hidden="true">{bar}</svg><span class="n">{escape(describe_stage(stage))}</span></div>'
    )


def describe_microbatches(counts: Mapping[str, int]) -> str:
    """Return the owners' microbatches by result, the most frequent first; the script writes the same."""
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])
    return "Microbatches: " + (", ".join(f"{word} {count:,}" for word, count in ordered if count) or "none yet")


def describe_stage(stage: Values) -> str:
    """Return the figures of a stage; the script writes the same."""
    if not stage["peers"]:
        return "nobody serves it"
    rate = f"{format_number(stage['rate'], 1)} microbatches/s"
    return f"{format_plural(stage['peers'], 'peer')} · {rate} · round {stage['round']:,}"


def render_evaluations(rows: Sequence[Values]) -> str:
    """Return the section; hidden while there is no result."""
    head = "".join(f'<th scope="col" class="{kind}">{heading}</th>' for heading, kind in RESULT_COLUMNS.items())
    return (
        f'<section id="evaluations"{"" if rows else " hidden"}><h2>Evaluations</h2>'
        '<div class="wide" tabindex="0" role="region" aria-label="Evaluations"><table>'
        f"<thead><tr>{head}</tr></thead>"
        f'<tbody id="results">{"".join(map(_render_result, rows))}</tbody></table></div></section>'
    )


def _render_result(row: Values) -> str:
    error = "" if row["standard_error"] is None else f"{row['standard_error']:.4f}"
    before = "" if row["first"] == row["value"] else f"{row['first']:.4f}"
    number = "" if row["round"] is None else f"{row['round']}"
    line = f'<polyline points="{escape(row["points"])}"/>' if row["points"] else ""
    course = f'<svg class="course" viewBox="-2 -2 104 24" aria-hidden="true">{line}</svg>'
    return (
        f'<tr><td>{escape(row["task"])}</td><td>{escape(row["metric"])}</td><td class="n">{row["value"]:.4f}</td>'
        f'<td class="n">{error}</td><td class="n">{before}</td><td>{course}</td><td class="n">{number}</td></tr>'
    )
