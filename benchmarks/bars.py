"""Draw shares as groups of bars, in panels side by side, as SVG."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

PANEL_WIDTH: Final = 310
PANEL_HEIGHT: Final = 230
BAR_HEIGHT: Final = 130  # of 1.0
BAR_WIDTH: Final = 28
LEFT: Final = 34
LETTER_WIDTH: Final = 6  # on average, at most
COLOURS: Final = ("#b0b0b0", "#1f6fb4", "#e0a030")


@dataclass(frozen=True)
class Panel:
    """`groups`: a label, and a share for each of the `names`."""

    title: str
    names: Sequence[str]
    groups: Sequence[tuple[str, Sequence[float]]]
    caption: str
    colours: Sequence[str] = COLOURS


def render_bars(panels: Sequence[Panel]) -> str:
    """Return a picture of all panels."""
    drawn = [line for index, panel in enumerate(panels) for line in _draw_panel(panel, index * PANEL_WIDTH)]
    size = f'viewBox="0 0 {len(panels) * PANEL_WIDTH} {PANEL_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join((head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"))


def _draw_panel(panel: Panel, left: float) -> Iterator[str]:
    """Yield the elements of a panel that begins at `left`."""
    yield _text(left + PANEL_WIDTH / 2, 16, panel.title, "middle")
    x = left + 10
    for colour, name in zip(panel.colours, panel.names, strict=False):
        yield f'<rect x="{x}" y="24" width="10" height="10" fill="{colour}"/>'
        yield _text(x + 14, 33, name)
        x += 34 + LETTER_WIDTH * len(name)
    distance = (PANEL_WIDTH - LEFT) // max(1, len(panel.groups))
    width = BAR_WIDTH * len(panel.names)
    for place, (label, shares) in enumerate(panel.groups):
        begin = left + LEFT + distance * place
        for order, (colour, share) in enumerate(zip(panel.colours, shares, strict=False)):
            x, height = begin + BAR_WIDTH * order, BAR_HEIGHT * share
            top = PANEL_HEIGHT - 36 - height
            yield f'<rect x="{x}" y="{top:.1f}" width="{BAR_WIDTH - 2}" height="{height:.1f}" fill="{colour}"/>'
            yield _text(x + BAR_WIDTH / 2 - 1, top - 4, f"{100 * share:.{0 if share >= 0.1 else 1}f}", "middle")
        yield _text(begin + width / 2 - 1, PANEL_HEIGHT - 22, label, "middle")
    yield _text(left + PANEL_WIDTH / 2, PANEL_HEIGHT - 6, panel.caption, "middle")


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
