"""A limit on the seconds that a task's own code may take: metrics, filters, chat templates.

Rule: by SIGALRM, which interrupts Python, Jinja and `re`, but no long call into C. Called from `scoring` and `replay_model`.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType


class LateError(BaseException):
    """The deadline. A BaseException: metrics catch Exception and return a value of their own."""


@contextlib.contextmanager
def task_deadline(seconds: float | None) -> Iterator[None]:
    """Raise LateError after `seconds` (None: never); afterwards restore an earlier alarm. For the main thread.

    Metrics set alarms and leave them (lm-eval's minerva_math), so both are set again each time.
    """
    before = signal.signal(signal.SIGALRM, _late)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds or 0.0)
    started = time.monotonic()
    try:
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        finally:  # the deadline may come in this moment
            signal.signal(signal.SIGALRM, before)
            if left:
                signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - started)))


def _late(_number: int, _frame: FrameType | None) -> None:
    raise LateError
