"""Render the stages of a pipeline: a bar of the rate, and the figures."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from node.dashboard.page.formats import format_number
from node.units import format_plural

Values = Mapping[str, Any]


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
