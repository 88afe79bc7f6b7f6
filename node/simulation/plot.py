"""Draw two line charts in one SVG: validation loss against bytes sent and against virtual time, on log x axes."""

import math
from collections.abc import Callable, Sequence
from html import escape

from node.simulation.comparison import Comparison, RecipeResults
from node.simulation.measurement import CurvePoint
from node.units import format_bytes

CHART_WIDTH, CHART_HEIGHT = 520, 340
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 46
COLOURS = ("#3366cc", "#dc3912", "#109618", "#990099", "#e67300", "#0099c6", "#994499", "#8b6914", "#555555", "#b82e2e")
TICKS = 5
XValue = Callable[[CurvePoint], float]


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _render_chart(
    series: Sequence[RecipeResults], title: str, x_value: XValue, label: Callable[[float], str], offset: int
) -> str:
    curves = [[point for point in mean_curve(one) if x_value(point) > 0] for one in series]
    points = [point for curve in curves for point in curve]
    if not points:
        return ""
    low, high = _axis_range([math.log10(x_value(point)) for point in points])
    bottom, top = _axis_range([point.loss for point in points])

    def position(point: CurvePoint) -> tuple[float, float]:
        x = LEFT + (math.log10(x_value(point)) - low) / (high - low) * (CHART_WIDTH - LEFT - RIGHT)
        y = TOP + (top - point.loss) / (top - bottom) * (CHART_HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    lines = [_render_line([position(point) for point in curve], _colour(index)) for index, curve in enumerate(curves)]
    axes = _render_axes(title, (low, high), (bottom, top), label)
    return f'<g transform="translate({offset} 0)">{axes}{"".join(lines)}</g>'


def _axis_range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.5
    return low - margin, high + margin


def _render_line(positions: Sequence[tuple[float, float]], colour: str) -> str:
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in positions)
    path = " ".join(f"{x},{y}" for x, y in positions)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>{dots}'


def _render_axes(
    title: str, logs: tuple[float, float], losses: tuple[float, float], label: Callable[[float], str]
) -> str:
    right, floor = CHART_WIDTH - RIGHT, CHART_HEIGHT - BOTTOM
    parts = [
        f'<text x="{(LEFT + right) / 2}" y="18" text-anchor="middle">validation loss against {escape(title)}</text>',
        f'<path d="M{LEFT} {TOP}V{floor}H{right}" fill="none" stroke="#888"/>',
    ]
    for tick in range(TICKS):
        fraction = tick / (TICKS - 1)
        x, y = LEFT + fraction * (right - LEFT), floor - fraction * (floor - TOP)
        value, loss = 10 ** (logs[0] + fraction * (logs[1] - logs[0])), losses[0] + fraction * (losses[1] - losses[0])
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{escape(label(value))}</text>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
    return "".join(parts)


def _render_legend(names: Sequence[str]) -> str:
    entries = []
    for index, name in enumerate(names):
        x, y = 40 + index % 5 * 190, CHART_HEIGHT + 8 + 22 * (index // 5)
        entries.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_colour(index)}"/>')
        entries.append(f'<text x="{x + 16}" y="{y}">{escape(name)}</text>')
    return "".join(entries)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
