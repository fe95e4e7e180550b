"""The live screen of `watch`, `eval` and the daemon: the table of evaluations, drawn anew.

Rule: reads summaries. Without a capable terminal it prints lines instead: one per score, and one per changed
evaluation every few seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.live import Live

from coordinator.base.words import by_reason, seconds
from coordinator.cli.screen.board import in_brief, screen, value_in_words
from coordinator.cli.screen.standing import Row, ahead_of, in_words, row_of, with_turn
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.tables import Parts
from coordinator.runtime.summary import Halt, Summary

LINE_SECONDS = 5.0  # least seconds between two lines of one evaluation, without a terminal
ALIVE_SECONDS = 30.0  # most seconds between two lines of one evaluation, without a terminal
ENDED = "ended"  # last line of an evaluation, in a pipe


class Shown(NamedTuple):
    """An evaluation on the screen. `halt`: why it does not go on now."""

    summary: Summary
    halt: Halt | None = None


def rows_of_runs(runs: Sequence[Shown], now: float) -> list[Row]:
    """A row for each; of one that waits, with its turn among them."""
    turns = {summary.evaluation_id: summary.turn for summary, _ in runs}
    rows = []
    for summary, halt in runs:
        stopped_at = halt.since if halt is not None and summary.parked is None else None
        row = row_of(summary, halt, now, stopped_at=stopped_at)
        if row["stage"] == "waits":
            row["waits_for"] = with_turn(row["waits_for"], ahead_of(summary.evaluation_id, turns))
        rows.append(row)
    return rows


class Watcher:
    """Draws on a terminal; elsewhere prints a line per change. Used by `eval`, `daemon` and `watch`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )
        self._last: dict[str, tuple[str, float]] = {}  # evaluation -> its last line, unix seconds
        self._printed: set[tuple[str, str]] = set()  # (evaluation, task) whose score was printed

    def __enter__(self) -> Watcher:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def draws(self) -> bool:
        """Does it draw a screen, rather than print lines?"""
        return self._live is not None

    def pause(self) -> None:
        """Leave the screen to a question."""
        if self._live is not None:
            self._live.stop()

    def go_on(self) -> None:
        if self._live is not None:
            self._live.start()

    def show(
        self,
        runs: Sequence[Shown],
        trouble: str,
        ended: Sequence[Row] = (),
        below: Sequence[RenderableType] = (),
    ) -> None:
        """Draw what runs, the evaluations that ended last, and `below`; in a pipe, print what has changed."""
        now = time.time()
        rows = rows_of_runs(runs, now)
        self._forget_others([*rows, *ended])
        if self._live is not None:
            end = [*([Parts(f"! {trouble}", style="yellow")] if trouble else []), *below]
            going = [summary for summary, _ in runs]
            self._live.update(screen(self.console, [*rows, *ended], going, end, now, self.console.height))
            return
        for one, row in zip(runs, rows, strict=True):
            self._print_changes(one, row, now)
        for row in ended:
            self._print_end(row)
        # no line for `trouble`: the log has it

    def _forget_others(self, rows: Sequence[Row]) -> None:
        """Drop what is remembered of evaluations that are shown no more: a daemon lives for months."""
        shown = frozenset(row["evaluation_id"] for row in rows)
        self._last = {name: line for name, line in self._last.items() if name in shown}
        self._printed = {(name, task) for name, task in self._printed if name in shown}

    def _print_changes(self, shown: Shown, row: Row, now: float) -> None:
        summary, halt = shown
        name = summary.evaluation_id
        shards = f", {summary.shards_done}/{summary.shards} shards" if summary.shards else ""
        age = f"[{seconds(now - summary.accepted_at):>9}] {name}"
        done = [task for task in summary.tasks if task.state in ("scored", "failed")]
        fresh = [task for task in done if (name, task.name) not in self._printed]
        self._printed |= {(name, task.name) for task in fresh}
        for names, why in by_reason({task.name: task.error for task in fresh if task.error}).items():
            self._print(f"{age}: {names}: {why}")
        for task in fresh:
            if task.state == "scored":
                self._print(f"{age}: {task.name}: {', '.join(map(value_in_words, task.scores))}")
        timeless = {in_words(what, now): in_words(what, now, timed=False) for what in summary.waits}
        waits = [timeless.get(what, what) for what in row["waits_for"]] if halt is None else [halt.why]
        if halt is None and summary.waits_until is not None:
            resting = {node.name: node.why for node in summary.nodes if node.status == "back-off"}
            waits += [f"{names}: in back-off: {why}" for names, why in by_reason(resting).items()]
        stage, why = summary.stage if halt is None else halt.word, "; ".join(waits)
        line = f"{stage}{shards}, {summary.scored}/{summary.entries} scored{f': {why}' if why else ''}"
        self._line(name, line, now, age + ": ")

    def _print_end(self, row: Row) -> None:
        """Once for each evaluation that was followed: its scores in one line."""
        name = row["evaluation_id"]
        if name not in self._last or self._last[name][0] == ENDED:
            return
        self._last[name] = (ENDED, row["ended_at"])
        scores = ", ".join(in_brief(ScoreValue(**score)) for score in row["scores"])
        said = f"{row['stage']}, {row['scored']}/{row['entries']} scored{f': {scores}' if scores else ''}"
        self._print(f"[{seconds(row['age_seconds']):>9}] {name}: {said}")

    def _line(self, evaluation: str, line: str, now: float, head: str = "") -> None:
        last, printed_at = self._last.get(evaluation, ("", 0.0))
        if now - printed_at >= (ALIVE_SECONDS if line == last else LINE_SECONDS) or not last:
            if line:
                self._print(head + line)
            self._last[evaluation] = (line, now)

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
