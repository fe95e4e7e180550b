"""A small SVG writer: shapes by class, colours for light and dark, system fonts, and a text alternative.

Rule: a picture is 560 units wide, so that it is legible on a phone and not blown up on a desk; it
paints its own background, so that it stays legible where its colour scheme is not the page's.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH = 560
EDGE = 14  # units from the border to the content
LIGHT = {
    "bg": "#ffffff",
    "panel": "#f1f3f7",
    "rim": "#cfd5df",
    "ink": "#1c2230",
    "soft": "#535c6d",
    "blue": "#7fa9e6",
    "blue-ink": "#1d4f9c",
    "orange": "#f0a04b",
    "orange-ink": "#9a4f00",
    "green": "#74bd8f",
    "green-ink": "#1a6b3c",
    "teal": "#5fc0c6",
    "purple": "#b294dd",
    "purple-ink": "#6236a8",
    "red": "#d8394c",
    "grey": "#d5dae3",
}
DARK = {
    "bg": "#171a21",
    "panel": "#232833",
    "rim": "#454d5c",
    "ink": "#eceff5",
    "soft": "#b0b8c6",
    "blue": "#3a66a6",
    "blue-ink": "#a9c8f7",
    "orange": "#a05a10",
    "orange-ink": "#ffc27d",
    "green": "#2d6f45",
    "green-ink": "#9be0b5",
    "teal": "#22727c",
    "purple": "#7350aa",
    "purple-ink": "#d2bbf6",
    "red": "#ff7080",
    "grey": "#3a4250",
}
FILLS = ("panel", "blue", "orange", "green", "teal", "purple", "grey", "red", "bg")
INKS = ("ink", "soft", "blue-ink", "orange-ink", "green-ink", "purple-ink", "red")


def _style() -> str:
    def variables(colours: dict[str, str]) -> str:
        return "svg{" + "".join(f"--{name}:{value};" for name, value in colours.items()) + "}"

    rules = [
        variables(LIGHT),
        "@media (prefers-color-scheme:dark){" + variables(DARK) + "}",
        'text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;fill:var(--ink)}',
        ".s{font-size:12px}.b{font-weight:600}.h{font-size:14px;font-weight:600}",
        ".c{font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px}",
        "line,path{stroke:var(--soft);stroke-width:1.5;fill:none}",
        ".rim{stroke:var(--rim);stroke-width:1}.dash{stroke-dasharray:4 3}.strong{stroke:var(--red)}",
        ".head{fill:var(--soft);stroke:none}.edge{stroke:var(--rim);stroke-width:1}",
        *(f".{name}{{fill:var(--{name})}}" for name in FILLS),
        *(f"text.{name}{{fill:var(--{name})}}" for name in INKS),
    ]
    return "".join(rules)


class Picture:
    """One picture. Coordinates are units from its top left corner; `cls`: names of classes of `_style`."""

    def __init__(self, title: str, description: str) -> None:
        self.title, self.description = title, description
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, cls: str, *, corner: float = 0) -> None:
        size = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        corners = f' rx="{_n(corner)}"' if corner else ""
        self._parts.append(f'<rect {size}{corners} class="{cls}"/>')

    def text(self, x: float, y: float, text: str, cls: str = "", *, anchor: str = "start") -> None:
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        kind = f' class="{cls}"' if cls else ""
        self._parts.append(f'<text x="{_n(x)}" y="{_n(y)}"{place}{kind}>{escape(text, quote=False)}</text>')

    def lines(
        self,
        x: float,
        y: float,
        texts: Sequence[str],
        cls: str = "",
        *,
        anchor: str = "start",
        step: float = 16,
    ) -> None:
        """Several lines of text, the first one at `y`."""
        for number, text in enumerate(texts):
            self.text(x, y + number * step, text, cls, anchor=anchor)

    def line(self, x1: float, y1: float, x2: float, y2: float, cls: str = "") -> None:
        kind = f' class="{cls}"' if cls else ""
        self._parts.append(f'<line x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"{kind}/>')

    def area(self, cls: str, *points: tuple[float, float]) -> None:
        """A filled polygon."""
        corners = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._parts.append(f'<polygon points="{corners}" class="{cls}"/>')

    def arrow(self, *points: tuple[float, float], cls: str = "") -> None:
        """A line through the points, with a head at the last one; its last part is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back = [*points[:-1], (x - 5 * dx, y - 5 * dy)]
        path = "M" + "L".join(f"{_n(a)} {_n(b)}" for a, b in back)
        kind = f' class="{cls}"' if cls else ""
        self._parts.append(f'<path d="{path}"{kind}/>')
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
        head = f"M{_n(x)} {_n(y)}L{_n(left[0])} {_n(left[1])}L{_n(right[0])} {_n(right[1])}z"
        self._parts.append(f'<path d="{head}" class="head"/>')

    def box(self, x: float, y: float, width: float, height: float, *texts: str, cls: str = "panel") -> None:
        """A box with centred lines; the first one is bold."""
        self.rect(x, y, width, height, f"{cls} edge", corner=6)
        top = y + height / 2 - (len(texts) - 1) * 8 + 4.5
        for number, text in enumerate(texts):
            self.text(x + width / 2, top + 16 * number, text, "b" if not number else "s", anchor="middle")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        """Coloured squares with their meanings, in a row. `entries`: (class, meaning)."""
        for cls, meaning in entries:
            self.rect(x, y - 10, 12, 12, cls, corner=2)
            self.text(x + 17, y, meaning, "s")
            x += 17 + 6.6 * len(meaning) + 14

    def svg(self, height: float) -> str:
        """The picture as text."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{_n(height)}" '
            f'viewBox="0 0 {WIDTH} {_n(height)}" role="img" aria-labelledby="t d">\n'
            f'<title id="t">{escape(self.title)}</title>\n<desc id="d">{escape(self.description)}</desc>\n'
            f"<style>{_style()}</style>\n"
            f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{_n(height - 1)}" rx="8" class="bg edge"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def _n(value: float) -> str:
    """A number without needless digits."""
    return f"{value:.1f}".rstrip("0").rstrip(".")
