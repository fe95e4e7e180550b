"""What `status` and `watch` read of a work folder besides its evaluations: the daemon, pending checkpoints, cordons.

Rule: reads files and the lock; writes nothing. Where no daemon runs, what lies in the inbox is listed, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from coordinator.allocation import cordons
from coordinator.cli.screen.listing import show_cordons, show_daemon, show_pending
from coordinator.cluster import JobState
from coordinator.intake import inbox, pending
from coordinator.runtime.work_lock import WorkLock, is_daemon
from evaljobs.contract.paths import WorkPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """`holder`: the command that has the work folder, "" for none; `since`: unix seconds; `cordoned`: node -> seconds."""

    holder: str
    since: float | None
    checkpoints: pending.Checkpoints
    cordoned: Mapping[str, float]
    daemon_command: str  # with this call's options
    queued: Sequence[JobState] = ()  # pending jobs of the daemon's wrapper, where none has the folder
    wrapped: str = ""  # how the wrapper is submitted; "" without Slurm

    @property
    def daemon(self) -> bool:
        return is_daemon(self.holder)

    def as_json(self) -> dict[str, Any]:
        """What `status --json` has besides evaluations."""
        return {
            "daemon": self.daemon,
            "holder": self.holder or None,
            "holder_since": self.since,
            "kept_back_seconds": self.cordoned,
            "waiting": [one.model_dump(mode="json") for one in self.checkpoints.waiting],
            "refused": [one.model_dump(mode="json", exclude={"command"}) for one in self.checkpoints.refused],
        }

    def lines(self, now: float) -> Iterator[RenderableType]:
        yield from show_pending(self.checkpoints, now)
        yield from show_cordons(self.cordoned)
        yield show_daemon(self.holder, self.since, now, self.daemon_command, self.queued, self.wrapped)


def read_surroundings(
    paths: WorkPaths,
    daemon_command: str,
    now: float,
    ask: Callable[[], Sequence[JobState]] = tuple,
    wrapped: Callable[[], str] = str,
) -> Surroundings:
    """`daemon_command`: as it is typed, with this call's options; `now`: unix seconds.

    `ask`: for queued daemons; `wrapped`: for how one is submitted. Neither is called where a process has the folder.
    """
    holder = WorkLock(paths.lock).holder()
    queued: Sequence[JobState] = () if holder else ask()
    checkpoints = pending.read(paths, now)
    if not is_daemon(holder):
        why = pending.waits_for_daemon(holder, daemon_command)
        if queued:
            why = f"the daemon's job {queued[0].job_id} is queued"
        checkpoints = pending.with_unread(checkpoints, inbox.waiting_files(paths), why, now)
    return Surroundings(
        holder=holder,
        since=_written_at(paths.lock) if holder else None,
        checkpoints=checkpoints,
        cordoned={node: until - now for node, until in sorted(cordons.read(paths.nodes, now).items())},
        daemon_command=daemon_command,
        queued=queued,
        wrapped="" if holder or queued else wrapped(),
    )


def _written_at(lock: Path) -> float | None:
    """When the holder took the lock: it writes its name there. None where storage is away."""
    try:
        return lock.stat().st_mtime
    except OSError:
        return None
