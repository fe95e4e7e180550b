"""A work folder as `status` and `watch` see it: evaluations, the daemon, pending checkpoints, cordons; the loop of `watch`.

Rule: reads files and the lock; writes nothing. Without a daemon, the inbox is listed, too. On a terminal `watch` stays until
Ctrl-C; with an id until that evaluation has ended or was given up; in a pipe until nothing runs and nothing is pending for a
running daemon. Slurm only explains waits, so an answer that takes longer than LISTING_SECONDS is ignored.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, RenderableType
from rich.text import Text

from coordinator.base.clock import Throttle
from coordinator.base.signals import Signals
from coordinator.decide.allocation import cordons
from coordinator.intake import inbox, pending
from coordinator.interface.cli.screen.board import evaluation_table
from coordinator.interface.cli.screen.evaluation_views import EvaluationView, view_of
from coordinator.interface.cli.screen.listing import Surroundings
from coordinator.interface.cli.screen.live_screen import Watcher
from coordinator.results.report.tables import print_parts
from coordinator.runtime.known_evaluations import Summaries
from coordinator.runtime.summary import GIVEN_UP
from coordinator.runtime.work_lock import WorkLock, is_daemon
from coordinator.site.cluster import JobState, NodeState
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

if TYPE_CHECKING:
    from coordinator.site.cluster.slurm_cli import SlurmCli

LISTING_SECONDS = 5.0  # longest wait for Slurm
DAEMON_SCRIPT = "evalspan-daemon"  # script that runs a daemon as a job
T = TypeVar("T")
LOOK_SECONDS = 2.0  # between two looks at the daemon and pending checkpoints
SLURM_SECONDS = 30.0  # between two `squeue`, while no process holds the work folder
TICK_SECONDS = 0.5  # between two drawings of `watch`
ENDED_SHOWN = 5  # ended evaluations below the running ones


class WorkFolderView:
    """A work folder, read at several intervals. `only`: one evaluation."""

    def __init__(self, config: Config, daemon_command: str, only: EvaluationPaths | None = None) -> None:
        self.only = only
        self.ended: list[EvaluationView] = []
        self._config = config
        self._summaries = Summaries(config, only.root.name if only else None, ENDED_SHOWN)
        self._throttle = Throttle()
        self._daemon_command = daemon_command
        self._queued: Sequence[JobState] = ()  # pending jobs of the daemon itself
        self.around: Surroundings = self._look(time.time())

    def views(self, now: float) -> list[EvaluationView]:
        """Return the evaluations that have not ended, oldest first."""
        if self._throttle.due("look", LOOK_SECONDS, now):
            self.around = self._look(now)
        self._summaries.look(now)
        held = bool(self.around.holder)
        self.ended = [view_of(self._config, s, held=held) for s in self._summaries.ended]
        return [view_of(self._config, s, held=held) for s in self._summaries.open]

    def _look(self, now: float) -> Surroundings:
        paths, command = WorkPaths(self._config.work_dir), self._daemon_command
        holder, trouble = WorkLock(paths.lock).holder_and_trouble()
        queued = () if holder else self._daemons()
        checkpoints = pending.read_pending(paths, now)
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
            cordoned={
                node: until - now for node, until in sorted(cordons.read_cordons(paths.nodes, now).items())
            },
            daemon_command=command,
            queued=queued,
            wrapped="" if holder or queued else self._wrapped,
        )

    def _daemons(self) -> Sequence[JobState]:
        """Return pending jobs of the daemon, queried while no process holds the folder."""
        now = time.time()
        if self._throttle.due("daemons", SLURM_SECONDS, now):
            self._queued = queued_daemons(self._config)
        return self._queued

    @cached_property
    def _wrapped(self) -> str:
        """Return the command that submits the daemon's job; Slurm is asked once for its limits."""
        return wrapped_daemon(self._config, self._daemon_command.partition(" daemon")[2])


def _written_at(lock: Path) -> float | None:
    """Return when the holder took the lock, from the mtime of its file. None if storage is unavailable."""
    try:
        return lock.stat().st_mtime
    except OSError:
        return None


def draw_until_over(
    config: Config, console: Console, daemon_command: str, only: EvaluationPaths | None
) -> str:
    """Draw until there is nothing to watch, and return why; "" after Ctrl-C. `daemon_command`: as typed."""
    sight = WorkFolderView(config, daemon_command, only)
    why, now, below, views = "", time.time(), list[RenderableType](), list[EvaluationView]()
    with Signals() as signals, Watcher(console) as watcher:
        while not signals.received:
            now = time.time()
            views = sight.views(now)
            idle = [] if views else [Text("no evaluation runs or waits", style="dim")]
            below = [] if only else ["", *idle, *sight.around.lines(now)]
            watcher.show(views, "", () if only else sight.ended, below)
            why = _over(sight, views, watcher.draws)
            if why:
                break
            time.sleep(TICK_SECONDS)
    if only or watcher.draws:  # what it showed below stays on the terminal
        print_parts(console, *evaluation_table([*(views if only else ()), *sight.ended], now), *below)
    return "" if only else why


def _over(sight: WorkFolderView, views: Sequence[EvaluationView], draws: bool) -> str:
    """Return why nothing is left to watch; otherwise ""."""
    if sight.only:
        goes_on = sight.around.holder and any(
            view.halt is None or view.halt.word != GIVEN_UP for view in views
        )
        return "" if goes_on else "it has ended or was given up, or no process goes on with it"
    if draws:
        return ""
    if not sight.around.holder:
        return "no evaluation is running in this work folder: `evalspan status` lists all"
    if not views and not (sight.around.daemon and sight.around.checkpoints.waiting):
        return "nothing is running: `evalspan status` lists all evaluations"
    return ""


# --- queries to Slurm -------------------------------------------------------------------------------------------------------


def listed_jobs(config: Config) -> Sequence[JobState]:
    """Return this work folder's jobs; only an option of `eval` may have set the cluster's kind."""
    return _asked(config, "squeue", lambda slurm: slurm.jobs())


def listed_nodes(config: Config) -> Sequence[NodeState]:
    return _asked(config, "sinfo", lambda slurm: slurm.nodes()) if config.cluster.kind == "slurm" else ()


def queued_daemons(config: Config) -> Sequence[JobState]:
    if config.cluster.kind != "slurm":
        return ()
    from coordinator.runtime.wiring import slurm_options
    from coordinator.site.cluster.daemon_job import daemon_job

    name = daemon_job(slurm_options(config)).name
    return [j for j in _asked(config, "squeue", lambda slurm: slurm.jobs_named(name)) if j.phase == "pending"]


def _asked(config: Config, command: str, ask: Callable[[SlurmCli], Sequence[T]]) -> Sequence[T]:
    """Return the answer, or () if Slurm is not installed or does not answer."""
    if shutil.which(command) is None:
        return ()
    from coordinator.runtime.wiring import slurm_options
    from coordinator.site.cluster import ClusterError
    from coordinator.site.cluster.slurm_cli import SlurmCli

    with suppress(ClusterError):
        return ask(SlurmCli(replace(slurm_options(config), timeout_seconds=LISTING_SECONDS)))
    return ()


def wrapped_daemon(config: Config, rest: str, script: str = DAEMON_SCRIPT) -> str:
    """Return the command that submits SCRIPT.sbatch; "" without Slurm. `rest`: following words, with a leading space.

    Its time limit is what partition, account and QOS allow; a day if Slurm does not tell.
    """
    if config.cluster.kind != "slurm":
        return ""
    from coordinator.runtime.wiring import slurm_options
    from coordinator.site.cluster import ClusterError
    from coordinator.site.cluster.daemon_job import daemon_job, own_options, sbatch_line
    from coordinator.site.cluster.slurm_cli import SlurmCli

    options = slurm_options(config)
    job, own = daemon_job(options), own_options(options)
    with suppress(ClusterError):
        job = SlurmCli(replace(own, timeout_seconds=LISTING_SECONDS)).within_limits(job)
    installed = Path(sys.prefix) / "share" / "evalspan" / f"{script}.sbatch"
    cloned = Path(__file__).resolve().parents[4] / "scripts" / installed.name
    file = installed if installed.exists() else cloned
    return sbatch_line(job, options, file, rest, named=script == DAEMON_SCRIPT)
