"""Errors of jobs, by who must act.

Rule: a job raises one of these where it knows who must act; anything else is our bug. The text is one line: what
happened and what to do next. It does not know: which job it is.
"""

from __future__ import annotations

from typing import Literal


class JobError(Exception):
    """Base of the errors that end a job with an outcome of its own."""

    blame: Literal["operator", "retry", "bug"] = "bug"


class OperatorError(JobError):
    """Trying again changes nothing until somebody has acted."""

    blame = "operator"


class RetryError(JobError):
    """Trying again, perhaps elsewhere, may work."""

    blame = "retry"


def one_line(error: BaseException) -> str:
    """An error as one line of at most 400 characters, with its type where it is not one of ours."""
    text = " ".join(str(error).split()) or "no message"
    if isinstance(error, JobError):
        return text[:400]
    return f"{type(error).__name__}: {text}"[:400]
