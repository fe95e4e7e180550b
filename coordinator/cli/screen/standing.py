"""Rows of `evalspan status`, one for each evaluation of a work folder.

Rule: a row is a function of an evaluation's summary, and no journal is read. `listing` prints the rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.base.words import seconds
from coordinator.config.schema import Config
from coordinator.evaluation.records import job_prefix
from coordinator.runtime.summaries import Summaries
from coordinator.runtime.summary import (
    NO_SLOT,
    NOTHING_FREE,
    Halt,
    Node,
    Summary,
    Timed,
    halt_of,
    last_sign,
    read_evaluation,
)
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

if TYPE_CHECKING:
    from coordinator.cluster import JobState, NodeState
    from coordinator.report.learning_curves import ScoreValue

Row = dict[str, Any]  # what `--json` prints of an evaluation

OVER = ("ended", "cancelled")  # stages of a row without further work
ROWS = 20  # shown by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which evaluations are asked for. `last`: at most so many, the newest; None: all."""

    only: str | None = None
    open: bool = False
    failed: bool = False
    last: int | None = None

    def of(self, summaries: Sequence[Summary]) -> tuple[list[Summary], int]:
        """Those to show, what is not over first, then the newest; and how many are left out."""
        found = [
            s
            for s in summaries
            if self.only in (None, s.evaluation_id)
            and (not self.open or s.ended_at is None)
            and (not self.failed or failed(s))
        ]
        found.sort(key=lambda s: (s.ended_at is not None, -s.accepted_at, s.evaluation_id))
        shown = found if self.last is None else found[: self.last]
        return shown, len(found) - len(shown)


def failed(summary: Summary) -> bool:
    """Has it a failed task, or can it not go on? What was cancelled has not failed."""
    halted = summary.parked or summary.fault
    return bool(summary.errors or halted) and not (summary.ended_at and summary.cancelled)


def all_of(config: Config) -> list[Summary]:
    """Of all evaluations of the work folder."""
    found = Summaries(config)
    found.look(0.0)
    return [*found.open, *found.ended]


def rows_of(
    config: Config,
    chosen: Sequence[Summary],
    open_ones: Sequence[Summary],
    ask: Callable[[], Sequence[JobState]] = tuple,
    ask_nodes: Callable[[], Sequence[NodeState]] = tuple,
) -> list[Row]:
    """A row for each of `chosen`. `open_ones`: all evaluations that have not ended.

    `ask`: for the cluster's jobs, called once where no process has the folder; `ask_nodes`: for its nodes, called
    once where no slot is free.
    """
    held = WorkLock(WorkPaths(config.work_dir).lock).held()
    rows = [
        _row(summary, EvaluationPaths(config.work_dir / summary.evaluation_id), held=held)
        for summary in chosen
    ]
    turns = {s.evaluation_id: s.turn for s in open_ones}
    jobs: Sequence[JobState] | None = None
    for row, summary in zip(rows, chosen, strict=True):
        if row["stopped"] and not held and summary.jobs:
            jobs = ask() if jobs is None else jobs
            prefix = job_prefix(summary.evaluation_id)
            row["jobs_left"] = sum(j.phase == "running" and j.name.startswith(prefix) for j in jobs)
        if row["stage"] == "waits":
            row["waits_for"] = with_turn(row["waits_for"], ahead_of(summary.evaluation_id, turns))
    _say_what_is_taken(rows, config, sum(s.gpus for s in open_ones), ask_nodes)
    return rows


def _row(summary: Summary, paths: EvaluationPaths, *, held: bool) -> Row:
    """`held`: a process holds the work folder."""
    halt = None if summary.ended_at is not None else halt_of(summary, paths, held=held)
    stopped = halt is not None and (summary.parked is None or not held)
    row = row_of(summary, halt, time.time(), stopped_at=last_sign(paths) if stopped else None)
    return row | {"trackers": _trackers(paths), "folder": str(paths.root)}


def _trackers(paths: EvaluationPaths) -> dict[str, str]:
    """Tracker -> why it does not have this evaluation."""
    if not (paths.root / "trackers.json").exists():
        return {}
    from coordinator.trackers.live import failures

    return failures(paths)


def row_of(summary: Summary, halt: Halt | None, now: float, *, stopped_at: float | None = None) -> Row:
    """The row of a summary alone. `halt`: why it does not go on; `stopped_at`: since when no process runs it."""
    over = summary.ended_at is not None
    parked = summary.parked if not over else None
    until, runs = summary.ended_at or stopped_at or now, stopped_at is None
    return {
        "evaluation_id": summary.evaluation_id,
        "suite": summary.suite,
        "mode": summary.mode,
        "step": summary.step,
        "checkpoint": summary.checkpoint,
        "stage": halt.word if parked is not None and halt is not None else summary.stage,
        "shards_done": summary.shards_done,
        "shards": summary.shards,
        "trials": summary.trials,
        "scored": summary.scored,
        "entries": summary.entries,
        "accepted_at": summary.accepted_at,
        "ended_at": summary.ended_at,
        "age_seconds": max(0.0, until - summary.accepted_at) if summary.accepted_at else 0.0,
        "makespan_seconds": summary.makespan_seconds,
        "eta_seconds": None if parked else seconds_left(summary, now),
        "stopped": not over and not runs,
        "jobs_left": 0,
        "nodes_aside": {
            n.name: _back_off(n, now, timed=runs) for n in summary.nodes if n.status == "back-off"
        },
        "held_jobs": held_jobs(summary, now, timed=runs),
        "waits_seconds": None if summary.waits_until is None else max(0.0, summary.waits_until - now),
        "waits_for": [] if parked else [in_words(what, now) for what in summary.waits],
        "stragglers": dict(summary.stragglers),
        "errors": summary.errors,
        "warnings": list(summary.warnings),
        "fault": parked.error if parked else summary.fault or None,
        "scores": [_score(score) for score in summary.main_scores],
        "failed_jobs": dict(summary.failed_jobs),
        "trackers": {},
        "folder": "",
    }


def _score(score: ScoreValue) -> Row:
    return score.model_dump(include={"task", "metric", "filter", "value", "stderr", "higher_is_better"})


def _back_off(node: Node, now: float, *, timed: bool) -> str:
    left = f" for {seconds(node.until - now)} more" if node.until is not None and timed else ""
    return f"in back-off{left} (time {node.times}): {node.why}"


# --- what it waits for, in sentences ---------------------------------------------------------------------------------


def in_words(what: Timed, now: float, *, timed: bool = True) -> str:
    """What it waits for; `timed`: and for how long."""
    since = f" for {seconds(now - what.at)}" if timed and what.at is not None else ""
    return f"{what.what}{since}{': ' if what.why else ''}{what.why}"


def about(left: float) -> str:
    """Predicted seconds, without the digits that a prediction does not have."""
    return f"about {math.ceil(left)} s" if left < 100 else f"about {seconds(left)}"


def all_in_back_off(left: float | None) -> str:
    """`left`: seconds until the first node returns; None where a node is in use."""
    return "" if left is None else f"all nodes are in back-off: it waits for {seconds(left)} more"


def held_jobs(summary: Summary, now: float, *, timed: bool = True) -> dict[str, str]:
    """Job that Slurm does not take yet -> why, and when it is submitted again. `timed`: a process goes on with it."""
    return {
        job.what: f"Slurm does not take it yet ({job.why})"
        + (f"; submitted again in {seconds(job.at - now)}" if timed and job.at is not None else "")
        for job in summary.held
    }


def seconds_left(summary: Summary, now: float) -> float | None:
    """Predicted seconds until the last score, at least one; None before the plan."""
    return None if summary.done_at is None else max(1.0, summary.done_at - now)


def ahead_of(evaluation_id: str, turns: Mapping[str, tuple[float, float]]) -> list[str]:
    """A sentence on the evaluations that are served before one that waits."""
    first = [other for other, turn in turns.items() if turn < turns[evaluation_id]]
    if len(first) > 1:
        return [f"{len(first)} evaluations are served before it"]
    return [f"{other} is served before it" for other in first]


def with_turn(waits: Sequence[str], ahead: Sequence[str]) -> list[str]:
    """What it waits for: the evaluations `ahead` of it, rather than what they have not taken yet."""
    return [*(what for what in waits if what != NO_SLOT or not ahead), *ahead]


def _say_what_is_taken(
    rows: Sequence[Row], config: Config, own: int, ask_nodes: Callable[[], Sequence[NodeState]]
) -> None:
    """Say of each one that has no slot which nodes and GPUs are taken, and the limits of `[borrow]`. `own`: GPUs in use."""
    found = [row for row in rows if NO_SLOT in row["waits_for"] and not row["stopped"]]
    if not found:
        return
    from coordinator.cluster.node_choice import gpus_in_words
    from coordinator.evaluation.footprint import UNKNOWN_NEED, gpu_need

    nodes = ask_nodes()
    said = [gpus_in_words(nodes, own) or NOTHING_FREE]
    if bounds := config.borrow.model_dump(
        include={"max_nodes", "max_gpus", "leave_nodes_free"}, exclude_defaults=True
    ):
        said.append("or [borrow] allows no more: " + ", ".join(f"{k} = {v}" for k, v in bounds.items()))
    for row in found:
        record = read_evaluation(EvaluationPaths(Path(row["folder"])))
        need = UNKNOWN_NEED if record is None else gpu_need(record)
        mine = ", ".join(filter(None, [*said, need.left_out(nodes)]))
        row["waits_for"] = [mine if what == NO_SLOT else what for what in row["waits_for"]]
