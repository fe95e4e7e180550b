"""The coordinator's clock: unix seconds that a clock which is set does not move.

Rule: whoever decides by how long ago something was asks here. It is read once, at the start of the process; from then
on seconds are counted, so a machine whose clock jumps an hour is neither late for everything nor asleep for an hour.
"""

from __future__ import annotations

import time

_start = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, never going back while the process lives; off from the wall clock by what that was set since."""
    return _start + time.monotonic()


def not_before(at: float) -> None:
    """From here on no time is before `at` (unix seconds): what follows a journal follows its last event, too."""
    global _start  # noqa: PLW0603 (a process has one clock)
    _start = max(_start, at - time.monotonic())
