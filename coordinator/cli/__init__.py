"""The command line. Each command reads arguments, calls one function and shows the result.

Exit codes: `errors.ExitCode`; what a command's own codes mean stands in `MORE`.
Rule: a module with commands imports typer, rich's console, errors and paths at its head. Each of its functions
imports inside itself what else it needs, so that `--help` loads no Redis client, and a command only its own rooms.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

from coordinator.base.disk_space import RESUMES, shortage
from coordinator.cli import (  # noqa: F401 (each adds its commands)
    catalogue,
    commands,
    diagnose,
    disk,
    doctor,
    evaluate,
    series,
    service,
    tools,
)
from coordinator.cli.app import Console, app
from coordinator.errors import BugError, EvalspanError, ExitCode, OperatorError
from evaljobs.secret_values import scrubbed

__all__ = ["app", "main"]

log = logging.getLogger(__name__)

# Groups of `evalspan -h`, with their commands in the order of use.
GROUPS = {
    "Evaluate": ("eval", "ls", "validate", "import-tasks", "prepare"),
    "Follow": ("status", "watch", "logs", "diagnose", "pause", "resume", "priority", "cancel", "retry"),
    "Results": ("report", "compare", "diff", "gate", "rescore", "export", "serve"),
    "During training": ("daemon", "submit", "release", "supervise"),
    "Site and tools": ("init", "doctor", "check-nodes", "plan", "prune", "clean", "worker", "priors"),
}

# Exit codes that each command may end with.
EVERY = (
    ExitCode.DONE,
    ExitCode.REFUSED,
    ExitCode.TROUBLE,
    ExitCode.INTERRUPTED,
    ExitCode.READER_GONE,
)
# Further exit codes of a command, with what they mean there.
MORE: Mapping[str, Mapping[ExitCode, str]] = {
    "eval": {
        ExitCode.FAILED: "the evaluation ended, and some of its tasks failed or have items without a score",
        ExitCode.TERMINATED: "SIGTERM ended the command; the evaluation is not cancelled",
    },
    "rescore": {ExitCode.FAILED: "tasks failed, or have items without a score"},
    "daemon": {
        ExitCode.DONE: "Ctrl-C, SIGTERM or `scancel` stopped it; with --until-idle also: nothing is left to do"
    },
    "watch": {ExitCode.DONE: "Ctrl-C left the screen, or all that it showed has ended"},
    "serve": {ExitCode.DONE: "SIGTERM stopped it"},
    "retry": {ExitCode.FAILED: "tasks failed again, or have items without a score"},
    "gate": {
        ExitCode.FAILED: "a critical rule says regression, or a score that it requires is missing",
        ExitCode.UNDECIDED: "neither, and a critical rule cannot be decided, or a score of it is missing",
    },
    "doctor": {ExitCode.FAILED: "a finding would stop an evaluation"},
    "check-nodes": {
        ExitCode.FAILED: "a node is bad, or still a suspect",
        ExitCode.UNDECIDED: "no test of nodes passed, so that none can be told from a good one",
    },
    "supervise": {
        ExitCode.DONE: "the training has ended",
        ExitCode.FAILED: "or any other code of the training: it failed, and was not started again",
        ExitCode.TERMINATED: "SIGTERM ended it, and a training that is no job of Slurm's with it",
    },
    "clean": {ExitCode.FAILED: "some files were left alone, since evalspan did not write them"},
}


def _in_groups() -> None:
    """Give each command its group, and the help the order of `GROUPS`."""
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    order = list(group_of)
    for command in app.registered_commands:
        command.rich_help_panel = group_of[str(command.name)]
    for group in app.registered_groups:
        group.rich_help_panel = group_of[str(group.name)]
    app.registered_commands.sort(key=lambda command: order.index(str(command.name)))


_in_groups()

BUG = "evalspan: a bug in evalspan; what follows, and the journal, belong in a bug report"


def main() -> None:
    """Entry point `evalspan`: an operator's error is one line on stderr; only a bug shows a traceback."""
    try:
        app(standalone_mode=True)
    except EvalspanError as error:
        if isinstance(error, BugError):
            log.exception(BUG)
        else:
            _complain(str(error))
        sys.exit(ExitCode.REFUSED if isinstance(error, OperatorError) else ExitCode.TROUBLE)
    except Exception as error:
        if full := shortage(error):
            _complain(f"{full}: {RESUMES}")
        else:
            log.exception(BUG)
        sys.exit(ExitCode.TROUBLE)


def _complain(text: str) -> None:
    Console(stderr=True).print(
        f"evalspan: {scrubbed(text, os.environ)}", style="red", highlight=False, markup=False, soft_wrap=True
    )
