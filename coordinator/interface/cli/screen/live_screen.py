"""The live screen of `watch`, `eval` and the daemon: the table of evaluations, redrawn; on Ctrl-C `eval` asks whether to
cancel.

Rule: reads summaries. Without a capable terminal it prints lines instead: one per score, and one per changed evaluation every
few seconds. The answer to the question is read without blocking, so the loop continues. A second Ctrl-C, or the first without
a terminal, means yes. SIGTERM leaves the jobs to the next run; a SIGTERM from `scancel` cancels.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from coordinator.base.signals import Signals, cancelled_by_slurm
from coordinator.base.words import by_reason, format_seconds
from coordinator.errors import ExitCode
from coordinator.interface.cli.app import TerminalMessages
from coordinator.interface.cli.screen.board import compose_screen, score_in_brief, value_in_words
from coordinator.interface.cli.screen.evaluation_views import EvaluationView, in_serving_order
from coordinator.results.report.tables import Parts
from coordinator.runtime.loop import Coordinator

LINE_SECONDS = 5.0  # minimum between two lines of one evaluation, without a terminal
ALIVE_SECONDS = 30.0  # maximum between two lines of one evaluation, without a terminal
CANCEL_QUESTION = "Cancel this evaluation? y: yes, n: continue, Ctrl-C again: yes [y/N] "
TERMINATED_MESSAGE = "SIGTERM: the evaluation is not cancelled; the same command resumes it"
ENDED_LINE = "ended"  # last line of an evaluation, in a pipe


class Watcher:
    """Draws on a terminal; otherwise prints a line per change. Used by `eval`, `daemon` and `watch`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )
        self._last: dict[str, tuple[str, float]] = {}  # evaluation -> its last line, unix seconds
        self._printed: set[tuple[str, str]] = set()  # (evaluation, task) whose score has been printed

    def __enter__(self) -> Watcher:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def draws(self) -> bool:
        return self._live is not None

    def pause(self) -> None:
        if self._live is not None:
            self._live.stop()

    def go_on(self) -> None:
        if self._live is not None:
            self._live.start()

    def show(
        self,
        runs: Sequence[EvaluationView],
        trouble: str,
        ended: Sequence[EvaluationView] = (),
        below: Sequence[RenderableType] = (),
    ) -> None:
        """Draw what runs, the latest ended evaluations, and `below`; in a pipe, print what has changed."""
        now = time.time()
        runs = in_serving_order([*runs], [one.summary for one in runs])
        self._forget_others([*runs, *ended])
        if self._live is not None:
            end = [*([Parts(f"! {trouble}", style="yellow")] if trouble else []), *below]
            self._live.update(compose_screen(self.console, runs, ended, end, now, self.console.height))
            return
        for one in runs:
            self._print_changes(one, now)
        for one in ended:
            self._print_end(one)
        # no line for `trouble`: the log has it

    def _forget_others(self, found: Sequence[EvaluationView]) -> None:
        """Drop data about evaluations that are no longer shown, since a daemon lives for months."""
        shown = frozenset(one.summary.evaluation_id for one in found)
        self._last = {name: line for name, line in self._last.items() if name in shown}
        self._printed = {(name, task) for name, task in self._printed if name in shown}

    def _print_changes(self, one: EvaluationView, now: float) -> None:
        summary, halt = one.summary, one.halt
        name = summary.evaluation_id
        shards = f", {summary.shards_done}/{summary.shards} shards" if summary.shards else ""
        age = f"[{format_seconds(now - summary.accepted_at):>9}] {name}"
        done = [task for task in summary.tasks if task.state in ("scored", "failed")]
        fresh = [task for task in done if (name, task.name) not in self._printed]
        self._printed |= {(name, task.name) for task in fresh}
        for names, why in by_reason({task.name: task.error for task in fresh if task.error}).items():
            self._print(f"{age}: {names}: {why}")
        for task in fresh:
            if task.state == "scored":
                self._print(f"{age}: {task.name}: {', '.join(map(value_in_words, task.scores))}")
        waits = one.waits_for(now, timed=False) if halt is None else [halt.why]
        if halt is None and summary.waits_until is not None:
            resting = {node.name: node.why for node in summary.nodes if node.status == "back-off"}
            waits += [f"{names}: in back-off: {why}" for names, why in by_reason(resting).items()]
        stage, why = summary.stage if halt is None else halt.word, "; ".join(waits)
        line = f"{stage}{shards}, {summary.scored}/{summary.entries} scored{f': {why}' if why else ''}"
        self._line(name, line, now, age + ": ")

    def _print_end(self, one: EvaluationView) -> None:
        """Print the scores of each followed evaluation once, in one line."""
        summary, name = one.summary, one.summary.evaluation_id
        if name not in self._last or self._last[name][0] == ENDED_LINE:
            return
        self._last[name] = (ENDED_LINE, summary.ended_at or 0.0)
        scores = ", ".join(map(score_in_brief, summary.main_scores))
        said = f"{one.stage}, {summary.scored}/{summary.entries} scored{f': {scores}' if scores else ''}"
        self._print(f"[{format_seconds(one.age(0.0)):>9}] {name}: {said}")

    def _line(self, evaluation: str, line: str, now: float, head: str = "") -> None:
        last, printed_at = self._last.get(evaluation, ("", 0.0))
        if now - printed_at >= (ALIVE_SECONDS if line == last else LINE_SECONDS) or not last:
            if line:
                self._print(head + line)
            self._last[evaluation] = (line, now)

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Screen(TerminalMessages):
    """Follows a run of `coordinator.api.evaluate` on a console; the user may cancel it between two ticks of the loop."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._asking = self._cancelled = False
        self._seen = 0  # number of signals handled

    @contextmanager
    def run(self, coordinator: Coordinator) -> Iterator[Callable[[], bool]]:
        with Signals() as signals, Watcher(self._console) as watcher:
            said = False

            def watch() -> bool:
                nonlocal said
                if self._cancelled and not said:  # the journal has recorded it
                    said = True
                    self._console.print("cancelling: ending its jobs and clearing node memory")
                if not self._asking:
                    found = coordinator.evaluations
                    watcher.show([*map(EvaluationView, found.summaries())], found.trouble)
                return self._is_cancelled(signals, watcher)

            yield watch

    def _is_cancelled(self, signals: Signals, watcher: Watcher) -> bool:
        """Return True once, when the user cancels. Raise typer.Exit on SIGTERM; the evaluation stays open."""
        new = signals.received[self._seen :]
        self._seen += len(new)
        if self._cancelled:
            return False
        if signal.SIGTERM in new and not cancelled_by_slurm(os.environ):
            self._console.print(TERMINATED_MESSAGE, soft_wrap=True)
            raise typer.Exit(ExitCode.TERMINATED)
        if new and (signal.SIGTERM in new or self._asking or len(new) > 1 or not sys.stdin.isatty()):
            return self._close(watcher, cancel=True)
        if new:
            self._asking = True
            watcher.pause()
            self._console.print(CANCEL_QUESTION, end="", markup=False, highlight=False, soft_wrap=True)
        elif self._asking and select.select([sys.stdin], [], [], 0)[0]:
            # end of input (the terminal is gone) means no
            return self._close(watcher, cancel=sys.stdin.readline().strip().lower() in ("y", "yes"))
        return False

    def _close(self, watcher: Watcher, *, cancel: bool) -> bool:
        if self._asking:
            self._asking = False
            watcher.go_on()
        self._cancelled = cancel
        return cancel
