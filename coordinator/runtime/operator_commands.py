"""Commands of `evalspan cancel | retry | release` to the coordinator of a work folder: files in its spool folder.

Rule: a command is obeyed at least once, then its file is removed. One that cannot be obeyed now is tried again; one that
never can be is passed over, with the reason in the log. Neither holds up the next command. The daemon reads them, and
`evalspan eval` those to its evaluation.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from coordinator.base import clock
from coordinator.base.isolate import isolated
from coordinator.errors import OperatorError, RetryError
from coordinator.runtime.loop import Coordinator
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, read_plain, write_atomic

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 20  # size of a command file


class Command(Record):
    """One command file. `nodes` and `seconds` are of `release`, the other fields of `cancel` and `retry`."""

    command: Literal["cancel", "retry", "release"]
    evaluation_id: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0  # length of the cordon; 0: end it
    reason: str = "on request"


def leave_command(paths: WorkPaths, command: Command) -> Path:
    """Write a command for the coordinator of this work folder, and return its file. OperatorError where it is another user's."""
    folder = paths.spool / "commands"
    file = folder / f"{time.time_ns()}.json"
    try:
        write_atomic(file, command.model_dump_json().encode())
    except PermissionError as error:
        raise OperatorError(
            f"{folder} cannot be written: a work folder obeys its own user; ask the user who runs the daemon"
        ) from error
    return file


def obey_commands(coordinator: Coordinator, only: str | None = None) -> None:
    """Obey the commands in the spool folder, oldest first. `only`: those to this evaluation, and to nodes; the other files
    stay for the daemon.
    """
    folder = coordinator.performer.site.paths.spool / "commands"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if _obeyed(coordinator, path, only):
            with contextlib.suppress(OSError):
                path.unlink()


def _obeyed(coordinator: Coordinator, path: Path, only: str | None) -> bool:
    """True once the command is obeyed or passed over: its file may go."""
    with isolated(partial(_passed_over, path)):
        try:
            if path.lstat().st_uid not in (
                0,
                os.geteuid(),
            ):  # a member of the group that shares the work folder
                raise OperatorError("another user left it, and a work folder obeys its own user")
            command = Command.model_validate_json(read_plain(path, MOST_BYTES))
            if only is not None and command.evaluation_id not in ("", only):
                return False
            _obey(coordinator, command)
        except (OSError, RetryError) as error:
            # EAGAIN: the evaluation is parked, and the log says so already
            if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
                log.warning("the command in %s cannot be obeyed yet: %s", path, error)
            return False
    return True


def _passed_over(path: Path, error: Exception) -> None:
    expected = isinstance(error, (ValidationError, KeyError, OperatorError, FrameError))
    log.warning("the command in %s is passed over: %s", path, error, exc_info=None if expected else error)


def _obey(coordinator: Coordinator, command: Command) -> None:
    if command.command == "cancel":
        coordinator.cancel(command.evaluation_id, command.reason)
    elif command.command == "retry":
        coordinator.revive(command.evaluation_id)
        coordinator.retry(command.evaluation_id)
    else:
        coordinator.release(command.nodes, clock.now() + command.seconds)
