"""Errors of jobs, by who must act.

Rule: a job raises one of these where the cause is understood; any other exception is a bug of
evalspan. The text is one line: what happened and what to do next. Raised in all jobs; `Failed`
outcomes carry them.
"""

from __future__ import annotations

from typing import Literal


class JobError(Exception):
    """Base of the errors that end a job with a `Failed` outcome."""

    blame: Literal["operator", "retry", "bug"] = "bug"


class OperatorError(JobError):
    """A retry fails too, until the operator has acted."""

    blame = "operator"


class RetryError(JobError):
    """A retry, perhaps on another node, may work."""

    blame = "retry"


def one_line(error: BaseException) -> str:
    """An error as one line of at most 400 characters, with its type unless it is a JobError."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, JobError):
        return text[:400]
    return f"{type(error).__name__}: {text}"[:400]
