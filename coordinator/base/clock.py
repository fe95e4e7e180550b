"""The coordinator's clock: unix seconds that do not jump when the machine's wall clock is set; and throttling.

Rule: decisions by elapsed time use it. The wall clock is read once, at the start of the process; from then on monotonic
seconds are added.
"""

from __future__ import annotations

import time

# Clocks of two hosts may differ by this much; times further apart are not compared.
SKEW_SECONDS = 60.0

_start = time.time() - time.monotonic()


def now() -> float:
    """Return unix seconds that never decrease while the process lives. They differ from a wall clock that was set since."""
    return _start + time.monotonic()


def not_before(at: float) -> None:
    """Make `now` at least `at` (unix seconds), so that new events of a journal are later than its last one."""
    global _start  # noqa: PLW0603 (a process has one clock)
    _start = max(_start, at - time.monotonic())


class Throttle:
    """Remembers when each named action was last done."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}  # action -> seconds, by the caller's clock

    def due(self, action: str, every: float, now: float) -> bool:
        """Return True if `action` was not done within the last `every` seconds, and record it as done at `now`."""
        if now - self._last.get(action, float("-inf")) < every:
            return False
        self._last[action] = now
        return True
