"""Commands of `evalspan cancel | retry | release` to the coordinator of a work folder: files in its spool folder.

Rule: a command is obeyed at least once, then its file is removed. One that cannot be obeyed now is tried again; one that
never can be is passed over, with the reason in the log. Neither holds up the next command. Only the user of the work
folder, and root, command. The daemon reads them, and `evalspan eval` those to its evaluation.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from coordinator.base import clock
from coordinator.base.isolate import isolated, warn_once
from coordinator.base.turns import ALL, Turns
from coordinator.base.words import one_line
from coordinator.errors import OperatorError, RetryError
from coordinator.intake import sources
from coordinator.intake.work_folder import refuse_guest, unsafe
from coordinator.runtime.loop import Coordinator
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, read_with_status, write_atomic

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 20  # size of a command file


class Command(Record):
    """One command file. `nodes` and `seconds` are of `release`, the other fields of `cancel` and `retry`."""

    command: Literal["cancel", "retry", "release"]
    # the name of a folder in the work folder, and no path: `retry` resumes the journal in it
    evaluation_id: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,250})?$")
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0  # length of the cordon; 0: end it
    reason: str = "on request"


def leave_command(paths: WorkPaths, command: Command) -> Path:
    """Write a command for the coordinator of this work folder, and return its file. OperatorError where it is another user's."""
    refuse_guest(paths.root)
    folder = paths.spool / "commands"
    # File WORK_DIR/spool/commands/TIME.json: a command to the coordinator | `cancel`, `retry`, `release` | once it is obeyed
    file = folder / f"{time.time_ns()}.json"
    try:
        write_atomic(file, command.model_dump_json(exclude_defaults=True).encode())
    except PermissionError as error:
        raise OperatorError(
            f"{folder} cannot be written: a work folder obeys its own user; ask the user who runs the daemon"
        ) from error
    return file


def obey_commands(coordinator: Coordinator, only: str | None = None, turns: Turns | None = None) -> None:
    """Obey the commands in the spool folder, oldest first. `only`: those to this evaluation, and to nodes; the other files
    stay for the daemon. `turns`: of a caller that looks again and again.
    """
    folder = coordinator.performer.site.paths.spool / "commands"
    for path in (turns or Turns(folder, ALL)).look():
        if _obeyed(coordinator, path, only):
            try:
                path.unlink()
            except OSError:  # others may have made a folder of this name
                sources.set_aside(path)


def _obeyed(coordinator: Coordinator, path: Path, only: str | None) -> bool:
    """True once the command is obeyed or passed over: its file may go."""
    with isolated(partial(_passed_over, path)):
        try:
            text, status = read_with_status(path, MOST_BYTES)
            if status.st_uid not in (0, os.geteuid()):
                raise OperatorError("another user left it, and a work folder obeys its own user")
            if why := unsafe(status):
                raise OperatorError(why)
            command = Command.model_validate_json(text)
            if only is not None and command.evaluation_id not in ("", only):
                return False
            _obey(coordinator, command)
        except (OSError, RetryError) as error:
            # EAGAIN: the evaluation is parked, and the log says so already
            if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
                warn_once(log, one_line(f"the command in {path} cannot be obeyed yet: {error}"))
            return False
    return True


def _passed_over(path: Path, error: Exception) -> None:
    expected = isinstance(error, (ValidationError, KeyError, OperatorError, FrameError))
    said = one_line(f"the command in {path} is passed over: {error}")
    log.warning("%s", said, exc_info=None if expected else error)


def _obey(coordinator: Coordinator, command: Command) -> None:
    name = command.evaluation_id
    if command.command == "cancel":
        coordinator.cancel(name, command.reason)
    elif command.command == "retry":
        coordinator.revive(name)
        coordinator.retry(name)
    else:
        coordinator.cordon(command.nodes, clock.now() + command.seconds)
