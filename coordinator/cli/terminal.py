"""The console of the command line, on which text of others commands nothing.

Rule: without a terminal a record is one line, however long. Names of checkpoints and tasks, errors of jobs, words of a
judge and logs of models may hold escape sequences, which rewrite what a terminal shows: each control character is shown
as "?". Called from `app` and by each command that prints.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from coordinator.report.tables import UNBOUNDED
from evaljobs.log_lines import SHOWN

PLAIN = str.maketrans({"±": "+-", "·": "-", "→": "->", "…": "..."})  # without UTF-8


class Console(console.Console):
    """rich's console; only rich's own styles and controls reach the terminal."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        if not self.is_terminal:
            self.width = UNBOUNDED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isprintable() and (segment.text.isascii() or not self.plain)):
                yield segment
                continue
            text = segment.text.translate(SHOWN)
            if self.plain:
                text = text.translate(PLAIN).encode(self.encoding, "replace").decode(self.encoding)
            yield Segment(text, segment.style)

    @property
    def plain(self) -> bool:
        """Has the terminal no UTF-8?"""
        return not self.encoding.startswith("utf")
