"""Errors by who must act: the operator, time, or we.

Rule: one base, one leaf per actor. A message says in one line what happened and what to do next; only the shell (the
command line, the daemon's loop) catches them and turns them into an exit code.
It does not know: where it was raised.
"""

from __future__ import annotations


class EvalspanError(Exception):
    """Base of all errors that we raise on purpose."""


class OperatorError(EvalspanError):
    """A person must change something (input, config, site). Nothing was submitted; the command line exits with 2."""


class RetryError(EvalspanError):
    """Something is away for now (Redis, the controller, storage): the same call may succeed later."""


class BugError(EvalspanError):
    """A rule of ours was broken: the journal and the log belong in a bug report."""
