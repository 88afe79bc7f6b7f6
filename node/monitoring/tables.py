"""Fit tables into the width of a terminal by leaving columns out. Without a terminal they are as wide as they are."""

import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console

UNLIMITED = 10_000


def table_console() -> Console:
    """Return a console for a table on standard output, as wide as the terminal, or without a limit."""
    console = Console(highlight=False)
    return console if sys.stdout.isatty() else Console(width=UNLIMITED, highlight=False)


def choose_columns(
    headings: Sequence[str], rows: Sequence[Sequence[str]], expendable: Sequence[str], width: int, padding: int
) -> list[int]:
    """Return the indices of the columns that fit into `width` cells.

    Args:
        headings: the headings of all columns.
        rows: the cells of each row.
        expendable: the headings of the columns that may be left out, the first to go first.
        width: the width of the terminal.
        padding: the cells between two columns.
    """
    widths = [max(map(cell_len, column)) + padding for column in zip(headings, *rows, strict=True)]
    kept = list(range(len(headings)))
    for heading in expendable:
        if sum(widths[index] for index in kept) <= width:
            break
        kept.remove(headings.index(heading))
    return kept


def describe_left_out(headings: Sequence[str], kept: Sequence[int]) -> str:
    """Return a line that names the columns that were left out; empty if there are none."""
    left_out = [heading for index, heading in enumerate(headings) if index not in kept]
    return f"left out because the terminal is narrow: {', '.join(left_out)}" if left_out else ""
