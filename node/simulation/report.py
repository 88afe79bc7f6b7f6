"""What `murmur sim` prints."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from node.simulation.comparison import Comparison, RecipeResults, logic_time_fraction
from node.units import format_bytes

TABLE_WIDTH = 160  # a table cut to 80 columns says nothing
COLUMNS = (
    "recipe", "validation loss", "bits/param/step", "bits/param/sync", "sent a peer", "virtual s", "compute", "rounds",
    "data parallel then",
)  # fmt: skip


def build_table(comparison: Comparison) -> Table:
    """The last column: the loss of data parallel in the same virtual time."""
    drawn = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        drawn.add_column(column, justify="left" if column == "recipe" else "right")
    for series in comparison.recipes:
        drawn.add_row(*_cells(series, comparison))
    return drawn


def _cells(series: RecipeResults, comparison: Comparison) -> tuple[str, ...]:
    then = comparison.data_parallel_loss_at(series.mean("virtual_seconds"))
    return (
        series.name,
        f"{series.loss:.4f} +- {series.loss_deviation:.4f}",
        f"{series.mean('bits_per_parameter_step'):.4g}",
        f"{series.mean('bits_per_parameter_sync'):.4g}",
        format_bytes(round(series.mean("sent_bytes"))),
        f"{series.mean('virtual_seconds'):.1f}",
        f"{series.mean('compute_share'):.1%}",
        f"{series.mean('rounds'):g}",
        "-" if then is None else f"{then:.4f}",
    )


def format_logic_time(comparison: Comparison) -> str:
    outcomes = [outcome for series in comparison.recipes for outcome in series.results]
    seconds = sum(outcome.processor_seconds for outcome in outcomes)
    return f"{seconds:.1f} s of processor time, {logic_time_fraction(outcomes):.1%} of it in the rounds' logic"
