"""Sentences on the daemon of a work folder: its state, what a submission waits for, what to type. Pure.

Rule: imports no Redis client, since `submit` uses it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from coordinator.cli.layout import clock_time, wrapped
from coordinator.runtime.journal import DAEMON, is_daemon


def show_daemon(holder: str, since: float | None, width: int, now: float, typed: str) -> Iterator[Text]:
    """The daemon's state. `holder`: of the work folder's lock; `typed`: `evalspan daemon` with this call's options."""
    began = "" if since is None else f" since {clock_time(since, now)}"
    if is_daemon(holder):
        said, style = f"daemon: running{began}{holder.removeprefix(DAEMON)}", "green"
    elif holder:
        said = f"daemon: not running; {holder}, has the work folder{began} and takes no submissions"
        style = "yellow"
    else:
        said, style = f"daemon: not running; to start it: `{typed}`", "yellow"
    yield from (Text(line, style=style) for line in wrapped(said, width, rest="  "))


def waits_for_daemon(holder: str, typed: str = "evalspan daemon") -> str:
    """What a submission waits for. `holder`: the command that has the work folder; "": none."""
    if not holder:
        return f"no daemon runs for this work folder; to start one: `{typed}`"
    return (
        f"no daemon runs for this work folder, and none can start before {holder}, ends; "
        f"to start one then: `{typed} --wait`"
    )


def typed(command: str, config: Path | None, work_dir: Path | None) -> str:
    """A command of evalspan with the options of this call, as a person types it."""
    given = (("--config", config), ("--work-dir", work_dir))
    options = (f"{name} {shlex.quote(str(value))}" for name, value in given if value)
    return " ".join(["evalspan", command, *options])
