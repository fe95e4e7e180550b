"""Runs `evalspan eval` until its evaluation has ended; the first Ctrl-C asks whether to cancel.

Rule: the answer is read without waiting, so the loop goes on. A second Ctrl-C, or the first without
a terminal, means yes. SIGTERM leaves the jobs to the next run; a SIGTERM from `scancel` cancels.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import typer
from rich.console import Console

from coordinator.base.signals import Signals, cancelled_by_slurm
from coordinator.cli.app import TerminalMessages
from coordinator.cli.screen.live_screen import Watcher
from coordinator.cli.screen.standing import Shown
from coordinator.errors import ExitCode
from coordinator.runtime.loop import Coordinator

QUESTION = "Cancel this evaluation? y: yes, n: it goes on, Ctrl-C again: yes [y/N] "
LEFT = "SIGTERM: the evaluation is not cancelled; the same command resumes it"


class Interrupt:
    """Asks the person at the terminal whether to cancel, between two ticks of the loop."""

    def __init__(self, signals: Signals, watcher: Watcher, keyboard: TextIO) -> None:
        self.cancelled = False
        self._signals = signals
        self._watcher = watcher
        self._keyboard = keyboard
        self._seen = 0  # signals handled so far
        self._asking = False

    def show(self, runs: Sequence[Shown], trouble: str) -> None:
        """Draw, unless a question is open."""
        if not self._asking:
            self._watcher.show(runs, trouble)

    def wanted(self) -> bool:
        """True once, when the person cancels. At SIGTERM raises typer.Exit; the evaluation stays open."""
        new = self._signals.received[self._seen :]
        self._seen += len(new)
        if self.cancelled:
            return False
        if signal.SIGTERM in new and not cancelled_by_slurm(os.environ):
            self._watcher.console.print(LEFT, soft_wrap=True)
            raise typer.Exit(ExitCode.TERMINATED)
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


class Screen(TerminalMessages):
    """Follows a run of `coordinator.api.evaluate` on a console; the person may cancel it."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def run(self, coordinator: Coordinator) -> Iterator[Callable[[], bool]]:
        with Signals() as signals, Watcher(self._console) as watcher:
            interrupt = Interrupt(signals, watcher, sys.stdin)
            said = False

            def watch() -> bool:
                nonlocal said
                if interrupt.cancelled and not said:  # the journal has it
                    said = True
                    self._console.print("cancelling: its jobs are ended, node memory is cleared")
                interrupt.show(
                    [*map(Shown, coordinator.evaluations.summaries())], coordinator.evaluations.trouble
                )
                return interrupt.wanted()

            yield watch
