"""What people ask of whoever is in charge of a work folder: commands in its spool folder.

Rule: a command is obeyed at least once, then its file goes; what cannot be obeyed now is obeyed later, what never can be
is passed over with the reason, and neither hides the next one.
It does not know: how a command is typed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from coordinator.base import clock
from coordinator.errors import OperatorError, RetryError
from coordinator.runtime.loop import Coordinator
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import FrameError, read_plain, write_atomic

log = logging.getLogger(__name__)
MOST_BYTES = 1 << 20  # of a command


class Command(Record):
    """What a person asks of a running daemon, left in its spool folder."""

    command: Literal["cancel", "retry", "release"]
    evaluation_id: str = ""
    nodes: tuple[str, ...] = ()
    seconds: float = 0.0  # that nodes given back are not taken again; 0: take them again
    reason: str = "asked"


def leave_command(paths: WorkPaths, command: Command) -> None:
    """Ask the daemon of this work folder."""
    folder = paths.spool / "commands"
    write_atomic(folder / f"{time.time_ns()}.json", command.model_dump_json().encode())


def obey_commands(coordinator: Coordinator) -> None:
    """Do what `evalspan cancel | retry | release` left in the spool folder for whoever is in charge."""
    folder = coordinator.performer.site.paths.spool / "commands"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        if _obeyed(coordinator, path):
            with contextlib.suppress(OSError):
                path.unlink()


def _obeyed(coordinator: Coordinator, path: Path) -> bool:
    """True once the command is dealt with: done, or passed over."""
    try:
        _obey(coordinator, Command.model_validate_json(read_plain(path, MOST_BYTES)))
    except (OSError, RetryError) as error:
        if getattr(error, "errno", None) != errno.EAGAIN:  # of one that is set aside there is word already
            log.warning("the command in %s cannot be obeyed yet: %s", path, error)
        return False
    except Exception as error:
        expected = isinstance(error, (ValidationError, KeyError, OperatorError, FrameError))
        log.warning("the command in %s is passed over: %s", path, error, exc_info=not expected)
    return True


def _obey(coordinator: Coordinator, command: Command) -> None:
    if command.command == "cancel":
        coordinator.cancel(command.evaluation_id, command.reason)
    elif command.command == "retry":
        coordinator.revive(command.evaluation_id)
        coordinator.retry(command.evaluation_id)
    else:
        coordinator.release(command.nodes, clock.now() + command.seconds)
