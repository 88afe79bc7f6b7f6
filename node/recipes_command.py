"""`murmur recipes`: the table of methods, and one method in full."""

import dataclasses
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.from_manifest import topology_class
from node.ipc.shared_memory import locally_trained_names
from node.model import shape_table
from node.paths import demo_manifest
from optim.compose import COMPONENTS, compose
from optim.errors import OptimError
from optim.method import SMALL_SLOTS, Method
from optim.option_schedules import as_toml
from optim.options import OptionValue, Scalar
from optim.recipes import RECIPES
from optim.round_plan import RoundPlanner
from protocol.errors import UsageError
from protocol.manifest import load_manifest

FLOAT_BYTES = 4
TABLE_WIDTH = 240
DEFAULT_PARTS = {"inner": "adamw", "signal": "pseudo-gradient", "aggregate": "mean", "adoption": "carry"}
NEEDS = {
    "anchor": "all peers hold the same weights between rounds",
    "partner": "each peer has weights of its own and meets a few others a round",
    "fates": "a sender is told whether its message counted, and sends again what did not",
}
COLUMNS = ("name", "message", "topology", "aggregate", "update", "besides", "bits", "bytes", "needs", "paper")


def show_recipes(name: str | None, as_json: bool) -> None:
    """All recipes, or the one called `name`. Raises UsageError where there is no such recipe."""
    try:
        rows = [describe_recipe(one) for one in ([name] if name else RECIPES)]
    except OptimError as error:
        raise UsageError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif name:
        sys.stdout.write("\n".join(format_recipe(rows[0])) + "\n")
    else:
        Console(width=TABLE_WIDTH).print(build_table(rows))


def describe_recipe(recipe: str) -> dict[str, Any]:
    """`bits_per_parameter_*` for the demo's model, measured on encoded bytes of normally distributed values;
    `memory_per_parameter` in bytes, beside weights, gradient and the inner moments."""
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
        "options": {part: list_options(method, part) for part in COMPONENTS},
    }


def bits_per_cycle(planner: RoundPlanner) -> tuple[float, int]:
    """Bits a parameter until the same values are sent again, and the local steps that takes."""
    return bits_over_rounds(planner, planner.cycle)


def bits_over_rounds(planner: RoundPlanner, rounds: Iterable[int]) -> tuple[float, int]:
    """The same of those rounds. What is encoded alike is measured once."""
    plans = [planner.plan(number) for number in rounds]
    messages = Counter((plan.codecs[0], plan.numel) for plan in plans)
    bits = sum(times * codec.bits_per_parameter(numel) * numel for (codec, numel), times in messages.items())
    return bits / planner.numel, sum(plan.steps for plan in plans)


def count_vectors(method: Method) -> int:
    """Of the model's size, beside the weights and the inner optimizer's: anchor, slots, references and residual."""
    slots = sum(name not in SMALL_SLOTS for name in method.slots)
    return 1 + slots + len(locally_trained_names(method)) + method.signal.vector_count


def list_needs(method: Method) -> list[str]:
    """What the method asks of the swarm: one anchor for all or a partner, the fates of messages, results that may be
    late."""
    found = ["anchor"] if topology_class(method).has_shared_state else ["partner"]
    if method.feedback.keeps_error:
        found.append("fates")
    if method.schedule.ahead:
        found.append(f"{method.schedule.ahead} step{'s' * (method.schedule.ahead > 1)} late")
    return found


def list_options(method: Method, part: str) -> Mapping[str, Any]:
    """Every option of that part as this method has it; one that changes over the rounds as its schedule."""
    return {
        name: _written_value(method, part, name) for one in part_variants(method, part) for name in _option_names(one)
    }


def part_variants(method: Method, part: str) -> list[Any]:
    """The part as it is at first, and each of another kind that takes its place later."""
    found = {
        now.kind: now for now in (getattr(method.at_round(number), part) for number in reversed(method.breakpoints))
    }
    return list(reversed(found.values()))


def format_recipe(row: Mapping[str, Any]) -> list[str]:
    """Composition, options and formulas of what `describe` says, for a person."""
    method = compose(row["name"])
    shown = [
        f"{method.name}   {method.paper}",
        f"bits a parameter: {row['bits_per_parameter_sync']:.3g} each time it is sent, "
        f"{row['bits_per_parameter_step']:.3g} a step; measured on the demo's model",
        f"bytes a parameter, beside weights and moments: {row['memory_per_parameter']}",
        *(f"needs: {need} ({_explain_need(need)})" for need in row["needs"]),
    ]
    for part in COMPONENTS:
        shown += ["", f"{part} = {_format_value(row[part])}"]
        for built in part_variants(method, part):
            usual = type(built)()
            for option in _option_names(built):
                value, default = row["options"][part][option], getattr(usual, option)
                note = "" if value == default else f"   (default {default})"
                shown.append(f"    {option} = {_format_value(value)}{note}")
            shown += [f"    {line}".rstrip() for line in formula_lines(built)]
    return shown


def formula_lines(part: object) -> list[str]:
    """What the part's own documentation, or its file's, says of it but for the bytes of a payload: there the formula
    stands, beside the code."""
    documented = inspect.cleandoc(type(part).__doc__ or sys.modules[type(part).__module__].__doc__ or "")
    return "\n\n".join(text for text in documented.split("\n\n") if not text.startswith("Payload")).splitlines()


def build_table(rows: list[dict[str, Any]]) -> Table:
    """One line a recipe; a part that is the usual one is left out."""
    usual = ", ".join(DEFAULT_PARTS.values())
    said = "\n".join(
        (
            f"bits a parameter and step; bytes a parameter beside weights and moments; left out: {usual}",
            *(f"{need}: {meaning}" for need, meaning in NEEDS.items()),
        )
    )
    drawn = Table(box=SIMPLE_HEAD, caption=said, caption_justify="left", padding=(0, 1), pad_edge=False)
    for column in COLUMNS:
        drawn.add_column(column, no_wrap=True, justify="right" if column in ("bits", "bytes") else "left")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in _format_cells(row)))
    return drawn


def _format_cells(row: dict[str, Any]) -> tuple[str, ...]:
    unusual = {part: "" if row[part] == kind else row[part] for part, kind in DEFAULT_PARTS.items()}
    residual = "+ residual" if row["feedback"] == "error" else ""
    message = " ".join(filter(None, (unusual["signal"], _format_kinds(row["codec"]), residual)))
    besides = ", ".join(filter(None, (unusual["inner"], unusual["adoption"])))
    figures = (f"{row['bits_per_parameter_step']:.3g}", str(row["memory_per_parameter"]))
    parts = (row["topology"], unusual["aggregate"], row["update"], besides)
    return (row["name"], message, *parts, *figures, ", ".join(row["needs"]), row["paper"])


def _format_kinds(kind: OptionValue) -> str:
    """Return the kind, or the kinds of its phases: "int8 then topk"."""
    if isinstance(kind, Scalar):
        return str(kind)
    return " then ".join(str(phase["value"] if isinstance(phase, Mapping) else phase) for phase in kind)


def _explain_need(need: str) -> str:
    return NEEDS.get(need, "a round's result is applied when peers have trained on")


def _option_names(part: object) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]


def _written_value(method: Method, part: str, name: str) -> OptionValue:
    """Return an option of the part, or its kind: the schedule of one that changes over the rounds, else the value."""
    schedule = RECIPES[method.name].tables[part].get(name)
    if schedule is not None and not isinstance(schedule, Scalar):
        return schedule
    variants = part_variants(method, part)
    value: Scalar = next(getattr(one, name) for one in variants if name == "kind" or name in _option_names(one))
    return value


def _format_value(value: OptionValue) -> str:
    return str(value) if isinstance(value, Scalar) else as_toml(value)
