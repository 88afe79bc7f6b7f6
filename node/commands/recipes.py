"""Measure the recipes for `murmur recipes` (`node.commands.recipe_list`).

`python -m node.commands.recipes` writes `recipes.json` after a change of the recipes or of a docstring of their parts.
"""

import dataclasses
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from node.commands.recipe_list import NEEDS, RECORDED
from node.from_manifest import topology_class
from node.model import shape_table
from node.paths import demo_manifest
from node.trainer.ipc.shared_memory import locally_trained_names
from optim.aggregation.filtered import Filtered
from optim.compatibility import ROBUST
from optim.compose import COMPONENTS, compose
from optim.errors import OptimError
from optim.method import SMALL_SLOTS, Method
from optim.options import OptionValue, Scalar
from optim.recipes import RECIPES, SUMMARIES, OptionTable
from optim.round_plan import RoundPlanner
from optim.schedules.option_schedules import as_toml
from protocol.manifest.reading import load_manifest

FLOAT_BYTES = 4


def measure_all() -> list[dict[str, Any]]:
    """Return the values of all recipes, as `recipes.json` has them: `lines` shows a recipe in full."""
    return [{**row, "lines": format_recipe(row)} for row in map(describe_recipe, RECIPES)]


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
        "summary": SUMMARIES[recipe],
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
        row["summary"],
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


if __name__ == "__main__":
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in measure_all()) + "\n]\n")
