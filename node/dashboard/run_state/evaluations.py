"""Results of `murmur eval` as the page shows them: the newest of each metric, and its course over tokens. Pure."""

from collections.abc import Sequence
from typing import Any, Final

from node.commands.eval.results import Result

WIDTH: Final = 100.0  # of the course, whose height is HEIGHT
HEIGHT: Final = 20.0
MAX_POINTS: Final = 100
MAX_SHOWN: Final = 60  # metrics


def evaluation_values(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return a row for each metric of each task, those that were measured first at the top."""
    courses: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        courses.setdefault((result.task, result.metric), []).append(result)
    return [
        {**course[-1].model_dump(), "first": course[0].value, "points": course_points(course)}
        for course in list(courses.values())[:MAX_SHOWN]
    ]


def course_points(course: Sequence[Result]) -> str:
    """Return the points of an SVG line over the tokens of the run; empty for less than two."""
    known = [(one.tokens, one.value) for one in course if one.tokens is not None][-MAX_POINTS:]
    if len({tokens for tokens, _ in known}) < 2:
        return ""
    lows, highs = (tuple(choose(column) for column in zip(*known, strict=True)) for choose in (min, max))
    spread = highs[1] - lows[1] or 1.0
    places = (
        (WIDTH * (tokens - lows[0]) / (highs[0] - lows[0]), HEIGHT * (highs[1] - value) / spread)
        for tokens, value in sorted(known)
    )
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
