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

from node.model import shape_table
from node.places import demo_manifest
from optim.errors import OptimError
from optim.method import Method
from optim.recipes import PARTS, RECIPES, TOPOLOGIES, compose
from protocol.errors import UsageError
from protocol.manifest import load_manifest

FLOAT_BYTES = 4
WIDTH = 200
COLUMNS = ("name", "paper", *PARTS, "bits/param/step", "bytes/param", "needs")


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
    bits = method.codec.bits_per_parameter(shape_table(load_manifest(demo_manifest()).model).numel)
    return {
        "name": method.name,
        "paper": method.paper,
        **{part: _kind(method, part) for part in PARTS},
        "bits_per_parameter_sync": bits,
        "bits_per_parameter_step": bits / method.schedule.inner_steps,
        "memory_per_parameter": FLOAT_BYTES * (len(STATE) + len(method.update.slots)),
        "needs": needs(method),
        "options": {part: options(method, part) for part in PARTS},
    }


STATE = ("anchor", "reference", "residual")


def needs(method: Method) -> list[str]:
    """What the method asks of the swarm."""
    found = ["shared anchor"]
    if method.feedback.keeps_error:
        found.append("acknowledgements")
    if method.schedule.overlap:
        found.append("staleness of up to one period")
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
    drawn = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        drawn.add_column(column)
    for row in rows:
        figures = (f"{row['bits_per_parameter_step']:.3g}", str(row["memory_per_parameter"]), ", ".join(row["needs"]))
        drawn.add_row(*(Text(str(row[key])) for key in ("name", "paper", *PARTS)), *figures)
    return drawn


def _part(method: Method, part: str) -> Any:
    return TOPOLOGIES[method.topology]() if part == "topology" else getattr(method, part)


def _kind(method: Method, part: str) -> str:
    return str(_part(method, part).kind)
