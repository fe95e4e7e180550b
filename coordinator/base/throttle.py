"""Says when a repeated action is due again.

Rule: the caller gives the time, so that tests and replays need no clock.
"""

from __future__ import annotations


class Throttle:
    """Remembers when each named action was last done."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # action -> seconds, by the caller's clock

    def due(self, action: str, every: float, now: float) -> bool:
        """True where `action` was not done within the last `every` seconds; it counts as done at `now` then."""
        if now - self._last.get(action, float("-inf")) < every:
            return False
        self._last[action] = now
        return True
