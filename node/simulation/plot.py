"""Draw two line charts in one SVG: validation loss against bytes sent and against virtual time, on log x axes.

Each point has a bar of one standard deviation over the seeds to either side. Series have markers of their own, so that
points at the same place stay visible.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from node.simulation.comparison import Comparison, RecipeResults
from node.simulation.measurement import CurvePoint
from node.units import format_bytes

CHART_WIDTH, CHART_HEIGHT = 520, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#e67300", "#0099c6", "#994499", "#8b6914", "#555555", "#b82e2e")
MIN_TICKS, MAX_TICKS = 3, 8
SQUARE, DIAMOND, TRIANGLE = "-3,-3 3,-3 3,3 -3,3", "0,-4.5 4.5,0 0,4.5 -4.5,0", "0,-4.5 4,3.5 -4,3.5"
MARKERS = ("", SQUARE, DIAMOND, TRIANGLE)  # corners around a point; a circle has none
XValue = Callable[[CurvePoint], float]
Position = tuple[float, float]


def render_svg(comparison: Comparison) -> str:
    """Return an SVG document; each line is the mean over the seeds, and a curve with one point is a dot."""
    charts = (
        ("bytes sent by a peer", lambda point: point.sent_bytes, lambda value: format_bytes(round(value))),
        ("virtual seconds", lambda point: point.virtual_seconds, _format_seconds),
    )
    drawn = [
        _render_chart(comparison.recipes, title, x_value, label, index * CHART_WIDTH)
        for index, (title, x_value, label) in enumerate(charts)
    ]
    legend = _render_legend([series.name for series in comparison.recipes])
    height = CHART_HEIGHT + 22 * (1 + (len(comparison.recipes) - 1) // 5)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * CHART_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">'
    )
    return "\n".join((head, '<rect width="100%" height="100%" fill="white"/>', *drawn, legend, "</svg>\n"))


def _format_seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mean_curve(series: RecipeResults) -> list[CurvePoint]:
    """Return the curve averaged over the seeds, with as many points as the shortest curve."""
    rows = zip(*(result.curve for result in series.results), strict=False)
    return [
        CurvePoint(
            round(_mean([point.tokens for point in row])),
            _mean([point.virtual_seconds for point in row]),
            _mean([point.sent_bytes for point in row]),
            _mean([point.loss for point in row]),
        )
        for row in rows
    ]


def deviations(series: RecipeResults) -> list[float]:
    """Return the sample standard deviation of the loss over the seeds at each point of the mean curve."""
    rows = zip(*(result.curve for result in series.results), strict=False)
    return [statistics.stdev([point.loss for point in row]) if len(row) > 1 else 0.0 for row in rows]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _render_chart(
    series: Sequence[RecipeResults], title: str, x_value: XValue, label: Callable[[float], str], offset: int
) -> str:
    curves = [
        [(x_value(point), point.loss, bar) for point, bar in zip(mean_curve(one), deviations(one), strict=True)]
        for one in series
    ]
    points = [point for curve in curves for point in curve if point[0] > 0]
    if not points:
        return ""
    low, high = _axis_range([math.log10(x) for x, _, _ in points])
    bottom, top = _axis_range([loss + side for _, loss, bar in points for side in (-bar, bar)])

    def position(x: float, loss: float) -> tuple[float, float]:
        right = (math.log10(x) - low) / (high - low) * (CHART_WIDTH - LEFT - RIGHT)
        down = (top - loss) / (top - bottom) * (CHART_HEIGHT - TOP - BOTTOM)
        return round(LEFT + right, 1), round(TOP + down, 1)

    lines = []
    for index, curve in enumerate(curves):
        shown = [point for point in curve if point[0] > 0]
        bars = [(position(x, loss + bar), position(x, loss - bar)) for x, loss, bar in shown if bar]
        lines.append(_render_line([position(x, loss) for x, loss, _ in shown], bars, index))
    axes = _render_axes(title, (low, high), (bottom, top), label)
    return f'<g transform="translate({offset} 0)">{axes}{"".join(lines)}</g>'


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _render_line(positions: Sequence[Position], bars: Sequence[tuple[Position, Position]], index: int) -> str:
    colour = _colour(index)
    marks = "".join(_render_marker(x, y, index) for x, y in positions)
    path = " ".join(f"{x},{y}" for x, y in positions)
    errors = "".join(
        f'<path class="error" d="M{x - 3:.1f} {top}h6M{x} {top}V{low}M{x - 3:.1f} {low}h6" stroke="{colour}"/>'
        for (x, top), (_, low) in bars
    )
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{errors}{marks}'


def _render_marker(x: float, y: float, index: int) -> str:
    corners, paint = MARKERS[index % len(MARKERS)], f'fill="{_colour(index)}" fill-opacity="0.6"'
    if not corners:
        return f'<circle cx="{x}" cy="{y}" r="3.5" {paint}/>'
    return f'<polygon points="{corners}" transform="translate({x} {y})" {paint}/>'


def _render_axes(
    title: str, logs: tuple[float, float], losses: tuple[float, float], label: Callable[[float], str]
) -> str:
    right, floor = CHART_WIDTH - RIGHT, CHART_HEIGHT - BOTTOM
    parts = [
        f'<text x="{(LEFT + right) / 2}" y="18" text-anchor="middle">validation loss against {escape(title)}</text>',
        f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#888"/>',
    ]
    for value in log_ticks(*logs):
        x = LEFT + (math.log10(value) - logs[0]) / (logs[1] - logs[0]) * (right - LEFT)
        parts.append(f'<path d="M{x:.1f} {floor}v4" stroke="#888"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{escape(label(value))}</text>')
    for loss in linear_ticks(*losses):
        y = floor - (loss - losses[0]) / (losses[1] - losses[0]) * (floor - TOP)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.4g}</text>')
    return "".join(parts)


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between 10^low and 10^high: decades, or also their double and fivefold."""
    for digits in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [
            digit * 10.0**power
            for power in range(math.floor(low), math.ceil(high) + 1)
            for digit in digits
            if low <= math.log10(digit) + power <= high
        ]
        if len(ticks) >= MIN_TICKS:
            return ticks[:: -(-len(ticks) // MAX_TICKS)]
    return linear_ticks(10.0**low, 10.0**high)


def linear_ticks(low: float, high: float) -> list[float]:
    """Return three to eight multiples of 1, 2 or 5 times a power of ten between two numbers."""
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    step = next(power * factor for factor in (1, 2, 5, 10, 20, 50) if (high - low) / (power * factor) <= MAX_TICKS - 1)
    first = math.ceil(low / step)
    return [round(number * step, 12) for number in range(first, math.floor(high / step) + 1)]


def _render_legend(names: Sequence[str]) -> str:
    entries = []
    for index, name in enumerate(names):
        x, y = 40 + index % 5 * 190, CHART_HEIGHT + 8 + 22 * (index // 5)
        entries.append(_render_marker(x + 5, y - 4, index))
        entries.append(f'<text x="{x + 16}" y="{y}">{escape(name)}</text>')
    return "".join(entries)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
