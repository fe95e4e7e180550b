"""When a job collects cyclic garbage: rarely while it imports, then among new objects alone.

Rule: importing torch and transformers makes a million objects that stay. With Python's thresholds a
quarter of the import is spent on looking at them again and again (4.0 against 5.3 s of CPU time up
to a loaded model). Called from `__main__`, `trial` and `scoring.worker`.
"""

from __future__ import annotations

import gc

RARE = (200_000, 50, 100)  # new objects before a collection; youngest collections before each older one
USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """For imports: nearly nothing of what they make is garbage."""
    gc.set_threshold(*RARE)


def collect_new() -> None:
    """After imports: what there is now is never looked at again, nor copied by a forked child's collections."""
    gc.freeze()
    gc.set_threshold(*USUAL)
