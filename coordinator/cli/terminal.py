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


class Console(console.Console):
    """rich's console; only rich's own styles and controls reach the terminal."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        if not self.is_terminal:
            self.width = UNBOUNDED

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(segment.text.translate(SHOWN), segment.style)
