"""Tables and lines of figures in a terminal, for `report`, `compare`, `plan`, `status` and the live screen.

Rule: no name, figure or command is cut, and no line is wider than the terminal unless a single name is. A table that does not
fit loses columns, then its long names are broken; if that does not help, each row becomes a name with lines of figures below
it. Without a terminal, a row is one line without trailing blanks.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNBOUNDED = 10_000  # columns: wider than any table
MIN_PART_WIDTH = 40  # minimum columns of a part before it is broken
MIN_NAME_WIDTH = 24  # minimum columns of a name before it is broken
NUMBER = re.compile(r"([-+]?[0-9.]\S*( \S+)?|-|nan|inf|)$")  # a right-aligned cell
NO_BREAK_SPACE = "\xa0"  # keeps words together while their line is folded


def fold_parts(parts: Iterable[str], width: int, indent: str = "") -> str:
    """Join parts by commas in lines of `width`, keeping figures with their units and commands in backticks together.

    A word that the indent would push beyond the line gets an unindented line of its own.
    """
    whole = ", ".join(
        part.replace(" ", NO_BREAK_SPACE) if len(part) < width - 2 else part for part in parts if part
    )
    whole = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", NO_BREAK_SPACE), whole)
    whole = re.sub(r"(\d) (s|min|h|x|%)(?!\w)", f"\\1{NO_BREAK_SPACE}\\2", whole)
    fold = textwrap.TextWrapper(
        max(width, 3), indent, f"{indent}  ", break_long_words=False, break_on_hyphens=False
    )
    lines = (
        line.strip(" ,") if len(line.strip(" ,")) <= width < len(line) else line for line in fold.wrap(whole)
    )
    return "\n".join(lines).replace(NO_BREAK_SPACE, " ")


def print_parts(console: Console, *parts: RenderableType) -> None:
    """Print each part; long commands and names are not broken."""
    for part in parts:
        console.print(Parts(part) if isinstance(part, str) else part, overflow="ignore", crop=False)


class Parts:
    """A cell or line of parts that belong together, with as many lines as its width needs. `apart`: one line per part."""

    def __init__(self, *parts: str, style: str = "", apart: bool = False, indent: str = "") -> None:
        self.parts = [part for part in parts if part]
        self.style, self._apart, self._indent = style, apart, indent

    def __str__(self) -> str:
        return ("\n" if self._apart else ", ").join(self.parts)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Text]:
        lines = [[part] for part in self.parts] if self._apart else [self.parts]
        yield Text(
            "\n".join(fold_parts(line, options.max_width, self._indent) for line in lines), style=self.style
        )

    def __rich_measure__(self, _console: Console, _options: ConsoleOptions) -> Measurement:
        whole = max(map(cell_len, str(self).splitlines()), default=0)
        part = min(MIN_PART_WIDTH, max(map(cell_len, self.parts), default=0))
        word = max(map(cell_len, str(self).split()), default=0) + 2  # the indent of further lines
        return Measurement(min(whole, max(part, word)), whole)


Cell = str | RenderableType  # anything but text takes the remaining columns


class Sheet:
    """Rows of figures below headings; the first cell of a row is its name.

    `without`: columns to drop in turn if the terminal is narrow. `turns`: rows may become columns.
    """

    def __init__(
        self, title: str, *heads: str, without: Sequence[Collection[str]] = (), turns: bool = False
    ) -> None:
        self._title, self._heads = title, heads
        self._without, self._turns = [(), *without], turns
        self._rows: list[tuple[list[Cell], str]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, *cells: Cell, style: str = "") -> None:
        """Add a row. Columns without any text are not shown."""
        self._rows.append(([*cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Render the richest table that fits, otherwise lines."""
        if not self._rows:
            return
        if self._title:
            yield Parts(self._title, style="bold")
        turned = [self._turned()] if self._turns else []
        for sheet in (self, *turned, self._with_broken_names(console, options)):
            if (table := sheet.fitting(console, options)) is not None:
                lines = console.render_lines(table, options, pad=False)
                plain = (Text("".join(part.text for part in line).rstrip()) for line in lines)
                yield from [table] if console.is_terminal else plain
                return
        for cells, style in self._rows:
            yield from self._lines(cells, style)

    def fitting(self, console: Console, options: ConsoleOptions) -> Table | None:
        """Return the table with the most columns that fit; None if none does."""
        least = self._least(console, options)
        for without in self._without:
            kept = {i: width for i, width in least.items() if self._heads[i] not in without}
            blanks = 2 * (len(kept) - 1)  # between columns
            if sum(kept.values()) + blanks <= options.max_width:
                return self._table(kept)
        return None

    def _least(self, console: Console, options: ConsoleOptions) -> dict[int, int]:
        """Return non-empty column -> its minimum width."""
        least = {}
        for i, head in enumerate(self._heads):
            cells = [row[i] for row, _ in self._rows]
            lines = [line for cell in (head, *cells) if isinstance(cell, str) for line in cell.splitlines()]
            others = [cell for cell in cells if not isinstance(cell, str)]
            widths = [*map(cell_len, lines), *(Measurement.get(console, options, o).minimum for o in others)]
            if any(map(str, cells)):
                least[i] = max(widths)
        return least

    def _table(self, kept: Mapping[int, int]) -> Table:
        """Build the table. `kept`: columns with their minimum width."""
        table = Table(
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold", collapse_padding=True
        )
        table.show_header = any(self._heads)
        for i, width in kept.items():
            cells = [row[i] for row, _ in self._rows]
            fixed = all(isinstance(cell, str) for cell in cells)
            numbers = fixed and i > 0 and all(NUMBER.match(str(cell)) for cell in cells)
            justify: JustifyMethod = "right" if numbers else "left"
            table.add_column(self._heads[i], justify=justify, no_wrap=fixed, min_width=width)
        for row, style in self._rows:
            shown = (row[i] for i in kept)
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in shown), style=style)
        return table

    def _with_broken_names(self, console: Console, options: ConsoleOptions) -> Sheet:
        """Return the sheet with names broken at "-", "_" or "/" to leave room for the other columns."""
        least = self._least(console, options)
        others = [width for i, width in least.items() if i and self._heads[i] not in self._without[-1]]
        width = max(MIN_NAME_WIDTH, options.max_width - sum(others) - 2 * len(others))
        line = re.compile(rf"(?=.{{{width + 1}}})(.{{1,{width}}}(?<=[-_/]))")
        sheet = Sheet("", *self._heads, without=self._without[-1:])
        for (name, *cells), style in self._rows:
            sheet.add(line.sub(r"\1\n", str(name)), *cells, style=style)
        return sheet

    def _turned(self) -> Sheet:
        """Return the sheet transposed, with names folded after the task."""
        names = (str(cells[0]).replace("/", "/\n", 1) for cells, _ in self._rows)
        sheet = Sheet("", self._heads[0], *names)
        for i, head in list(enumerate(self._heads))[1:]:
            if any(str(cells[i]) for cells, _ in self._rows):
                sheet.add(head, *(cells[i] for cells, _ in self._rows))
        return sheet

    def _lines(self, cells: Sequence[Cell], style: str) -> Iterator[RenderableType]:
        name, *parts = str(cells[0]), *self._parts(cells)
        if not any(self._heads):
            yield Parts(" ".join([name, *parts[:1]]), *parts[1:], style=style)
            return
        if name:
            yield Text(name, style=f"bold {style}")
        yield Parts(*parts, style=style, indent="  ")

    def _parts(self, cells: Sequence[Cell]) -> Iterator[str]:
        for head, cell in zip(self._heads[1:], cells[1:], strict=True):
            if head in self._without[-1]:
                continue
            if isinstance(cell, Parts):
                yield from cell.parts
            elif isinstance(cell, str) and cell:
                yield f"{head} {cell}".strip()
