"""Signals that ask a loop to end.

Rule: a signal is noted and nothing else, so that no write is torn by an exception; the loop asks between two ticks.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType


class Signals:
    """SIGINT and SIGTERM as a count to be asked for, so that no write is torn by an exception."""

    def __init__(self, watched: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.received: list[int] = []
        self._watched = watched
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in self._watched:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)
