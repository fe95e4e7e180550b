"""`news.json`: evaluations whose end is still to be sent, so that the death of a daemon loses no news.

Rule: an id is in the file from the turn in which the daemon first runs the evaluation, until the news of its end were sent
or given up. So the file holds what is open and what waits for its receiver. The loop alone writes it, where it differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from coordinator.monitor.notify import News, Notifier
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_record


class NewsFile(Kept):
    """`news.json`."""

    schema_version: int = 1
    evaluations: tuple[str, ...] = ()


class Owed:
    """The ids in `news.json`. OSError where the file is there and cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.ids = set(_read(path))
        self._written = set(self.ids)
        self._sent: deque[str] = deque()  # filled by the notifier's thread

    def send(self, notifier: Notifier, evaluation_id: str, make: Callable[[], Iterable[News]]) -> None:
        """Have the news of an end sent; then its id is no longer owed."""
        self.ids.add(evaluation_id)
        notifier.tell(make, partial(self._sent.append, evaluation_id))

    def write(self) -> None:
        """Write the file where ids were added, or their news were sent. OSError."""
        while self._sent:
            self.ids.discard(self._sent.popleft())
        if self.ids != self._written:
            write_record(self._path, NewsFile(evaluations=tuple(sorted(self.ids))))
            self._written = set(self.ids)


def _read(path: Path) -> tuple[str, ...]:
    try:
        return NewsFile.model_validate_json(path.read_bytes()).evaluations
    except (FileNotFoundError, ValidationError):
        return ()
