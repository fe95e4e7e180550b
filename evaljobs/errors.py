"""Errors of jobs, by who must act.

Rule: a job raises one of these if the cause is understood; any other exception is a bug of evalspan. The text is one line:
what happened and what to do next. Raised in all jobs; `Failed` outcomes carry them.
"""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Final, Literal

from evaljobs.secret_values import scrub_text

MAX_TRACEBACK: Final = 4000  # characters kept of a traceback


class JobError(Exception):
    """Base of the errors that end a job with a `Failed` outcome."""

    blame: Literal["operator", "retry", "bug"] = "bug"


class OperatorError(JobError):
    """A retry fails, too, until the operator has acted."""

    blame = "operator"


class RetryError(JobError):
    """A retry, perhaps on another node, may work."""

    blame = "retry"


def one_line(error: BaseException) -> str:
    """Return an error as one line of at most 400 characters, without secrets; with its type unless it is a JobError."""
    text = " ".join(scrub_text(str(error), os.environ).split())
    for f in traceback.extract_tb(error.__traceback__)[-1:] if not text else ():
        text = f"no message, at {Path(f.filename).name}:{f.lineno}: {f.line}"
    if isinstance(error, JobError):
        return text[:400]
    return f"{type(error).__name__}: {text or 'no message'}"[:400]


def error_details() -> str:
    """Return the end of the current exception's traceback, without secrets."""
    return scrub_text(traceback.format_exc(), os.environ)[-MAX_TRACEBACK:]
