"""The coordinator's clock: unix seconds that a clock which is set does not move.

Rule: whoever decides by how long ago something was asks here. It is read once, at the start of the process; from then
on seconds are counted, so a machine whose clock jumps an hour is neither late for everything nor asleep for an hour.
"""

from __future__ import annotations

import time

_START = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds, never going back while the process lives; off from the wall clock by what that was set since."""
    return _START + time.monotonic()
