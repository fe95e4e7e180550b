"""Parts of a loop that must not end it.

Rule: what a part raises is said once, with its traceback where it is no trouble of storage, and again when it changes; the
loop goes on, and the part is tried again at its next turn.
It does not know: what the parts do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Contained:
    """Calls parts by name and keeps their faults in."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, str] = {}

    def __call__(self, name: str, part: Callable[..., T], *args: object) -> T | None:
        """What `part(*args)` returns; None where it raised."""
        try:
            found = part(*args)
        except Exception as error:  # noqa: BLE001 (the loop lives for everything else)
            if self._said.get(name) != repr(error):
                self._said[name] = repr(error)
                self._log.warning("%s: %s", name, error, exc_info=not isinstance(error, OSError))
            return None
        self._said.pop(name, None)
        return found
