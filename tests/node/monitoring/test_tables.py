"""Columns that fit into a terminal."""

from node.commands.recipe_list import COLUMNS, EXPENDABLE
from node.monitoring.tables import choose_columns, describe_left_out

HEADINGS = ("name", "loss", "note")
ROWS = [("diloco", "1.25", "a long note"), ("x", "\u4e2d\u4e2d\u4e2d", "")]  # the middle cell takes six


def test_expendable_columns_go_in_their_order() -> None:
    kept = [choose_columns(HEADINGS, ROWS, ("note", "loss"), width, 2) for width in (29, 28, 15, 1)]
    assert kept == [[0, 1, 2], [0, 1], [0], [0]]
    assert describe_left_out(HEADINGS, [0, 1]) == "left out because the terminal is narrow: note"
    assert describe_left_out(HEADINGS, [0, 1, 2]) == ""


def test_name_and_message_of_recipes_are_always_shown() -> None:
    assert set(COLUMNS) - set(EXPENDABLE) == {"name", "message", "bits"}
