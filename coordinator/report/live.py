"""The live screen of running evaluations: stages, shards, lanes, metrics, scores as they come, ETA against the prior.

Rule: reads states and snapshots, computes nothing but sums for display; where there is no terminal it prints a line
when something has changed and at most every few seconds.
It does not know: how the evaluation is driven.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.report.terminal import seconds
from coordinator.running import Running
from coordinator.state import State

MAX_LANES = 16
LINE_SECONDS = 5.0


def stage_of(state: State) -> str:
    """The stage in one word, the furthest that is under way."""
    if state.ended_at is not None or state.results_written:
        return "clearing" if state.ended_at is None else "ended"
    if state.leaves and state.todo == 0:
        return "scoring"
    if any(s.frame is not None for s in state.shards.values()) or state.live_trials:
        return "inference"
    if any(e.status in ("unbuilt", "building") for e in state.entries):
        return "building requests"
    return "staging"


def done_shards(state: State) -> int:
    return len(state.shards) - state.todo


def eta_seconds(running: Running, now: float) -> float | None:
    """Predicted seconds left: what the prior says of the shards to do, scaled by how the done ones compare to it."""
    state = running.state
    if state.planned_at is None or not state.shards:
        return None
    total = sum(s.seconds for s in state.shards.values()) or 1e-9
    done = sum(s.seconds for s in state.shards.values() if s.frame is not None)
    elapsed = now - state.planned_at
    if done <= 0:
        return max(0.0, state.predicted_makespan_seconds - elapsed)
    return elapsed * (total - done) / done


def _lanes(running: Running) -> Table | None:
    if running.snapshot is None:
        return None
    table = Table(box=None, padding=(0, 1), show_header=False)
    for shown, trial in enumerate(sorted(running.state.live_trials)):
        progress = running.snapshot.trials.get(trial)
        if shown == MAX_LANES:
            table.add_row(f"... and {len(running.state.live_trials) - shown} more", "", "")
            break
        lane = running.state.trial_lane[trial]
        if progress is None:
            table.add_row(lane, "pending", "")
        else:
            table.add_row(lane, progress.phase, (progress.shard or "").replace("|", " "))
    return table


def screen(runnings: Sequence[Running], trouble: str, width: int) -> RenderableType:
    """The whole screen."""
    now = time.time()
    parts: list[RenderableType] = []
    for running in runnings:
        state = running.state
        head = Text.assemble(
            (state.evaluation_id, "bold"), f"  {stage_of(state)}  {seconds(now - state.record.accepted_at)}"
        )
        parts.append(head)
        if state.shards:
            eta = eta_seconds(running, now)
            line = Table.grid(padding=(0, 1))
            bar = ProgressBar(
                total=len(state.shards), completed=done_shards(state), width=max(10, min(40, width - 44))
            )
            slots = sum(n.lanes for n in state.nodes.values() if n.status in ("ready", "staging"))
            line.add_row(
                bar,
                f"{done_shards(state)}/{len(state.shards)} shards",
                f"{len(state.live_trials)}/{slots} GPUs",
                f"ETA {seconds(eta)}" if eta is not None else "",
            )
            parts.append(line)
        lanes = _lanes(running)
        if lanes is not None and lanes.row_count:
            parts.append(lanes)
        parts.append(_entries(state))
        parts += [Text(f"  ! {w}", style="yellow") for w in list(dict.fromkeys(state.warnings))[-3:]]
    if trouble:
        parts.append(Text(f"  ! {trouble}", style="yellow"))
    return Group(*parts)


def _entries(state: State) -> Text:
    text = Text("  ")
    styles = {"scored": "green", "failed": "bold red", "scoring": "cyan"}
    for entry in state.entries:
        text.append(f"{entry.name}: {entry.status}  ", style=styles.get(entry.status, "dim"))
    return text


class Watcher:
    """Draws on a terminal; elsewhere prints a line when something changed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        )
        self._last = ""
        self._said_at = 0.0

    def __enter__(self) -> Watcher:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._live is not None:
            self._live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the screen to a question."""
        if self._live is not None:
            self._live.stop()
        try:
            yield
        finally:
            if self._live is not None:
                self._live.start()

    def show(self, runnings: Sequence[Running], trouble: str) -> None:
        if self._live is not None:
            self._live.update(screen(runnings, trouble, self.console.width))
            return
        now = time.time()
        lines = []
        for running in runnings:
            state = running.state
            scored = sum(e.status == "scored" for e in state.entries)
            shards = f", {done_shards(state)}/{len(state.shards)} shards" if state.shards else ""
            lines.append(f"{stage_of(state)}{shards}, {scored}/{len(state.entries)} scored")
        line = ("; ".join(lines) or "nothing runs") + (f"  ! {trouble}" if trouble else "")
        if line != self._last and (now - self._said_at >= LINE_SECONDS or not self._last):
            elapsed = seconds(now - min(r.state.record.accepted_at for r in runnings)) if runnings else ""
            self.console.print(f"[{elapsed:>9}] {line}", highlight=False, markup=False)
            self._last, self._said_at = line, now
