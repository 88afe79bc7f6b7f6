"""`murmur recipes`: the table of methods, and one method in full."""

import dataclasses
import inspect
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from node.arena import carried
from node.model import shape_table
from node.places import demo_manifest
from optim.errors import OptimError
from optim.method import MEMORY, Method
from optim.program import Program
from optim.recipes import PARTS, compose
from optim.rows import RECIPES
from protocol.errors import UsageError
from protocol.manifest import load_manifest

FLOAT_BYTES = 4
WIDTH = 240
USUAL_PARTS = {"inner": "adamw", "signal": "pseudo-gradient", "aggregate": "mean", "adoption": "carry"}
COLUMNS = ("name", "message", "topology", "aggregate", "update", "besides", "bits", "bytes", "needs", "paper")


def show_recipes(name: str | None, as_json: bool) -> None:
    """All recipes, or the one called `name`. Raises UsageError where there is no such recipe."""
    try:
        rows = [describe(one) for one in ([name] if name else RECIPES)]
    except OptimError as error:
        raise UsageError(str(error)) from error
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
    elif name:
        for line in lines(compose(name)):
            sys.stdout.write(line + "\n")
    else:
        Console(width=WIDTH).print(table(rows))


def describe(recipe: str) -> dict[str, Any]:
    """`bits_per_parameter_*` for the demo's model, measured on encoded bytes of normally distributed values;
    `memory_per_parameter` in bytes, beside weights, gradient and the inner moments."""
    method = compose(recipe)
    bits, steps = bits_of_a_cycle(Program(method, shape_table(load_manifest(demo_manifest()).model).layout, 1))
    return {
        "name": method.name,
        "paper": method.paper,
        **{part: _kind(method, part) for part in PARTS},
        "bits_per_parameter_sync": bits,
        "bits_per_parameter_step": bits / steps,
        "memory_per_parameter": FLOAT_BYTES * vectors(method),
        "needs": needs(method),
        "options": {part: options(method, part) for part in PARTS},
    }


def bits_of_a_cycle(program: Program) -> tuple[float, int]:
    """Bits a parameter until the same values are sent again, and the local steps that takes."""
    plans = [program.plan(number) for number in program.cycle]
    bits = sum(plan.codecs[0].bits_per_parameter(plan.numel) * plan.numel for plan in plans) / program.numel
    return bits, sum(plan.steps for plan in plans)


def vectors(method: Method) -> int:
    """Of the model's size, beside the weights and the inner optimizer's: anchor, slots, references and residual."""
    slots = sum(name != MEMORY for name in method.slots)
    return 1 + slots + len(carried(method)) + method.signal.width


def needs(method: Method) -> list[str]:
    """What the method asks of the swarm: one anchor for all or a partner, the fates of messages, results that may be
    late."""
    found = ["anchor"] if method.topology.kind != "groups" else ["partner"]
    if method.feedback.keeps_error:
        found.append("fates")
    if method.schedule.ahead:
        found.append(f"{method.schedule.ahead} step{'s' * (method.schedule.ahead > 1)} late")
    return found


def options(method: Method, part: str) -> Mapping[str, Any]:
    """Every option of that part as this method has it."""
    built = _part(method, part)
    return {field.name: getattr(built, field.name) for field in dataclasses.fields(built)}


def lines(method: Method) -> list[str]:
    """Composition, options and formulas, for a person."""
    shown = [f"{method.name}   {method.paper}", f"needs: {', '.join(needs(method))}"]
    for part in PARTS:
        built = _part(method, part)
        shown += ["", f"{part} = {_kind(method, part)}"]
        usual = type(built)()
        for option, value in options(method, part).items():
            default = getattr(usual, option)
            shown.append(f"    {option} = {value}" + ("" if value == default else f"   (default {default})"))
        shown += [f"    {line}".rstrip() for line in formula(built)]
    return shown


def formula(part: object) -> list[str]:
    """What the part's own documentation says of it: there the formula stands, beside the code."""
    documented = inspect.cleandoc(type(part).__doc__ or "")
    return [] if documented.startswith(f"{type(part).__name__}(") else documented.splitlines()


def table(rows: list[dict[str, Any]]) -> Table:
    """One line a recipe; a part that is the usual one is left out."""
    usual = ", ".join(USUAL_PARTS.values())
    said = f"bits a parameter and step; bytes a parameter beside weights and moments; left out: {usual}"
    drawn = Table(box=SIMPLE_HEAD, caption=said, caption_justify="left", padding=(0, 1), pad_edge=False)
    for column in COLUMNS:
        drawn.add_column(column, no_wrap=True, justify="right" if column in ("bits", "bytes") else "left")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in _cells(row)))
    return drawn


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    unusual = {part: "" if row[part] == kind else row[part] for part, kind in USUAL_PARTS.items()}
    message = " ".join(
        filter(None, (unusual["signal"], row["codec"], "+ residual" if row["feedback"] == "error" else ""))
    )
    besides = ", ".join(filter(None, (unusual["inner"], unusual["adoption"])))
    figures = (f"{row['bits_per_parameter_step']:.3g}", str(row["memory_per_parameter"]))
    parts = (row["topology"], unusual["aggregate"], row["update"], besides)
    return (row["name"], message, *parts, *figures, ", ".join(row["needs"]), row["paper"])


def _part(method: Method, part: str) -> Any:
    return getattr(method, part)


def _kind(method: Method, part: str) -> str:
    return str(_part(method, part).kind)
