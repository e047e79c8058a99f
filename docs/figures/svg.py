"""A drawing of boxes, arrows and text, written as SVG: the same bytes on every machine.

Its background is transparent and its colors have contrast on white and on dark pages; text is the reader's own font.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#4878a8", "#c8702a", "#4c8f4a", "#8a6fae", "#7d8590"
INK = "#1c2128"
"""Of text on light boxes."""
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
HEAD = 7.0
"""Length of an arrow's head, and twice its half width."""


def lightened(color: str, share: float = 0.55) -> str:
    """Return a color (`#rrggbb`) mixed with white. share: of white."""
    parts = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def number(value: float) -> str:
    """Return a coordinate in pixels, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """A picture of some width and height in pixels; the origin is its upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        """Begin with nothing but a title, which readers hear who do not see the picture."""
        self.size = f"{number(width)} {number(height)}".split()
        self.title = title
        self.lines: list[str] = []

    def text(
        self, at: Point, text: str, size: float = 13, color: str = GRAY, anchor: str = "middle", bold: bool = False
    ) -> None:
        """Write one line, its middle at height `at[1]`. anchor: what of it is at `at[0]`: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        x, y = number(at[0]), number(at[1] + 0.35 * size)  # the middle of small letters lies above the base line
        self.lines.append(
            f'<text x="{x}" y="{y}" font-size="{number(size)}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(
        self, at: Point, size: Point, text: str = "", color: str = BLUE, ink: str = "#ffffff", radius: float = 6,
        font: float = 13, stroke: str | None = None,
    ) -> None:  # fmt: skip
        """Draw a filled box with lines of text in its middle. at: its upper left corner; color `none`: not filled."""
        (x, y), (width, height) = at, size
        border = "" if stroke is None else f' stroke="{stroke}" stroke-width="1.2"'
        self.lines.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
            f'rx="{number(radius)}" fill="{color}"{border}/>'
        )
        lines = text.split("\n") if text else []
        for index, line in enumerate(lines):
            middle = y + height / 2 + (index - (len(lines) - 1) / 2) * font * 1.35
            self.text((x + width / 2, middle), line, font, ink)

    def arrow(self, points: Sequence[Point], color: str = GRAY, dashed: bool = False) -> None:
        """Draw a line along points, each straight above or beside the one before, with a head at its end."""
        (x0, y0), (x1, y1) = points[-2:]
        dx, dy = ((x1 > x0) - (x1 < x0)), ((y1 > y0) - (y1 < y0))
        end = (x1 - dx * HEAD, y1 - dy * HEAD)
        path = " ".join(f"{number(x)},{number(y)}" for x, y in [*points[:-1], end])
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self.lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dashes}/>')
        sides = [(end[0] - dy * HEAD / 2, end[1] - dx * HEAD / 2), (end[0] + dy * HEAD / 2, end[1] + dx * HEAD / 2)]
        head = " ".join(f"{number(x)},{number(y)}" for x, y in [(x1, y1), *sides])
        self.lines.append(f'<polygon points="{head}" fill="{color}"/>')

    def svg(self) -> str:
        """Return the picture as a file's text."""
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'font-family="{FONT}" role="img">\n<title>{escape(self.title)}</title>\n'
            + "\n".join(self.lines)
            + "\n</svg>\n"
        )
