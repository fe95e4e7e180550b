"""What users of a shared work folder have used: kept in `users.json`, so that a restarted daemon goes on with it.

Rule: `coordinator.allocation.fair_share` decides; this module reads and writes the file. A file that is lost or unreadable
costs the memory of earlier use alone. Called by the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from pydantic import ValidationError

from coordinator.allocation import fair_share
from coordinator.allocation.demand import gpus_of_users
from coordinator.allocation.fair_share import Asker, Usage
from coordinator.base.throttle import Throttle
from coordinator.evaluation.state import State
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import read_record, write_record

WRITE_SECONDS = 60.0  # between two writes of the file: a daemon that is killed forgets no more


class Shares:
    """The users of one work folder. `half_life`: seconds."""

    def __init__(self, paths: WorkPaths, half_life: float) -> None:
        self.paths = paths
        self.half_life = half_life
        self._throttle = Throttle()
        self._usage: Usage | None = None

    def count(self, states: Sequence[State], now: float) -> None:
        """Count what evaluations have used until `now` (unix seconds)."""
        self._usage = fair_share.counted(self.usage, fair_share.totals(states, now), now, self.half_life)
        if self._throttle.due("write", WRITE_SECONDS, now):
            self.write()

    def askers(self, states: Sequence[State]) -> dict[str, Asker]:
        """User -> what decides the user's turn."""
        return fair_share.askers(states, self.usage, gpus_of_users(states))

    @property
    def usage(self) -> Usage:
        if self._usage is None:
            self._usage = self._read()
        return self._usage

    def _read(self) -> Usage:
        try:
            usage = read_record(self.paths.users, Usage)
        except (OSError, ValidationError):
            return Usage()
        there = {i: s for i, s in usage.counted.items() if self.paths.evaluation(i).root.is_dir()}
        return usage.model_copy(update={"counted": there})

    def write(self) -> None:
        """Write the file where the disk takes it, and anything was counted."""
        if self._usage is not None:
            with contextlib.suppress(OSError):
                write_record(self.paths.users, self._usage)
