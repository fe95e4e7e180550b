"""Whether an evaluation that has not ended goes on, and if not, why and since when.

Rule: screens, pages and reports all ask here, so that none says "running" of what no process runs. The kernel frees a
work folder's lock when its process dies: an evaluation is stopped where no process holds it.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from coordinator.base.words import clock_time
from coordinator.runtime.journal import WorkLock
from coordinator.runtime.status_file import Parked, read_status
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

GIVEN_UP = "given up"  # only `retry` brings it back
STOPPED = "no process goes on with it: type the same `evalspan eval …` again, or start `evalspan daemon`"


class Halt(NamedTuple):
    """`word`: stopped | parked | given up; `since`: unix seconds."""

    word: str
    since: float
    why: str

    @property
    def text(self) -> str:
        return f"{self.word} since {clock_time(self.since, time.time())}: {self.why}"


def halt_of(paths: EvaluationPaths, *, runs: bool) -> Halt | None:
    """Of an evaluation that has not ended; None where it goes on. `runs`: a process holds the work folder."""
    status = read_status(paths)
    if isinstance(status, Parked):
        return Halt(word_of(status), status.at, status.error)
    return None if runs else Halt("stopped", last_sign(paths), STOPPED)


def word_of(parked: Parked) -> str:
    return GIVEN_UP if parked.until is None else "parked"


def last_sign(paths: EvaluationPaths) -> float:
    """When the last line was appended to its journal, in unix seconds; now where storage is away."""
    try:
        return paths.journal.stat().st_mtime
    except OSError:
        return time.time()


def is_held(paths: EvaluationPaths) -> bool:
    """Does a process hold this evaluation's work folder?"""
    return WorkLock(WorkPaths(paths.root.parent).lock).held()
