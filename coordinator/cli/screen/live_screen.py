"""The live screen of running evaluations: stages, what they wait for, lanes, metrics, scores and the time left.

Rule: reads states, snapshots and score files, and computes only sums for display. Without a capable
terminal it prints lines instead: one per score, and one per changed evaluation every few seconds.
A part of the screen is a line; where the terminal has too few of them, evaluations are shown in brief.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.base.words import first_of
from coordinator.cli.screen.lanes import lane_rows
from coordinator.cli.screen.layout import GAP, abreast, wrapped
from coordinator.cli.screen.listing import show_rows
from coordinator.cli.screen.progress import (
    NO_SLOT,
    Turn,
    about,
    ahead_of,
    all_in_back_off,
    back_offs,
    done_shards,
    eta_seconds,
    held_jobs,
    stage_of,
    turn_of,
    waits_of,
    with_turn,
)
from coordinator.cli.screen.score_lines import Scores, in_brief, value_in_words
from coordinator.cli.screen.standing import Row
from coordinator.cluster import JobState
from coordinator.evaluation.state import EntryState, State
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.render import by_reason, seconds
from coordinator.runtime.runner import Running
from evaljobs.queue.work_queue import QueueSnapshot

MAX_ENTRIES = 12  # scored tasks shown, the latest
FEW_ENTRIES = 3  # of an evaluation that is shown in brief
LINE_SECONDS = 5.0  # least seconds between two lines of one evaluation, without a terminal
ALIVE_SECONDS = 30.0  # most seconds between two lines of one evaluation, without a terminal
OPEN = {"scoring": "scoring", "built": "to infer", "building": "building requests", "unbuilt": "to build"}
WHOLE, SHORT, BRIEF = 2, 1, 0  # how much is shown of an evaluation
BELOW = "    "  # begins a line about the one above
ENDED = "ended"  # last line of an evaluation, in a pipe


@dataclass(frozen=True, slots=True)
class View:
    """An evaluation that another process runs. `snapshot`: its work queue now; None without one, or while Redis is away.

    `listed`: the cluster's jobs, for the reasons of pending ones; `halt`: where it does not go on now, a word and why.
    """

    state: State
    snapshot: QueueSnapshot | None
    listed: Sequence[JobState] = ()
    halt: tuple[str, str] = ("", "")


Watched = Running | View


def _metrics(state: State, width: int) -> Iterator[Text]:
    """The queue of metric jobs: how many are open, by kind and task."""
    if not state.scoring.metrics:
        return
    waiting = [state.scoring.metrics[name] for name in sorted(state.scoring.outstanding)]
    done = len(state.scoring.metrics) - len(waiting)
    counts = Counter(f"{m.kind} {m.task or state.entries[m.entry].name}" for m in waiting)
    yield Text.assemble(("  metric jobs", "dim"), f" {len(waiting)} open, {done} done")
    shown = [f"{what}{f' x {count}' if count > 1 else ''}" for what, count in counts.most_common()]
    yield from (
        Text(line, style="cyan") for line in wrapped(first_of(shown, 4), width, first=BELOW, rest=BELOW)
    )


def _entries(state: State, scores: Scores, width: int, most: int) -> Iterator[Text]:
    """Lines of failed tasks, of the latest scored ones, and of open tasks by what they wait for."""
    scored = [e for e in state.entries if e.status == "scored"]
    yield Text(f"  {len(scored)}/{len(state.entries)} tasks scored", style="dim")
    failed = {e.name: e.error for e in state.entries if e.status == "failed"}
    for failures, why in by_reason(failed).items():
        yield from _folded(f"{failures}: {why}", width, "bold red")
    if len(scored) > most:
        yield Text(f"{BELOW}and {len(scored) - most} before these", style="dim")
    lines = [line for entry in scored[-most:] for line in _score_lines(entry, scores.of(entry), width)]
    yield from (Text(BELOW + line, style="green") for line in abreast(lines, width - len(BELOW)))
    words = {e.name: _open_word(state, e) for e in state.entries if not e.terminal}
    for word in dict.fromkeys(words.values()):
        names = [name for name, its in words.items() if its == word]
        yield from _folded(f"{word}: {first_of(names, 6)}", width, "dim")


def _score_lines(entry: EntryState, values: Sequence[ScoreValue], width: int) -> list[str]:
    """The values of a scored task, if need be each on a line of its own."""
    own = {v.task for v in values} == {entry.name}
    shown = [f"{'' if own else v.task + ' '}{value_in_words(v)}" for v in values[:4]]
    shown += [f"and {len(values) - 4} more"] if len(values) > 4 else []
    line = GAP.join([entry.name, *shown])
    if len(BELOW) + len(line) <= width:
        return [line]
    return [entry.name, *(GAP + one for one in shown)]


def _folded(text: str, width: int, style: str) -> Iterator[Text]:
    yield from (Text(line, style=style) for line in wrapped(text, width, first=BELOW, rest=BELOW + GAP))


def _open_word(state: State, entry: EntryState) -> str:
    """What a task waits for. Its programs are run or judged once all its responses are written."""
    leaves = [state.shards.leaves[name] for name in entry.leaves.values()]
    if entry.status == "built" and leaves and all(leaf.todo == 0 for leaf in leaves):
        return "executing"
    return OPEN[entry.status]


def _heading(state: State, width: int) -> Iterator[Text]:
    """Step, checkpoint and suite; the id at the end of the line, or on the next one."""
    checkpoint = state.record.checkpoint
    name = "/".join(Path(checkpoint.announced).parts[-2:])
    step = "" if checkpoint.step is None else f"step {checkpoint.step}"
    named = GAP.join(filter(None, (step, name, f"suite {state.record.suite.name}")))
    room = width - len(named) - len(state.evaluation_id)
    if room >= len(GAP):
        yield Text.assemble((named, "bold"), " " * min(room, 8), (state.evaluation_id, "dim"))
        return
    yield from (Text(line, style="bold") for line in wrapped(named, width, rest="  "))
    yield Text(f"  {state.evaluation_id}", style="dim")


def _halt(running: Watched) -> tuple[str, str]:
    return running.halt if isinstance(running, View) else ("", "")


def _stage(running: Watched, now: float) -> str:
    """The stage, or that it does not go on."""
    return _halt(running)[0] or stage_of(running.state, now, running.snapshot)


def _progress(running: Watched, now: float, width: int) -> Iterator[RenderableType]:
    """Stage, time so far and time left; the bar of shards."""
    state = running.state
    stage, halted = _stage(running, now), any(_halt(running))
    eta = None if halted else eta_seconds(state, now)
    left = "" if eta is None else f", {about(eta)} {'left' if state.trials.live else 'of work left'}"
    taken = seconds((state.ended_at or now) - state.record.accepted_at)
    yield Text.assemble(("  " + stage, "yellow" if halted or stage == "waits" else "cyan"),
                        f"{GAP}{taken}{' so far' if state.ended_at is None else ''}{left}")  # fmt: skip
    if not state.shards.by_name:
        return
    done, total, trials = done_shards(state), len(state.shards.by_name), len(state.trials.live)
    figures = f"{done}/{total} shards{GAP}{trials} trial{'' if trials == 1 else 's'}"
    room = width - len(figures) - 4
    if room >= 8:
        line = Table.grid(padding=(0, 1))
        line.add_row(" ", ProgressBar(total=total, completed=done, width=min(60, room)), figures)
        yield line
    else:
        yield Text(f"  {figures}")


def _block(
    running: Watched,
    scores: Scores,
    now: float,
    width: int,
    *,
    much: int,
    turns: Mapping[str, Turn],
) -> Iterator[RenderableType]:
    """An evaluation. `much`: WHOLE; SHORT: its lanes by node and its last scores; BRIEF: its progress alone.

    `turns`: of all evaluations on the screen, in which they are served.
    """
    state = running.state
    yield from _heading(state, width)
    yield from _progress(running, now, width)
    halt = _halt(running)[1]
    back = None if state.waits_until is None else state.waits_until - now
    held = [f"{names}: {why}" for names, why in by_reason(held_jobs(state, now)).items()]
    waits = [halt] if halt else [all_in_back_off(back), *held, *waits_of(state, now, running.listed)]
    if not halt and stage_of(state, now) == "waits":
        waits = with_turn(waits, ahead_of(state.evaluation_id, turns))
    for what in filter(None, waits):
        yield from _folded(what, width, "yellow")
    if much == BRIEF:
        return
    yield from lane_rows(state, running.snapshot, width, by_node=much == SHORT)
    yield from _metrics(state, width)
    yield from _entries(state, scores, width, MAX_ENTRIES if much == WHOLE else FEW_ENTRIES)
    for warning in list(dict.fromkeys(state.warnings))[-3:]:
        yield from _folded(f"! {warning}", width, "yellow")


def screen(
    runnings: Sequence[Watched],
    trouble: str,
    width: int,
    *,
    now: float,
    scores: Scores,
    below: Sequence[Text] = (),
    height: int | None = None,
) -> RenderableType:
    """What runs, then `below`. `height`: lines of the terminal; None: as many as there are."""
    end = [*_folded(f"! {trouble}", width, "yellow")] if trouble else []
    end += below
    room = None if height is None else max(1, height - len(end) - 1)
    count, turns = len(runnings), _turns(runnings)
    lines: list[RenderableType] = []
    for levels in ([WHOLE] * count, [SHORT] * count, [SHORT, *[BRIEF] * (count - 1)], [BRIEF] * count):
        blocks = [
            [
                *_block(running, scores, now, width, much=much, turns=turns),
                *([Text("")] if much else []),
            ]
            for running, much in zip(runnings, levels, strict=False)
        ]
        lines = [line for block in blocks for line in block]
        if room is None or len(lines) <= room:
            return Group(*lines, *end)
    shown = lines[: max(0, (room or 1) - 1)]
    return Group(*shown, Text("  and more: `evalspan status` lists all", style="dim"), *end)


def _turns(runnings: Sequence[Watched]) -> dict[str, Turn]:
    return {running.state.evaluation_id: turn_of(running.state) for running in runnings}


class Watcher:
    """Draws on a terminal; elsewhere prints a line per change. Used by `eval`, `daemon` and `watch`."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True)
            if console.is_terminal and not console.is_dumb_terminal
            else None
        )
        self._scores = Scores()
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
        self, runnings: Sequence[Watched], trouble: str, ended: Sequence[Row] = (), below: Sequence[Text] = ()
    ) -> None:
        """Draw what runs, the evaluations that ended last, and `below`; in a pipe, print what has changed."""
        now = time.time()
        self._forget_others(runnings, ended)
        if self._live is not None:
            width, height = self.console.size
            under = [*show_rows(ended, width, now), *below] if ended else list(below)
            self._live.update(
                screen(runnings, trouble, width, now=now, scores=self._scores, below=under, height=height)
            )
            return
        for running in runnings:
            self._print_changes(running, now, _turns(runnings))
        for row in ended:
            self._print_end(row)
        # no line for `trouble`: the log has it

    def _forget_others(self, runnings: Sequence[Watched], ended: Sequence[Row]) -> None:
        """Drop what is remembered of evaluations that are shown no more: a daemon lives for months."""
        shown = frozenset(
            [*(r.state.evaluation_id for r in runnings), *(row["evaluation_id"] for row in ended)]
        )
        if shown == self._shown:
            return
        self._shown = shown
        self._last = {name: line for name, line in self._last.items() if name in shown}
        self._printed = {(name, task) for name, task in self._printed if name in shown}
        self._scores.keep({e.result_file for r in runnings for e in r.state.entries})

    def _print_changes(self, running: Watched, now: float, turns: Mapping[str, Turn]) -> None:
        state = running.state
        scored = sum(e.status == "scored" for e in state.entries)
        shards = f", {done_shards(state)}/{len(state.shards.by_name)} shards" if state.shards.by_name else ""
        age = f"[{seconds(now - state.record.accepted_at):>9}] {state.evaluation_id}"
        done = [e for e in state.entries if e.terminal]
        fresh = [e for e in done if (state.evaluation_id, e.name) not in self._printed]
        self._printed |= {(state.evaluation_id, e.name) for e in fresh}
        for names, why in by_reason({e.name: e.error for e in fresh if e.status == "failed"}).items():
            self._print(f"{age}: {names}: {why}")
        for entry in fresh:
            if entry.status == "scored":
                self._print(f"{age}: {entry.name}: {GAP.join(map(value_in_words, self._scores.of(entry)))}")
        waiting = [*waits_of(state, now, running.listed, timed=False), *back_offs(state)]
        if NO_SLOT in waiting:
            waiting = with_turn(waiting, ahead_of(state.evaluation_id, turns))
        waits = _halt(running)[1] or "; ".join(waiting)
        line = f"{_stage(running, now)}{shards}, {scored}/{len(state.entries)} scored{f': {waits}' if waits else ''}"
        self._line(state.evaluation_id, line, now, age + ": ")

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
