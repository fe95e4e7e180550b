"""The live screen of running evaluations: stages, shards, lanes, metrics, scores and ETA.

Rule: reads states, snapshots and score files, and computes only sums for display. Without a capable
terminal it prints lines instead: one per score, and one per changed evaluation every few seconds.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.evaluation.state import EntryState, Phase, State
from coordinator.report.learning_curves import ScoreValue, scores_of
from coordinator.report.render import by_reason, seconds
from coordinator.runtime.runner import Running
from evaljobs.queue.work_queue import QueueSnapshot

MAX_LANES = 16  # with more lanes than this the screen shows a line per node
MAX_ENTRIES = 12  # scored tasks shown, the latest
LINE_SECONDS = 5.0  # least seconds between two lines of one evaluation, without a terminal
WIDE = 100  # columns of a terminal that shows two lanes on a line
OPEN = {"scoring": "scoring", "built": "to infer", "building": "building requests", "unbuilt": "to build"}
STYLES = {"infer": "green", "pending": "dim", "wait": "dim"}


@dataclass(frozen=True, slots=True)
class View:
    """An evaluation that another process runs. `snapshot`: its work queue now; None without one, or while Redis is away."""

    state: State
    snapshot: QueueSnapshot | None


Watched = Running | View


def stage_of(state: State) -> str:
    """The furthest stage under way, in one or two words."""
    if state.ending.phase >= Phase.LEAVING:
        return "clearing" if state.ended_at is None else "cancelled" if state.ending.cancelled else "ended"
    if state.ending.cancelled or state.ending.reason:
        return "ending"
    if state.shards.leaves and state.shards.todo == 0:
        return "scoring"
    if any(s.frame is not None for s in state.shards.by_name.values()) or state.trials.live:
        return "inference"
    if any(e.status in ("unbuilt", "building") for e in state.entries):
        return "building requests"
    return "staging"


def done_shards(state: State) -> int:
    return len(state.shards.by_name) - state.shards.todo


def eta_seconds(state: State, now: float) -> float | None:
    """Predicted seconds until the last shard is done; None before the plan and after the last shard.

    Mixes the prior with the pace of the shards so far, weighted by the share of work that is done.
    """
    if state.plan.made_at is None or not state.shards.by_name or state.shards.todo == 0:
        return None
    total = sum(s.seconds for s in state.shards.by_name.values()) or 1e-9
    done = sum(s.seconds for s in state.shards.by_name.values() if s.frame is not None)
    elapsed = max(0.0, now - state.plan.made_at)
    by_prior = max(0.0, state.plan.predicted_makespan_seconds - elapsed)
    if done <= 0:
        return by_prior
    share = done / total
    return share * elapsed * (total - done) / done + (1 - share) * by_prior


class Scores:
    """The scores of tasks as their files appear; each file is read once."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[ScoreValue, ...]] = {}

    def of(self, entry: EntryState) -> tuple[ScoreValue, ...]:
        """Values of a scored entry: its groups' where it has groups, else its tasks'."""
        if not entry.result_file:
            return ()
        if entry.result_file not in self._read:
            try:
                results = json.loads(Path(entry.result_file).read_bytes())
            except (OSError, ValueError):
                return ()  # storage is away for a moment
            if results.get("groups"):
                results = {**results, "results": {}}
            self._read[entry.result_file] = scores_of(results)
        return self._read[entry.result_file]


def _value(score: ScoreValue) -> str:
    error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
    return f"{score.metric}{'' if score.filter == 'none' else ',' + score.filter} {score.value:.4f}{error}"


def _lanes(running: Watched, width: int) -> Table | None:
    """What each trial does now; with many trials, a line per node."""
    trials = running.snapshot.trials if running.snapshot is not None else {}
    lanes = {trial.lane: name for name, trial in running.state.trials.live.items()}
    now = {lane: trials.get(lanes[lane]) for lane in sorted(lanes, key=_natural)}
    if not now:
        return None
    table = Table.grid(padding=(0, 1))
    shown = apart(lanes)
    if len(now) > MAX_LANES:
        nodes: dict[str, Counter[str]] = {}
        for lane, progress in now.items():
            phases = nodes.setdefault(shown[lane].rsplit("/", 1)[0], Counter())
            phases[progress.phase if progress is not None else "pending"] += 1
        for node, phases in list(nodes.items())[:MAX_LANES]:
            counted = ", ".join(f"{count} {phase}" for phase, count in phases.most_common())
            table.add_row(f"  {node}", counted)
        if len(nodes) > MAX_LANES:
            table.add_row("  ...", f"and {len(nodes) - MAX_LANES} more nodes")
        return table
    cells = []
    for lane, progress in now.items():
        phase = progress.phase if progress is not None else "pending"
        what = ""
        if progress is not None and progress.shard:
            batches = f" {progress.batches_done}/{progress.batches}" if progress.batches else ""
            what = progress.shard.replace("|", " ") + batches
        cells.append((Text(f"  {shown[lane]}"), Text(phase, style=STYLES.get(phase, "yellow")), Text(what)))
    abreast = 2 if width >= WIDE and len(cells) > 4 else 1
    for _ in range(abreast):
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
    for first in range(0, len(cells), abreast):
        row = [cell for one in cells[first : first + abreast] for cell in one]
        table.add_row(*row)
    return table


def apart(lanes: Iterable[str], most: int = 24) -> dict[str, str]:
    """Lane -> its name on screen, without the shared prefix if one exceeds `most` characters."""
    names = list(lanes)
    if max(map(len, names), default=0) <= most:
        return {name: name for name in names}
    nodes = [name.rpartition("/")[0] for name in names]
    shared = commonprefix(nodes).rpartition("-")[0]  # noqa: RUF071 (names, not paths)
    return {name: f"...{name[len(shared) :]}" if shared else name for name in names}


def _natural(lane: str) -> list[tuple[bool, int, str]]:
    """Sort key that puts n2 before n10."""
    parts = "".join(c if c.isdigit() else f"\0{c}\0" for c in lane).replace("\0\0", "").split("\0")
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p]


def _metrics(state: State) -> Text | None:
    """The queue of metric jobs: how many are open, by kind and task."""
    if not state.scoring.metrics:
        return None
    waiting = [state.scoring.metrics[name] for name in sorted(state.scoring.outstanding)]
    done = len(state.scoring.metrics) - len(waiting)
    counts = Counter(f"{m.kind} {m.task or state.entries[m.entry].name}" for m in waiting)
    text = Text("  metrics", style="dim")
    text.append(f" {len(waiting)} queued, {done} done")
    for what, count in counts.most_common(4):
        text.append(f"  {what}" + (f" x {count}" if count > 1 else ""), style="cyan")
    if len(counts) > 4:
        text.append("  ...")
    return text


def _entries(state: State, scores: Scores, width: int) -> Iterator[RenderableType]:
    """Lines of failed tasks, of the latest scored ones, and of open tasks by what they wait for."""
    scored = [e for e in state.entries if e.status == "scored"]
    yield Text(f"  {len(scored)}/{len(state.entries)} tasks scored", style="dim")
    failed = {e.name: e.error for e in state.entries if e.status == "failed"}
    for failures, why in by_reason(failed).items():
        yield Text(f"    {failures}: {why}", style="bold red", no_wrap=True, overflow="ellipsis")
    if len(scored) > MAX_ENTRIES:
        yield Text(f"    ... and {len(scored) - MAX_ENTRIES} before these", style="dim")
    for entry in scored[-MAX_ENTRIES:]:
        values = scores.of(entry)
        own = {v.task for v in values} == {entry.name}
        shown = [f"{'' if own else v.task + ' '}{_value(v)}" for v in values[:4]]
        shown += [f"and {len(values) - 4} more"] if len(values) > 4 else []
        line = "  ".join(shown)
        if len(entry.name) + len(line) + 6 <= width:
            yield Text.assemble((f"    {entry.name}", "green"), f"  {line}")
        else:
            yield Text(f"    {entry.name}", style="green")
            yield from (Text(f"      {one}") for one in shown)
    words = {e.name: _open_word(state, e) for e in state.entries if not e.terminal}
    for word in dict.fromkeys(words.values()):
        names = [name for name, its in words.items() if its == word]
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        yield Padding(Text(f"{word}: {', '.join(names[:6])}{more}", style="dim"), (0, 0, 0, 4))


def _open_word(state: State, entry: EntryState) -> str:
    """What a task waits for. Its programs are run or judged once all its responses are written."""
    leaves = [state.shards.leaves[task] for task in entry.sets if task in state.shards.leaves]
    if entry.status == "built" and leaves and all(leaf.todo == 0 for leaf in leaves):
        return "executing"
    return OPEN[entry.status]


def _block(running: Watched, scores: Scores, now: float, width: int) -> Iterator[RenderableType]:
    state = running.state
    age = seconds(now - state.record.accepted_at)
    yield Text.assemble((state.evaluation_id, "bold"), f"  {stage_of(state)}", f"  {age}")
    if state.shards.by_name:
        eta = eta_seconds(state, now)
        lanes = sum(n.lanes for n in state.nodes.by_name.values() if n.status in ("ready", "staging"))
        figures = f"{done_shards(state)}/{len(state.shards.by_name)} shards  {len(state.trials.live)}/{lanes} trials"
        if eta is not None:
            figures += f"  ETA {seconds(eta)}"
        room = width - len(figures) - 4
        if room >= 8:
            bar = ProgressBar(
                total=len(state.shards.by_name), completed=done_shards(state), width=min(40, room)
            )
            line = Table.grid(padding=(0, 1))
            line.add_row(" ", bar, figures)
            yield line
        else:
            yield Text(f"  {figures}")
    table = _lanes(running, width)
    if table is not None:
        yield table
    metrics = _metrics(state)
    if metrics is not None:
        yield metrics
    yield from _entries(state, scores, width)
    for warning in list(dict.fromkeys(state.warnings))[-3:]:
        yield Text(f"  ! {warning}", style="yellow")


def screen(
    runnings: Sequence[Watched], trouble: str, width: int, *, now: float, scores: Scores
) -> RenderableType:
    parts: list[RenderableType] = []
    for running in runnings:
        if parts:
            parts.append(Text(""))
        parts += _block(running, scores, now, width)
    if trouble:
        parts.append(Text(f"  ! {trouble}", style="yellow"))
    return Group(*parts)


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

    def __enter__(self) -> Watcher:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def pause(self) -> None:
        """Leave the screen to a question."""
        if self._live is not None:
            self._live.stop()

    def go_on(self) -> None:
        if self._live is not None:
            self._live.start()

    def show(self, runnings: Sequence[Watched], trouble: str) -> None:
        now = time.time()
        if self._live is not None:
            self._live.update(screen(runnings, trouble, self.console.width, now=now, scores=self._scores))
            return
        for running in runnings:
            self._print_changes(running.state, now)
        # no line for `trouble`: the log has it

    def _print_changes(self, state: State, now: float) -> None:
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
                self._print(f"{age}: {entry.name}: {'  '.join(map(_value, self._scores.of(entry)))}")
        line = f"{stage_of(state)}{shards}, {scored}/{len(state.entries)} scored"
        self._line(state.evaluation_id, line, now, age + ": ")

    def _line(self, evaluation: str, line: str, now: float, head: str = "") -> None:
        last, printed_at = self._last.get(evaluation, ("", 0.0))
        if line != last and (now - printed_at >= LINE_SECONDS or not last):
            if line:
                self._print(head + line)
            self._last[evaluation] = (line, now)

    def _print(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
