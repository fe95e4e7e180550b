"""Errors by remedy: the operator's action, a retry, or a fix of evalspan; and the exit codes of the commands.

Rule: one base, one leaf per remedy. A message says in one line what happened and what to do next. Only the shell (the command
line, the daemon's loop) catches these errors and sets the exit code.
"""

from __future__ import annotations

from enum import IntEnum


class EvalspanError(Exception):
    """Base of all errors that evalspan raises on purpose."""


class OperatorError(EvalspanError):
    """The operator must change input, config or site. Nothing was submitted; exit code 2."""


class TakenOverError(OperatorError):
    """Another coordinator has taken the work folder: this one ends immediately."""


class RetryError(EvalspanError):
    """Redis, the Slurm controller or storage is unavailable: the same call may succeed later."""


class BugError(EvalspanError):
    """A bug in evalspan: please report it with the journal and the log."""


class ExitCode(IntEnum):
    """Exit codes of `evalspan`. A comment: what the code means | what to do."""

    # everything asked for is done | nothing
    DONE = 0
    # it is done, and found something: tasks without a score, or findings of a check | the output names each
    FAILED = 1
    # bad input, refused before anything was submitted | fix what the line on stderr names
    REFUSED = 2
    # the cluster, Redis, storage or a tracker could not be used, or a bug in evalspan | the line on stderr says which: fix
    # it, then run the same command to continue; please report a traceback as a bug
    TROUBLE = 3
    # it cannot be decided | more documents, or a wider limit; a retry of tasks without a score; more nodes
    UNDECIDED = 4
    # cancelled, or ended by Ctrl-C | run the same command to continue
    INTERRUPTED = 130
    # the reader of the output ended, such as `head` | nothing
    READER_GONE = 141
    # ended by SIGTERM; its Slurm jobs keep running | run the same command to resume
    TERMINATED = 143
