"""The live screen of running evaluations: stages, what they wait for, lanes, metrics, scores and the time left.

Rule: reads summaries, and computes only sums for display. Without a capable
terminal it prints lines instead: one per score, and one per changed evaluation every few seconds.
A part of the screen is a line; where the terminal has too few of them, evaluations are shown in brief.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.base.words import first_of
from coordinator.cli.screen.lanes import lane_rows
from coordinator.cli.screen.layout import GAP, abreast, wrapped
from coordinator.cli.screen.listing import show_rows
from coordinator.cli.screen.score_lines import in_brief, value_in_words
from coordinator.cli.screen.standing import (
    Row,
    about,
    ahead_of,
    all_in_back_off,
    held_jobs,
    in_words,
    seconds_left,
    with_turn,
)
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.render import by_reason, seconds
from coordinator.runtime.summary import Halt, Summary, Task

MAX_ENTRIES = 12  # scored tasks shown, the latest
FEW_ENTRIES = 3  # of an evaluation that is shown in brief
LINE_SECONDS = 5.0  # least seconds between two lines of one evaluation, without a terminal
ALIVE_SECONDS = 30.0  # most seconds between two lines of one evaluation, without a terminal
WHOLE, SHORT, BRIEF = 2, 1, 0  # how much is shown of an evaluation
BELOW = "    "  # begins a line about the one above
ENDED = "ended"  # last line of an evaluation, in a pipe


class Shown(NamedTuple):
    """An evaluation on the screen. `halt`: why it does not go on now."""

    summary: Summary
    halt: Halt | None = None


def _metrics(summary: Summary, width: int) -> Iterator[Text]:
    """The queue of metric jobs: how many are open, by kind and task."""
    if not summary.metric_jobs:
        return
    waiting = sum(summary.metric_jobs_open.values())
    yield Text.assemble(("  metric jobs", "dim"), f" {waiting} open, {summary.metric_jobs - waiting} done")
    shown = [
        f"{what}{f' x {count}' if count > 1 else ''}" for what, count in summary.metric_jobs_open.items()
    ]
    yield from (
        Text(line, style="cyan") for line in wrapped(", ".join(shown), width, first=BELOW, rest=BELOW)
    )


def _entries(summary: Summary, width: int, most: int) -> Iterator[Text]:
    """Lines of failed tasks, of the latest scored ones, and of open tasks by what they wait for."""
    scored = [task for task in summary.tasks if task.state == "scored"]
    yield Text(f"  {summary.scored}/{summary.entries} tasks scored", style="dim")
    for failures, why in by_reason(summary.errors).items():
        yield from _folded(f"{failures}: {why}", width, "bold red")
    if summary.scored > most:
        yield Text(f"{BELOW}and {summary.scored - most} before these", style="dim")
    lines = [line for task in scored[-most:] for line in _score_lines(task, width)]
    yield from (Text(BELOW + line, style="green") for line in abreast(lines, width - len(BELOW)))
    words = {task.name: task.state for task in summary.tasks if task.state not in ("scored", "failed")}
    for word in dict.fromkeys(words.values()):
        names = [name for name, its in words.items() if its == word]
        yield from _folded(f"{word}: {first_of(names, 6)}", width, "dim")


def _score_lines(task: Task, width: int) -> list[str]:
    """The values of a scored task, if need be each on a line of its own."""
    own = {value.task for value in task.scores} == {task.name}
    shown = [f"{'' if own else v.task + ' '}{value_in_words(v)}" for v in task.scores]
    line = GAP.join([task.name, *shown])
    if len(BELOW) + len(line) <= width:
        return [line]
    return [task.name, *(GAP + one for one in shown)]


def _folded(text: str, width: int, style: str) -> Iterator[Text]:
    yield from (Text(line, style=style) for line in wrapped(text, width, first=BELOW, rest=BELOW + GAP))


def _heading(summary: Summary, width: int) -> Iterator[Text]:
    """Step, checkpoint and suite; the id at the end of the line, or on the next one."""
    name = "/".join(Path(summary.checkpoint).parts[-2:])
    step = "" if summary.step is None else f"step {summary.step}"
    named = GAP.join(filter(None, (step, name, f"suite {summary.suite}")))
    room = width - len(named) - len(summary.evaluation_id)
    if room >= len(GAP):
        yield Text.assemble((named, "bold"), " " * min(room, 8), (summary.evaluation_id, "dim"))
        return
    yield from (Text(line, style="bold") for line in wrapped(named, width, rest="  "))
    yield Text(f"  {summary.evaluation_id}", style="dim")


def _progress(shown: Shown, now: float, width: int) -> Iterator[RenderableType]:
    """Stage, time so far and time left; the bar of shards."""
    summary, halt = shown
    stage = summary.stage if halt is None else halt.word
    eta = None if halt else seconds_left(summary, now)
    left = "" if eta is None else f", {about(eta)} {'left' if summary.trials else 'of work left'}"
    taken = seconds((summary.ended_at or now) - summary.accepted_at)
    yield Text.assemble(("  " + stage, "yellow" if halt or stage == "waits" else "cyan"),
                        f"{GAP}{taken}{' so far' if summary.ended_at is None else ''}{left}")  # fmt: skip
    if not summary.shards:
        return
    done, total, trials = summary.shards_done, summary.shards, summary.trials
    figures = f"{done}/{total} shards{GAP}{trials} trial{'' if trials == 1 else 's'}"
    room = width - len(figures) - 4
    if room >= 8:
        line = Table.grid(padding=(0, 1))
        line.add_row(" ", ProgressBar(total=total, completed=done, width=min(60, room)), figures)
        yield line
    else:
        yield Text(f"  {figures}")


def _waits(shown: Shown, now: float, turns: Mapping[str, tuple[float, float]], *, timed: bool) -> list[str]:
    """What it waits for. `turns`: of all evaluations on the screen, in which they are served."""
    summary, halt = shown
    if halt is not None:
        return [halt.why]
    waits = [in_words(what, now, timed=timed) for what in summary.waits]
    return with_turn(waits, ahead_of(summary.evaluation_id, turns)) if summary.stage == "waits" else waits


def _block(
    shown: Shown, now: float, width: int, *, much: int, turns: Mapping[str, tuple[float, float]]
) -> Iterator[RenderableType]:
    """An evaluation. `much`: WHOLE; SHORT: its lanes by node and its last scores; BRIEF: its progress alone."""
    summary = shown.summary
    yield from _heading(summary, width)
    yield from _progress(shown, now, width)
    waits = _waits(shown, now, turns, timed=True)
    if shown.halt is None:
        back = None if summary.waits_until is None else summary.waits_until - now
        held = [f"{names}: {why}" for names, why in by_reason(held_jobs(summary, now)).items()]
        waits = [*filter(None, [all_in_back_off(back)]), *held, *waits]
    for what in waits:
        yield from _folded(what, width, "yellow")
    if much == BRIEF:
        return
    yield from lane_rows(summary, width, by_node=much == SHORT)
    yield from _metrics(summary, width)
    yield from _entries(summary, width, MAX_ENTRIES if much == WHOLE else FEW_ENTRIES)
    for warning in summary.warnings[-3:]:
        yield from _folded(f"! {warning}", width, "yellow")


def screen(
    runs: Sequence[Shown],
    trouble: str,
    width: int,
    *,
    now: float,
    below: Sequence[Text] = (),
    height: int | None = None,
) -> RenderableType:
    """What runs, then `below`. `height`: lines of the terminal; None: as many as there are."""
    end = [*_folded(f"! {trouble}", width, "yellow")] if trouble else []
    end += below
    room = None if height is None else max(1, height - len(end) - 1)
    count, turns = len(runs), _turns(runs)
    lines: list[RenderableType] = []
    for levels in ([WHOLE] * count, [SHORT] * count, [SHORT, *[BRIEF] * (count - 1)], [BRIEF] * count):
        blocks = [
            [*_block(one, now, width, much=much, turns=turns), *([Text("")] if much else [])]
            for one, much in zip(runs, levels, strict=False)
        ]
        lines = [line for block in blocks for line in block]
        if room is None or len(lines) <= room:
            return Group(*lines, *end)
    shown = lines[: max(0, (room or 1) - 1)]
    return Group(*shown, Text("  and more: `evalspan status` lists all", style="dim"), *end)


def _turns(runs: Sequence[Shown]) -> dict[str, tuple[float, float]]:
    return {one.summary.evaluation_id: one.summary.turn for one in runs}


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
        self._shown: frozenset[str] = frozenset()  # evaluations of the last call of `show`

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
        self, runs: Sequence[Shown], trouble: str, ended: Sequence[Row] = (), below: Sequence[Text] = ()
    ) -> None:
        """Draw what runs, the evaluations that ended last, and `below`; in a pipe, print what has changed."""
        now = time.time()
        self._forget_others(runs, ended)
        if self._live is not None:
            width, height = self.console.size
            under = [*show_rows(ended, width, now), *below] if ended else list(below)
            self._live.update(screen(runs, trouble, width, now=now, below=under, height=height))
            return
        for one in runs:
            self._print_changes(one, now, _turns(runs))
        for row in ended:
            self._print_end(row)
        # no line for `trouble`: the log has it

    def _forget_others(self, runs: Sequence[Shown], ended: Sequence[Row]) -> None:
        """Drop what is remembered of evaluations that are shown no more: a daemon lives for months."""
        shown = frozenset([*_turns(runs), *(row["evaluation_id"] for row in ended)])
        if shown == self._shown:
            return
        self._shown = shown
        self._last = {name: line for name, line in self._last.items() if name in shown}
        self._printed = {(name, task) for name, task in self._printed if name in shown}

    def _print_changes(self, shown: Shown, now: float, turns: Mapping[str, tuple[float, float]]) -> None:
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
                self._print(f"{age}: {task.name}: {GAP.join(map(value_in_words, task.scores))}")
        waits = _waits(shown, now, turns, timed=False)
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
        scores = GAP.join(in_brief(ScoreValue(**score)) for score in row["scores"])
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
