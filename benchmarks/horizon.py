"""How far a recipe stays behind data parallel at a thousandth of its bits, by length of the run and size of the model.

    python benchmarks/horizon.py [--recipe "frugal 1"] [--seed 0] [--points 125x128 ...] [--json]

A point is inner steps x width: eight virtual peers train the demo's model at that width (0.82 million parameters at
128) for so many steps of 1,024 tokens each, from scratch, once by data parallel and once by the recipe, a row of
benchmarks/recipes.py. The learning rate falls over the whole run, whatever its length. Takes 40 minutes of one core.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.recipes import BATCH, PEERS, Job, Row, outcome_of, rows, setting_of
from node.model import shape_table
from node.simulation.comparison import DATA_PARALLEL
from node.simulation.config import SimulationConfig

POINTS = ("125x128", "250x128", "500x128", "1000x128", "250x64", "250x256")
HEAD = 32  # values of an attention head
HIDDEN = 8 / 3  # of the width


@dataclass(frozen=True)
class Point:
    steps: int
    width: int
    parameters: int
    data_parallel: float
    recipe: float
    bits: float

    @property
    def behind(self) -> float:
        return self.recipe / self.data_parallel - 1


def measured(recipe: str, seed: int, steps: int, width: int) -> Point:
    base, other = (Job(_row_of(name, steps), "scratch", seed, 1.0) for name in (DATA_PARALLEL, recipe))
    setting = stretched(setting_of(base), steps, width)
    reference, outcome = outcome_of(base, setting), outcome_of(other, setting)
    return Point(
        steps,
        width,
        shape_table(setting.manifest.model).numel,
        reference.validation_loss,
        outcome.validation_loss,
        outcome.bits_per_parameter_step,
    )


def stretched(setting: SimulationConfig, steps: int, width: int) -> SimulationConfig:
    """The same over so many steps, of a model of that width with as many layers."""
    given = setting.manifest
    shape = {"width": width, "heads": width // HEAD, "hidden": round(width * HIDDEN / 8) * 8}
    model, train = given.model.model_copy(update=shape), given.train.model_copy(update={"decay_steps": steps})
    return replace(setting, manifest=given.model_copy(update={"model": model, "train": train}), steps=steps)


def table(points: Sequence[Point]) -> str:
    lines = [
        "| parameters | steps | tokens | data parallel | recipe | behind | bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in points:
        tokens = one.steps * PEERS * BATCH
        lines.append(
            f"| {one.parameters / 1e6:.2f} M | {one.steps} | {tokens / 1e6:.1f} M | {one.data_parallel:.3f} "
            f"| {one.recipe:.3f} | {one.behind:+.1%} | {one.bits:.4f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="frugal 1", choices=[row.name for row in rows()])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--points", nargs="*", default=POINTS, metavar="STEPSxWIDTH")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args(arguments)
    found: list[Point] = []
    for point in words.points:
        steps, width = map(int, point.split("x"))
        found.append(measured(words.recipe, words.seed, steps, width))
        sys.stderr.write(table(found[-1:]).splitlines()[-1] + "\n")
    print(json.dumps([asdict(one) for one in found], indent=1) if words.json else table(found))


def _row_of(name: str, steps: int) -> Row:
    return next(row for row in rows(steps) if row.name == name)


if __name__ == "__main__":
    main(sys.argv[1:])
