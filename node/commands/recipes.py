"""`murmur recipes`: print the table of methods, or one method in full."""

import dataclasses
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from node.from_manifest import topology_class
from node.model import shape_table
from node.monitoring.status_line import activity
from node.monitoring.tables import choose_columns, describe_left_out, table_console
from node.paths import demo_manifest
from node.trainer.ipc.shared_memory import locally_trained_names
from optim.aggregation.filtered import Filtered
from optim.compatibility import ROBUST
from optim.compose import COMPONENTS, compose
from optim.errors import OptimError
from optim.method import SMALL_SLOTS, Method
from optim.options import OptionValue, Scalar
from optim.recipes import RECIPES, OptionTable
from optim.round_plan import RoundPlanner
from optim.schedules.option_schedules import as_toml
from protocol.errors import UsageError
from protocol.manifest.reading import load_manifest

FLOAT_BYTES = 4
DEFAULT_PARTS = {"inner": "adamw", "signal": "pseudo-gradient", "aggregate": "mean", "adoption": "carry"}
NEEDS = {
    "anchor": "all peers hold the same weights between rounds",
    "partner": "each peer has its own weights and exchanges with a few other peers per round",
    "fates": "a peer learns whether its contribution was included, and sends it again if not",
}
COLUMNS = ("name", "message", "topology", "aggregate", "update", "inner steps", "bits", "bytes", "needs", "paper")
EXPENDABLE = ("paper", "needs", "bytes", "inner steps", "aggregate", "update", "topology")  # in a narrow terminal
PADDING = 2


def show_recipes(name: str | None, as_json: bool) -> None:
    """Print all recipes, or the one called `name`. Raises UsageError for an unknown recipe."""
    try:
        with activity("measuring the recipes"):
            rows = [describe_recipe(recipe) for recipe in ([name] if name else RECIPES)]
    except OptimError as error:
        raise UsageError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif name:
        sys.stdout.write("\n".join(format_recipe(rows[0])) + "\n")
    else:
        console = table_console()
        console.print(build_table(rows, console.width))


def describe_recipe(recipe: str) -> dict[str, Any]:
    """Return the JSON values of a recipe.

    `bits_per_parameter_*` are for the demo's model, measured by encoding normally distributed values;
    `memory_per_parameter` is in bytes, without weights, gradient and the moments of the inner optimizer.
    """
    method = compose(recipe)
    bits, steps = bits_per_cycle(RoundPlanner(method, shape_table(load_manifest(demo_manifest()).model).layout, 1))
    return {
        "name": method.name,
        "paper": method.paper,
        **{part: _written_value(method, part, "kind") for part in COMPONENTS},
        "bits_per_parameter_sync": bits,
        "bits_per_parameter_step": bits / steps,
        "memory_per_parameter": FLOAT_BYTES * count_vectors(method),
        "needs": list_needs(method),
        "defences": list_defences(recipe),
        "options": {part: list_options(method, part) for part in COMPONENTS},
    }


def bits_per_cycle(planner: RoundPlanner) -> tuple[float, int]:
    """Return bits per parameter and inner steps over one cycle, after which the same values are sent again."""
    return bits_over_rounds(planner, planner.cycle)


def bits_over_rounds(planner: RoundPlanner, rounds: Iterable[int]) -> tuple[float, int]:
    """Return bits per parameter and inner steps over these rounds; equal encodings are measured only once."""
    plans = [planner.plan(round_number) for round_number in rounds]
    encodings = Counter((plan.codecs[0], plan.numel) for plan in plans)
    bits = sum(times * codec.bits_per_parameter(numel) * numel for (codec, numel), times in encodings.items())
    return bits / planner.numel, sum(plan.steps for plan in plans)


def count_vectors(method: Method) -> int:
    """Return the number of model-sized vectors besides the weights and the inner optimizer's state.

    These are the anchor, the slots, the references and the residual.
    """
    slots = sum(name not in SMALL_SLOTS for name in method.slots)
    return 1 + slots + len(locally_trained_names(method)) + method.signal.vector_count


def list_needs(method: Method) -> list[str]:
    """Return the method's needs: an anchor or a partner, outcomes of contributions, and results that come late."""
    found = ["anchor"] if topology_class(method).has_shared_state else ["partner"]
    if method.feedback.keeps_error:
        found.append("fates")
    if method.schedule.ahead:
        found.append(f"{method.schedule.ahead} step{'s' * (method.schedule.ahead > 1)} late")
    return found


def list_defences(recipe: str) -> list[str]:
    """Return the rules against liars that leave the recipe as it is (`optim.compatibility`)."""
    found = []
    for rule in ROBUST:
        options = ({"kind": rule.kind}, {"kind": rule.kind, "over": "senders"})[: 1 + (rule is Filtered)]
        if any(_composes(recipe, option) for option in options):
            found.append(rule.kind)
    return found


def _composes(recipe: str, aggregate: OptionTable) -> bool:
    try:
        compose(recipe, {"aggregate": aggregate})
    except OptimError:
        return False
    return True


def list_options(method: Method, part: str) -> Mapping[str, Any]:
    """Return every option of a part with its value in this method, or with its schedule if it changes over rounds."""
    return {
        name: _written_value(method, part, name)
        for variant in part_variants(method, part)
        for name in _option_names(variant)
    }


def part_variants(method: Method, part: str) -> list[Any]:
    """Return the part of the first round, and each part of another kind that replaces it later."""
    at_breakpoints = (getattr(method.at_round(round_number), part) for round_number in reversed(method.breakpoints))
    found = {variant.kind: variant for variant in at_breakpoints}
    return list(reversed(found.values()))


def format_recipe(row: Mapping[str, Any]) -> list[str]:
    """Return the composition, options and formulas of a recipe for people; `row` is from `describe_recipe`."""
    method = compose(row["name"])
    lines = [
        f"{method.name}   {method.paper}",
        f"bits per parameter: {row['bits_per_parameter_sync']:.3g} each time it is sent, "
        f"{row['bits_per_parameter_step']:.3g} per step; measured on the demo's model",
        f"bytes per parameter, besides weights and moments: {row['memory_per_parameter']}",
        *(f"needs: {need} ({_explain_need(need)})" for need in row["needs"]),
        f"rules against liars that keep it: {', '.join(row['defences']) or 'none'}",
    ]
    for part in COMPONENTS:
        lines += ["", f"{part} = {_format_value(row[part])}"]
        for variant in part_variants(method, part):
            defaults = type(variant)()
            for option in _option_names(variant):
                value, default = row["options"][part][option], getattr(defaults, option)
                note = "" if value == default else f"   (default {default})"
                lines.append(f"    {option} = {_format_value(value)}{note}")
            lines += [f"    {line}".rstrip() for line in formula_lines(variant)]
    return lines


def formula_lines(part: object) -> list[str]:
    """Return the docstring of the part or of its module, which has the formulas, without the layout of payloads."""
    documented = inspect.cleandoc(type(part).__doc__ or sys.modules[type(part).__module__].__doc__ or "")
    return "\n\n".join(text for text in documented.split("\n\n") if not text.startswith("Payload")).splitlines()


def build_table(rows: list[dict[str, Any]], width: int) -> Table:
    """Return the table with one row per recipe, at most `width` cells wide; it omits default parts."""
    cells = [_format_cells(row) for row in rows]
    kept = choose_columns(COLUMNS, cells, EXPENDABLE, width, PADDING)
    left_out = describe_left_out(COLUMNS, kept)
    omitted = ", ".join(DEFAULT_PARTS.values())
    caption = "\n".join(
        (
            f"bits per parameter and step; bytes per parameter besides weights and moments; omitted: {omitted}",
            *(f"{need}: {meaning}" for need, meaning in NEEDS.items()),
            *([f"{left_out}; `murmur recipes NAME` shows one recipe in full"] if left_out else []),
        )
    )
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1), pad_edge=False)
    for column in (COLUMNS[index] for index in kept):
        table.add_column(column, no_wrap=True, justify="right" if column in ("bits", "bytes") else "left")
    for row_cells in cells:
        table.add_row(*(Text(row_cells[index]) for index in kept))
    return table


def _format_cells(row: dict[str, Any]) -> tuple[str, ...]:
    shown = {part: "" if row[part] == kind else row[part] for part, kind in DEFAULT_PARTS.items()}
    residual = "+ residual" if row["feedback"] == "error" else ""
    message = " ".join(filter(None, (shown["signal"], _format_kinds(row["codec"]), residual)))
    inner_steps = ", ".join(filter(None, (shown["inner"], shown["adoption"])))
    figures = (f"{row['bits_per_parameter_step']:.3g}", str(row["memory_per_parameter"]))
    parts = (row["topology"], shown["aggregate"], row["update"], inner_steps)
    return (row["name"], message, *parts, *figures, ", ".join(row["needs"]), row["paper"])


def _format_kinds(kind: OptionValue) -> str:
    """Return the kind, or the kinds of its phases: "int8 then topk"."""
    if isinstance(kind, Scalar):
        return str(kind)
    return " then ".join(str(phase["value"] if isinstance(phase, Mapping) else phase) for phase in kind)


def _explain_need(need: str) -> str:
    return NEEDS.get(need, "peers keep training before the result of a round is applied")


def _option_names(part: object) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]


def _written_value(method: Method, part: str, name: str) -> OptionValue:
    """Return an option of the part (or its kind): its schedule if it changes over the rounds, otherwise its value."""
    schedule = RECIPES[method.name].tables[part].get(name)
    if schedule is not None and not isinstance(schedule, Scalar):
        return schedule
    variants = part_variants(method, part)
    value: Scalar = next(
        getattr(variant, name) for variant in variants if name == "kind" or name in _option_names(variant)
    )
    return value


def _format_value(value: OptionValue) -> str:
    return str(value) if isinstance(value, Scalar) else as_toml(value)
