"""The table that `murmur sim` prints, the same figures as CSV, and a word about comparisons that are too short."""

import csv
import io
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from node.monitoring.tables import choose_columns, describe_left_out
from node.simulation.comparison import (
    DATA_PARALLEL,
    FIGURES,
    LOCAL,
    Comparison,
    PipelineResults,
    RecipeResults,
    logic_time_fraction,
)
from node.units import format_bytes

PADDING = 2
FEW_ROUNDS = 5  # fewer say little about a method: momentum, residuals and usual norms have hardly begun to act
EXPENDABLE = (  # in a narrow terminal
    "bits/param/sync", "rounds", "compute", "data parallel, same time", "virtual s", "sent per peer", "bits/param/step",
)  # fmt: skip
COLUMNS = (
    "recipe", "validation loss", "bits/param/step", "bits/param/sync", "sent per peer", "virtual s", "compute",
    "rounds", "data parallel, same time",
)  # fmt: skip


def build_table(comparison: Comparison, width: int) -> Table:
    """Return the table, at most `width` cells wide.

    The last column is the loss of data parallel after the same virtual time.
    """
    cells = [_cells(recipe, comparison) for recipe in comparison.recipes]
    kept = choose_columns(COLUMNS, cells, EXPENDABLE, width, PADDING)
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, caption=describe_left_out(COLUMNS, kept) or None,
        caption_justify="left",
    )  # fmt: skip
    for column in (COLUMNS[index] for index in kept):
        table.add_column(column, no_wrap=True, justify="left" if column == "recipe" else "right")
    for row in cells:
        table.add_row(*(row[index] for index in kept))
    return table


def _cells(series: RecipeResults, comparison: Comparison) -> tuple[str, ...]:
    then = comparison.data_parallel_loss_at(series.mean("virtual_seconds"))
    return (
        series.name,
        f"{series.loss:.4f} +- {series.loss_deviation:.4f}" if len(series.results) > 1 else f"{series.loss:.4f} -",
        f"{series.mean('bits_per_parameter_step'):.4g}",
        f"{series.mean('bits_per_parameter_sync'):.4g}",
        format_bytes(round(series.mean("sent_bytes"))),
        f"{series.mean('virtual_seconds'):.1f}",
        f"{series.mean('compute_share'):.1%}",
        f"{series.mean('rounds'):g}",
        "-" if then is None else f"{then:.4f}",
    )


def format_short_runs(comparison: Comparison) -> list[str]:
    """Return a line about the recipes that exchanged too rarely to be compared; none if all did often enough."""
    rounds = {recipe.name: recipe.mean("rounds") for recipe in comparison.recipes}
    few = {name: count for name, count in rounds.items() if count < FEW_ROUNDS and name not in (DATA_PARALLEL, LOCAL)}
    if not few:
        return []
    shown = ", ".join(f"{name} {_times(count)}" for name, count in few.items())
    advice = f"their losses say little; use more --steps or fewer inner_steps, for at least {FEW_ROUNDS} rounds"
    return [f"too short to compare: {shown} exchanged in the whole run, so {advice}"]


def _times(count: float) -> str:
    return "never" if count == 0 else "once" if count == 1 else f"{count:g} times"


def render_csv(comparison: Comparison) -> str:
    """Return the figures as CSV: a row for each recipe and seed."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("recipe", "seed", "validation_loss", *FIGURES))
    for recipe in comparison.recipes:
        for seed, result in enumerate(recipe.results):
            figures: Sequence[object] = [getattr(result, figure) for figure in FIGURES]
            rows.writerow((recipe.name, seed, result.validation_loss, *figures))
    return text.getvalue()


def format_pipelines(comparison: Comparison) -> list[str]:
    """Return a line for each pipeline: its loss compared with full replicas, and what became of the microbatches."""
    return [_format_pipeline(comparison, pipeline) for pipeline in comparison.pipelines]


def _format_pipeline(comparison: Comparison, pipeline: PipelineResults) -> str:
    counts = pipeline.counts
    return (
        f"{pipeline.row.name}: {comparison.loss_ratio(pipeline):.4f} of the loss of full replicas at equal tokens; "
        f"{counts.done:,} microbatches, {counts.replayed} passes computed again, "
        f"{counts.lost} lost, {counts.partly_counted} partly counted; "
        f"stages at most {pipeline.round_spread} rounds apart"
    )


def format_logic_time(comparison: Comparison) -> str:
    """Return a line with the CPU time and the fraction of it in the round machines."""
    results = [result for recipe in comparison.recipes for result in recipe.results]
    seconds = sum(result.processor_seconds for result in results)
    return f"{seconds:.1f} s of CPU time, {logic_time_fraction(results):.1%} of it in the round machines"
