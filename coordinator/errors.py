"""Errors by what helps: the operator's action, a retry, or a fix of evalspan; and the exit codes of the commands.

Rule: one base, one leaf per remedy. A message says in one line what happened and what to do next.
Only the shell (the command line, the daemon's loop) catches these errors and sets the exit code.
"""

from __future__ import annotations

from enum import IntEnum


class EvalspanError(Exception):
    """Base of all errors that evalspan raises on purpose."""


class OperatorError(EvalspanError):
    """The operator must change input, config or site. Nothing was submitted; exit code 2."""


class TakenOverError(OperatorError):
    """Another coordinator has the work folder: this one ends, whatever it was about to do."""


class RetryError(EvalspanError):
    """Redis, the Slurm controller or storage is away: the same call may succeed later."""


class BugError(EvalspanError):
    """A bug in evalspan: the journal and the log belong in a bug report."""


class ExitCode(IntEnum):
    """Exit codes of `evalspan`. A comment: what the code means | what to do."""

    # everything asked for is done | nothing
    DONE = 0
    # it is done, and found something: tasks without a score, or findings of a check | the output names each
    FAILED = 1
    # bad input, refused before anything was submitted | change what the one line on stderr names
    REFUSED = 2
    # the cluster, Redis, storage or a tracker could not be used, or a bug in evalspan | the line on stderr says which: mend
    # it, then the same command goes on; a traceback belongs in a bug report
    TROUBLE = 3
    # it cannot be decided | more documents, or a wider limit; a retry of tasks without a score; more nodes
    UNDECIDED = 4
    # cancelled, or ended by Ctrl-C | the same command goes on from what is there
    INTERRUPTED = 130
    # the reader of the output ended, such as `head` | nothing
    READER_GONE = 141
    # ended by SIGTERM; its jobs on Slurm go on | the same command resumes the evaluation
    TERMINATED = 143
