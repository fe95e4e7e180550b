"""Signals that end a loop, and the cause of a SIGTERM within a Slurm job.

Rule: a handler only records its signal, so that no exception interrupts a write; the loop checks between two ticks.
"""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping, Sequence
from types import FrameType

from coordinator.base.run_command import CommandError, run_command

SIGNAL_EXIT_BASE = 128  # exit codes above it name a signal
SCONTROL_SECONDS = 5.0  # for Slurm's answer: SIGKILL follows SIGTERM after KillWait, by default 30 s


class Signals:
    """SIGINT and SIGTERM, in order of arrival. Outside of the main thread Python forbids handlers, so none is recorded."""

    def __init__(self, watched: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self.received: list[int] = []
        self._watched = watched
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        for number in self._watched if threading.current_thread() is threading.main_thread() else ():
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.append(number)


def cancelled_by_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether `scancel` ended the Slurm job of this process. False outside of a job, or if Slurm does not answer."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return False
    try:
        text = run_command(["scontrol", "--oneliner", "show", "job", job], seconds=SCONTROL_SECONDS)
    except CommandError:
        return False
    return shows_cancelled(text, int(environment.get("SLURM_RESTART_COUNT") or 0))


def shows_cancelled(text: str, restarts: int) -> bool:
    """Does `scontrol --oneliner show job` show a job that was cancelled? `restarts`: how often it had been requeued when
    it started. Pure.

    Slurm sends SIGTERM for `scancel`, requeue, preemption and the time limit alike, and prints COMPLETING for each while
    the job ends. A requeue has counted one more restart by then, the time limit has its own Reason, a job that is warned
    of its preemption is still RUNNING, and one that a preemption ends (PreemptMode=CANCEL) has the time of it.
    """
    fields = dict(re.findall(r"(\S+?)=(\S*)", text))
    return (
        fields.get("JobState") in ("COMPLETING", "CANCELLED")
        and fields.get("Reason") == "None"
        and fields.get("PreemptTime", "None") == "None"
        and fields.get("Restarts") == str(restarts)
    )
