"""Runs `evalspan eval` until its evaluation has ended; the first Ctrl-C asks whether to cancel.

Rule: the answer is read without waiting, so the loop goes on. A second Ctrl-C, or the first without
a terminal, means yes. SIGTERM leaves the jobs to the next run; a SIGTERM from `scancel` cancels.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

import typer
from rich.console import Console

from coordinator.base.signals import Signals, cancelled_by_slurm
from coordinator.cli.live_screen import Watcher
from coordinator.cluster.local import LocalCluster
from coordinator.errors import OperatorError, RetryError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.runtime.loop import Coordinator
from coordinator.runtime.operator_commands import obey_commands
from coordinator.runtime.runner import Running

QUESTION = "Cancel this evaluation? y: yes, n: it goes on, Ctrl-C again: yes [y/N] "
LEFT = "SIGTERM: the evaluation is not cancelled; the same command resumes it"
TERMINATED = 143  # exit code, as a shell reports SIGTERM


class Interrupt:
    """Asks the person at the terminal whether to cancel, between two ticks of the loop."""

    def __init__(self, signals: Signals, watcher: Watcher, keyboard: TextIO) -> None:
        self.cancelled = False
        self._signals = signals
        self._watcher = watcher
        self._keyboard = keyboard
        self._seen = 0  # signals handled so far
        self._asking = False

    def show(self, runnings: Sequence[Running], trouble: str) -> None:
        """Draw, unless a question is open."""
        if not self._asking:
            self._watcher.show(runnings, trouble)

    def wanted(self) -> bool:
        """True once, when the person cancels. At SIGTERM raises typer.Exit; the evaluation stays open."""
        new = self._signals.received[self._seen :]
        self._seen += len(new)
        if self.cancelled:
            return False
        if signal.SIGTERM in new and not cancelled_by_slurm(os.environ):
            self._watcher.console.print(LEFT, soft_wrap=True)
            raise typer.Exit(TERMINATED)
        if new and (signal.SIGTERM in new or self._asking or len(new) > 1 or not self._keyboard.isatty()):
            return self._close(cancel=True)
        if new:
            self._asking = True
            self._watcher.pause()
            self._watcher.console.print(QUESTION, end="", markup=False, highlight=False, soft_wrap=True)
        elif self._asking and select.select([self._keyboard], [], [], 0)[0]:
            # end of input (the terminal is gone) means no
            return self._close(cancel=self._keyboard.readline().strip().lower() in ("y", "yes"))
        return False

    def _close(self, *, cancel: bool) -> bool:
        if self._asking:
            self._asking = False
            self._watcher.go_on()
        self.cancelled = cancel
        return cancel


def drive(coordinator: Coordinator, record: EvaluationRecord, console: Console) -> Running:
    """Run the loop until this one evaluation has ended.

    Ctrl-C asks once, then cancels. SIGTERM ends this process with exit code 143; its jobs on Slurm go on.
    """
    with Signals() as signals, coordinator.in_charge("evalspan eval"), Watcher(console) as watcher:
        coordinator.accept_or_wait(record)
        interrupt = Interrupt(signals, watcher, sys.stdin)
        # An earlier run was cancelled: typing the same command again resumes it. None: not yet known.
        cancelled_before: bool | None = None

        def tick() -> None:
            interrupt.show(list(coordinator.running.values()), coordinator.trouble)
            obey_commands(coordinator)
            if interrupt.wanted():
                _cancel(coordinator, record.evaluation_id)
                console.print("cancelling: its jobs are ended, node memory is cleared")

        def over() -> bool:
            nonlocal cancelled_before
            running = coordinator.running.get(record.evaluation_id)
            if running is None:
                if why := coordinator.lost(record.evaluation_id):
                    raise OperatorError(f"{record.evaluation_id} was given up: {why}")
                return False
            if cancelled_before is None:
                cancelled_before = bool(running.state.ending.cancelled)
            if running.state.ended_at is None:
                return False
            if cancelled_before and not interrupt.cancelled:
                with suppress(OSError):  # full disk: a later tick tries again
                    coordinator.retry(record.evaluation_id)
                    cancelled_before = False
                return running.state.ended_at is not None and not cancelled_before
            return True

        coordinator.run(over, tick)
        return coordinator.running[record.evaluation_id]


def _cancel(coordinator: Coordinator, evaluation_id: str) -> None:
    """RetryError where the journal cannot take it, as on a full disk: the command ends, and no job runs unseen."""
    try:
        coordinator.cancel(evaluation_id, "interrupted")
    except (OSError, KeyError) as error:
        local = isinstance(coordinator.cluster, LocalCluster)
        jobs = (
            "its jobs end with this command"
            if local
            else f"its jobs go on (`evalspan cancel {evaluation_id}`)"
        )
        raise RetryError(
            f"{evaluation_id} is not cancelled, {jobs}: {coordinator.trouble or error}; the same command resumes it"
        ) from error
