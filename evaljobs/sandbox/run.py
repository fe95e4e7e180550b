"""Runs many programs at the best isolation level that works here. Called from `__main__` and `scoring`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from evaljobs.sandbox import levels
from evaljobs.sandbox.isolation.lane import run_on
from evaljobs.sandbox.records import Level, Program, Verdict


def run_programs(
    programs: Iterable[Program | Verdict],
    *,
    workers: int | None = None,
    level: Level | None = None,
    allow_unsafe: bool = False,
) -> Iterator[Verdict]:
    """Yield one verdict per program, in input order. A Verdict among the programs is passed on.

    `workers` lanes run at once, by default one per usable core. `level` is by default the best that
    holds here. Raises SandboxUnavailableError at once if it does not hold, or if only rlimits are
    left and not `allow_unsafe`. May be used from several threads and from forked processes.
    """
    chosen = levels.choose_level(level, allow_unsafe=allow_unsafe)
    return run_on(chosen, programs, workers or len(os.sched_getaffinity(0)))
