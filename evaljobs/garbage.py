"""When a job collects cyclic garbage: rarely while it imports, then only among new objects.

Rule: importing torch and transformers creates a million lasting objects. With Python's thresholds a quarter of the import is
spent on scanning them repeatedly (4.0 against 5.3 s of CPU time up to a loaded model). Called from `__main__`, `trial` and
`scoring.worker`.
"""

from __future__ import annotations

import gc

RARE_THRESHOLDS = (
    200_000,
    50,
    100,
)  # new objects before a collection; youngest collections before each older one
DEFAULT_THRESHOLDS = gc.get_threshold()


def collect_rarely() -> None:
    """Collect rarely during imports, which create almost no garbage."""
    gc.set_threshold(*RARE_THRESHOLDS)


def collect_new() -> None:
    """Exclude all current objects from collections after imports, so that a forked child's collections do not copy them."""
    gc.freeze()
    gc.set_threshold(*DEFAULT_THRESHOLDS)
