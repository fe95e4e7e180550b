"""The loop of `evalspan watch`: follows evaluations that another process runs, and draws them.

Rule: writes nothing. At a terminal it stays until Ctrl-C; with an id until that evaluation has ended or
is given up; in a pipe until
nothing runs and nothing waits that a running daemon will take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from coordinator.base.signals import Signals
from coordinator.cli.screen.board import board
from coordinator.cli.screen.live_screen import Watcher
from coordinator.cli.screen.sight import Sight
from coordinator.cli.screen.standing import Shown
from coordinator.config.schema import Config
from coordinator.report.tables import print_parts
from coordinator.runtime.summary import GIVEN_UP
from evaljobs.contract.paths import EvaluationPaths

TICK_SECONDS = 0.5  # between two drawings


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
        print_parts(console, *board([*(views if only else ()), *sight.ended], now), *below)
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
