"""Ctrl-C at a one-shot evaluation: it asks once whether to cancel, and the evaluation goes on while it asks.

Rule: the question is read without waiting, so the loop goes on; Ctrl-C once more says yes. Without a terminal Ctrl-C
means yes. SIGTERM leaves the evaluation's jobs to the next run, but that of a `scancel` cancels.
It does not know: how an evaluation is cancelled.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from typing import TextIO

import typer

from coordinator.base.signals import Signals, cancelled_by_slurm
from coordinator.cli.live_screen import Watcher
from coordinator.runtime.runner import Running

QUESTION = "Cancel this evaluation? y: yes, n: it goes on, Ctrl-C again: yes [y/N] "
LEFT = "SIGTERM: the evaluation is not cancelled; the same command goes on with it"
TERMINATED = 143  # exit code, as a shell reports SIGTERM


class Interrupt:
    """What the person at the terminal wants, asked between two ticks of the loop."""

    def __init__(self, signals: Signals, watcher: Watcher, keyboard: TextIO) -> None:
        self.cancelled = False
        self._signals = signals
        self._watcher = watcher
        self._keyboard = keyboard
        self._heard = 0
        self._asking = False

    def show(self, runnings: Sequence[Running], trouble: str) -> None:
        """Draw, unless a question is open."""
        if not self._asking:
            self._watcher.show(runnings, trouble)

    def wanted(self) -> bool:
        """True once, when it is to be cancelled. typer.Exit where this process is to end and the evaluation stays open."""
        new = self._signals.received[self._heard :]
        self._heard += len(new)
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
            # end of input: the terminal is gone, and with it whoever would have answered
            return self._close(cancel=self._keyboard.readline().strip().lower() in ("y", "yes"))
        return False

    def _close(self, *, cancel: bool) -> bool:
        if self._asking:
            self._asking = False
            self._watcher.go_on()
        self.cancelled = cancel
        if cancel:
            self._watcher.console.print("cancelling: its jobs are ended, node memory is cleared")
        return cancel
