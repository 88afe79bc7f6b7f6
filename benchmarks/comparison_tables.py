"""Write the comparison of recipes into the documentation: tables between marks in its text, plots beside it.

`<!-- compared: NAME -->`, a table, `<!-- end -->`: what stands between is made anew.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from node.simulation import plot
from node.simulation.comparison import DATA_PARALLEL, LOCAL, Comparison

HOME: Final = Path(__file__).parents[1]
BASELINES: Final = (DATA_PARALLEL, LOCAL)
TABLE_PATTERN: Final = re.compile(
    r"(?<=<!-- compared: )(?P<name>[a-z, ]+)(?P<mark> -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL
)
SHORT_TABLE_ROWS: Final = (*BASELINES, "averaging", "demo", "frugal", "frugal 1", "senders 10", "streaming-diloco")
HEADS: Final = (
    "recipe",
    "validation loss",
    "above data parallel",
    "bits per parameter and step",
    "virtual seconds",
    "computing",
    "data parallel by then",
)
SHORT_COLUMNS: Final = 5


def publish(settings: Mapping[str, Comparison], home: Path = HOME) -> None:
    """Write the plots in docs/results/ and the tables of README.md and docs/results/recipes.md."""
    for setting, comparison in settings.items():
        (home / "docs" / "results" / f"recipes-{setting}.svg").write_text(plot.render_svg(pareto_front(comparison)))
    made = make_tables(settings)
    for text in (home / "README.md", home / "docs" / "results" / "recipes.md"):
        text.write_text(fill_tables(text.read_text(), made))


def make_tables(settings: Mapping[str, Comparison]) -> dict[str, str]:
    """Return the full and the short table of each setting, by the name in the mark."""
    full = {name: make_table(comparison) for name, comparison in settings.items()}
    short = {
        f"{name}, in short": make_table(comparison, SHORT_TABLE_ROWS, SHORT_COLUMNS)
        for name, comparison in settings.items()
    }
    return full | short


def fill_tables(text: str, made: Mapping[str, str]) -> str:
    """Tables that were not made stay as they are."""

    def anew(found: re.Match[str]) -> str:
        name, mark = found["name"], found["mark"]
        return f"{name}{mark}{made[name]}" if name in made else found[0]

    return TABLE_PATTERN.sub(anew, text)


def make_table(comparison: Comparison, only: Collection[str] | None = None, columns: int = len(HEADS)) -> str:
    """Return a Markdown table of the recipes in `only`, with the first `columns` columns."""
    heads, *rows = (f"| {' | '.join(row[:columns])} |\n" for row in (HEADS, *_rows(comparison, only)))
    return "".join((heads, f"|{'---|' * columns}\n", *rows))


def _rows(comparison: Comparison, only: Collection[str] | None) -> Iterator[tuple[str, ...]]:
    """Yield one row per recipe, lowest loss first; the last column is data parallel's loss after as much time."""
    reference = next((one.loss for one in comparison.recipes if one.name == DATA_PARALLEL), None)
    for series in sorted(comparison.recipes, key=lambda one: one.loss):
        if only is not None and series.name not in only:
            continue
        spread = f" ± {series.loss_deviation:.3f}" if len(series.results) > 1 else ""
        then = comparison.data_parallel_loss_at(series.mean("virtual_seconds")) if reference is not None else None
        yield (
            series.name,
            f"{series.loss:.3f}{spread}",
            "" if reference is None else f"{series.loss / reference - 1:+.1%}",
            f"{series.mean('bits_per_parameter_step'):.4g}",
            f"{series.mean('virtual_seconds'):,.0f}",
            f"{series.mean('compute_share'):.0%}",
            "-" if then is None else f"{then:.3f}",
        )


def pareto_front(comparison: Comparison) -> Comparison:
    """The baselines, and those that nothing beats in both loss and bits: more lines than that nobody can tell apart."""
    costs = [(one.loss, one.mean("bits_per_parameter_step")) for one in comparison.recipes]
    return Comparison(
        tuple(
            one
            for one, (loss, bits) in zip(comparison.recipes, costs, strict=True)
            if one.name in BASELINES or not any(less < loss and fewer < bits for less, fewer in costs)
        )
    )
