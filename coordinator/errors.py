"""Errors by what helps: the operator's action, a retry, or a fix of evalspan.

Rule: one base, one leaf per remedy. A message says in one line what happened and what to do next.
Only the shell (the command line, the daemon's loop) catches these errors and sets the exit code.
"""

from __future__ import annotations


class EvalspanError(Exception):
    """Base of all errors that evalspan raises on purpose."""


class OperatorError(EvalspanError):
    """The operator must change input, config or site. Nothing was submitted; exit code 2."""


class RetryError(EvalspanError):
    """Redis, the Slurm controller or storage is away: the same call may succeed later."""


class BugError(EvalspanError):
    """A bug in evalspan: the journal and the log belong in a bug report."""
