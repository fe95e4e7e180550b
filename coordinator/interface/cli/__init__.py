"""The command line. Each command reads arguments, calls one function and shows the result.

Exit codes: `errors.ExitCode`; their meanings for single commands are in `COMMAND_EXIT_CODES`. Rule: a module with commands imports typer,
rich's console, errors and paths at the top. Its functions import everything else locally, so that `--help` loads no Redis
client, and a command only its own rooms.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Mapping

from coordinator.base.disk_space import FREE_SPACE_ADVICE, disk_shortage
from coordinator.errors import BugError, EvalspanError, ExitCode, OperatorError
from coordinator.interface.cli import (  # noqa: F401 (each adds its commands)
    catalogue,
    commands,
    compare,
    diagnose,
    disk,
    doctor,
    evaluate,
    node_tools,
    plan,
    series,
    service,
)
from coordinator.interface.cli.app import Console, app
from evaljobs.secret_values import scrub_text

__all__ = ["app", "main"]

log = logging.getLogger(__name__)

# Groups of `evalspan -h`, with their commands in order of use.
GROUPS = {
    "Evaluate": ("eval", "ls", "validate", "import-tasks", "prepare"),
    "Follow": ("status", "watch", "logs", "diagnose", "pause", "resume", "priority", "cancel", "retry"),
    "Results": ("report", "compare", "diff", "gate", "rescore", "export", "serve"),
    "During training": ("daemon", "submit", "release", "supervise"),
    "Site and tools": ("init", "doctor", "check-nodes", "plan", "prune", "clean", "worker", "priors"),
}

# Exit codes of all commands.
COMMON_EXIT_CODES = (
    ExitCode.DONE,
    ExitCode.REFUSED,
    ExitCode.TROUBLE,
    ExitCode.INTERRUPTED,
    ExitCode.READER_GONE,
)
# Additional exit codes of a command, with their meanings there.
COMMAND_EXIT_CODES: Mapping[str, Mapping[ExitCode, str]] = {
    "eval": {
        ExitCode.FAILED: "the evaluation ended, and some of its tasks failed or have items without a score",
        ExitCode.TERMINATED: "SIGTERM ended the command; the evaluation is not cancelled",
    },
    "rescore": {ExitCode.FAILED: "tasks failed, or have items without a score"},
    "daemon": {
        ExitCode.DONE: "Ctrl-C, SIGTERM or `scancel` stopped it; with --until-idle also: nothing is left to do"
    },
    "watch": {ExitCode.DONE: "Ctrl-C left the screen, or everything shown has ended"},
    "serve": {ExitCode.DONE: "SIGTERM stopped it"},
    "retry": {ExitCode.FAILED: "tasks failed again, or have items without a score"},
    "gate": {
        ExitCode.FAILED: "a critical rule found a regression, or a score that it requires is missing",
        ExitCode.UNDECIDED: "otherwise, if a critical rule cannot be decided or lacks a score",
    },
    "doctor": {ExitCode.FAILED: "a finding would stop an evaluation"},
    "check-nodes": {
        ExitCode.FAILED: "a node is bad, or still a suspect",
        ExitCode.UNDECIDED: "no test passed, so bad nodes cannot be told from good ones",
    },
    "supervise": {
        ExitCode.DONE: "the training has ended",
        ExitCode.FAILED: "or any other code of the training: it failed and was not restarted",
        ExitCode.TERMINATED: "SIGTERM ended it, together with a training that is not a Slurm job",
    },
    "clean": {ExitCode.FAILED: "some files were left alone, since evalspan did not write them"},
}


def _in_groups() -> None:
    """Assign commands to their groups, and order the help as in `GROUPS`."""
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    order = list(group_of)
    for command in app.registered_commands:
        command.rich_help_panel = group_of[str(command.name)]
    for group in app.registered_groups:
        group.rich_help_panel = group_of[str(group.name)]
    app.registered_commands.sort(key=lambda command: order.index(str(command.name)))


_in_groups()

# errors of a place that a person named, wherever it is looked at
PLACE_ERRORS = (errno.EACCES, errno.ENAMETOOLONG, errno.ELOOP)
BUG_MESSAGE = "evalspan: a bug in evalspan; please report it with the following text and the journal"


def main() -> None:
    """Entry point `evalspan`: an operator's error is one line on stderr; only a bug prints a traceback."""
    try:
        app(standalone_mode=True)
    except EvalspanError as error:
        if isinstance(error, BugError):
            log.exception(BUG_MESSAGE)
        else:
            _complain(str(error))
        sys.exit(ExitCode.REFUSED if isinstance(error, OperatorError) else ExitCode.TROUBLE)
    except Exception as error:
        if full := disk_shortage(error):
            _complain(f"{full}: {FREE_SPACE_ADVICE}")
        elif isinstance(error, OSError) and error.errno in PLACE_ERRORS and error.filename is not None:
            _complain(f"{os.fsdecode(error.filename)}: {error.strerror}")
            sys.exit(ExitCode.REFUSED)
        else:
            log.exception(BUG_MESSAGE)
        sys.exit(ExitCode.TROUBLE)


def _complain(text: str) -> None:
    Console(stderr=True).print(
        f"evalspan: {scrub_text(text, os.environ)}",
        style="red",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
