"""The loop of `evalspan watch`: follows evaluations that another process runs, and draws them.

Rule: writes nothing. At a terminal it stays until Ctrl-C; with an id until that evaluation has ended or
is given up; in a pipe until
nothing runs and nothing waits that a running daemon will take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property

from rich.console import Console, RenderableType
from rich.text import Text

from coordinator.base.signals import Signals
from coordinator.base.throttle import Throttle
from coordinator.cli.screen.board import board, show
from coordinator.cli.screen.live_screen import Watcher
from coordinator.cli.screen.slurm_answers import queued_daemons, wrapped_daemon
from coordinator.cli.screen.standing import Shown, shown_of
from coordinator.cli.screen.surroundings import Surroundings, read_surroundings
from coordinator.cluster import JobState
from coordinator.config.schema import Config
from coordinator.runtime.summaries import Summaries
from coordinator.runtime.summary import GIVEN_UP
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

TICK_SECONDS = 0.5  # between two drawings
LOOK_SECONDS = 2.0  # between two looks at the daemon and pending checkpoints
SLURM_SECONDS = 30.0  # between two `squeue`, while no process has the work folder
LAST = 5  # ended evaluations below those that run


class Sight:
    """What `watch` shows of a work folder, read at several paces."""

    def __init__(self, config: Config, daemon_command: str, only: EvaluationPaths | None) -> None:
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
        work, command = WorkPaths(self._config.work_dir), self._daemon_command
        return read_surroundings(work, command, now, self._daemons, self._wrapped)

    def _daemons(self) -> Sequence[JobState]:
        """Queued jobs of the daemon, asked for while no process has the folder."""
        now = time.time()
        if self._throttle.due("daemons", SLURM_SECONDS, now):
            self._queued = queued_daemons(self._config)
        return self._queued

    @cached_property
    def _daemon_line(self) -> str:
        return wrapped_daemon(self._config, self._daemon_command.partition(" daemon")[2])

    def _wrapped(self) -> str:
        """How the daemon's job is submitted: Slurm is asked once for its limits."""
        return self._daemon_line


def watch(config: Config, console: Console, daemon_command: str, only: EvaluationPaths | None) -> str:
    """Draw until it is over, and return why it is; "" after Ctrl-C. `daemon_command`: as typed."""
    sight = Sight(config, daemon_command, only)
    why, now, below, views = "", time.time(), list[RenderableType](), list[Shown]()
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
        show(console, [*board([*(views if only else ()), *sight.ended], now), *below])
    return "" if only else why


def _over(sight: Sight, views: Sequence[Shown], draws: bool) -> str:
    """Why nothing is left to watch; "" where something is."""
    if sight.only:
        goes_on = sight.around.holder and any(
            view.halt is None or view.halt.word != GIVEN_UP for view in views
        )
        return "" if goes_on else "it has ended or was given up, or no process goes on with it"
    if draws:
        return ""
    if not sight.around.holder:
        return "no process evaluates in this work folder: `evalspan status` lists what there is"
    if not views and not (sight.around.daemon and sight.around.checkpoints.waiting):
        return "nothing runs, and outside a terminal `watch` ends then: `evalspan status` lists what there is"
    return ""
