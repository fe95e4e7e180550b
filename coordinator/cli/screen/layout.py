"""How lines of `status` and of the live screen are fitted to a terminal. Pure.

Rule: no line is wider than the terminal, and no name, figure, path or command is cut. What does not fit goes to a line
of its own, or is counted ("and 3 more").
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

JOINT = "\xa0"  # holds a quoted command together while its line is folded
GAP = "  "  # between two columns


def wrapped(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Fold at blanks into lines that begin with `first`, then `rest`; a command in backticks stays whole."""
    joined = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", JOINT), text)
    lines = textwrap.wrap(
        joined,
        max(width, len(rest) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(JOINT, " ") for line in lines] or [first.rstrip()]


def fitted(parts: Sequence[str], width: int, *, least: int = 0) -> str:
    """As many of the parts as fit, but no fewer than `least`, and how many are left out."""
    for shown in range(len(parts), least, -1):
        if len(line := _counted(parts, shown)) <= width:
            return line
    return _counted(parts, min(least, len(parts)))


def _counted(parts: Sequence[str], shown: int) -> str:
    left = len(parts) - shown
    return GAP.join([*parts[:shown], *([f"and {left} more" if shown else f"{left} scores"] if left else [])])


def column_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """The width of each column. `rows`: headings and cells."""
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def padded(cells: Sequence[str], widths: Sequence[int], right: Iterable[int] = ()) -> str:
    """One line of a table; the columns named in `right` end at the right."""
    ends = set(right)
    made = [
        c.rjust(w) if i in ends else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(made).rstrip()


def abreast(lines: Sequence[str], width: int, *, most: int = 3, few: int = 4) -> list[str]:
    """Lines side by side, read downwards, where they are more than `few` and the terminal is wide."""
    wide = max(map(len, lines), default=0)
    count = min(most, (width + len(GAP)) // (wide + len(GAP) or 1))
    if count < 2 or len(lines) <= few:
        return list(lines)
    high = -(-len(lines) // count)
    rows = (lines[row::high] for row in range(high))
    return [GAP.join(line.ljust(wide) for line in row).rstrip() for row in rows]
