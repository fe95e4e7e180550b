"""What `status` and `watch` see of a work folder: evaluations, the daemon, pending checkpoints, cordons.

Rule: reads files and the lock; writes nothing. Where no daemon runs, what lies in the inbox is listed, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from coordinator.allocation import cordons
from coordinator.base.clock import Throttle
from coordinator.cli.screen.listing import Surroundings
from coordinator.cli.screen.slurm_answers import queued_daemons, wrapped_daemon
from coordinator.cli.screen.standing import Shown, shown_of
from coordinator.cluster import JobState
from coordinator.config.schema import Config
from coordinator.intake import inbox, pending
from coordinator.runtime.summaries import Summaries
from coordinator.runtime.work_lock import WorkLock, is_daemon
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

LOOK_SECONDS = 2.0  # between two looks at the daemon and pending checkpoints
SLURM_SECONDS = 30.0  # between two `squeue`, while no process has the work folder
LAST = 5  # ended evaluations below those that run


class Sight:
    """A work folder, read at several paces. `only`: of one evaluation."""

    def __init__(self, config: Config, daemon_command: str, only: EvaluationPaths | None = None) -> None:
        self.only = only
        self.ended: list[Shown] = []
        self._config = config
        self._summaries = Summaries(config, only.root.name if only else None, LAST)
        self._throttle = Throttle()
        self._daemon_command = daemon_command
        self._queued: Sequence[JobState] = ()  # the daemon's own jobs that are pending
        self.around: Surroundings = self._look(time.time())

    def views(self, now: float) -> list[Shown]:
        """The evaluations that have not ended, oldest first."""
        if self._throttle.due("look", LOOK_SECONDS, now):
            self.around = self._look(now)
        self._summaries.look(now)
        held = bool(self.around.holder)
        self.ended = [shown_of(self._config, s, held=held) for s in self._summaries.ended]
        return [shown_of(self._config, s, held=held) for s in self._summaries.open]

    def _look(self, now: float) -> Surroundings:
        paths, command = WorkPaths(self._config.work_dir), self._daemon_command
        holder, trouble = WorkLock(paths.lock).holder_and_trouble()
        queued = () if holder else self._daemons()
        checkpoints = pending.read(paths, now)
        if not is_daemon(holder):
            why = pending.waits_for_daemon(holder, command)
            if queued:
                why = f"the daemon's job {queued[0].job_id} is queued"
            checkpoints = pending.with_unread(checkpoints, inbox.waiting_files(paths), why, now)
        return Surroundings(
            holder=holder,
            trouble=trouble,
            since=_written_at(paths.lock) if holder else None,
            checkpoints=checkpoints,
            cordoned={node: until - now for node, until in sorted(cordons.read(paths.nodes, now).items())},
            daemon_command=command,
            queued=queued,
            wrapped="" if holder or queued else self._wrapped,
        )

    def _daemons(self) -> Sequence[JobState]:
        """Queued jobs of the daemon, asked for while no process has the folder."""
        now = time.time()
        if self._throttle.due("daemons", SLURM_SECONDS, now):
            self._queued = queued_daemons(self._config)
        return self._queued

    @cached_property
    def _wrapped(self) -> str:
        """How the daemon's job is submitted: Slurm is asked once for its limits."""
        return wrapped_daemon(self._config, self._daemon_command.partition(" daemon")[2])


def _written_at(lock: Path) -> float | None:
    """When the holder took the lock: it writes its name there. None where storage is away."""
    try:
        return lock.stat().st_mtime
    except OSError:
        return None
