"""State of evaluations: their summaries, and what only the work folder and Slurm know. For screens and `status --json`.

Rule: a function of an evaluation's summary; no journal is read. `board` draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.base.words import format_seconds
from coordinator.decide.evaluation.records import job_prefix
from coordinator.runtime.known_evaluations import Summaries
from coordinator.runtime.summary import (
    NO_SLOT,
    NOTHING_FREE,
    PAUSED,
    Halt,
    Node,
    Summary,
    TimedNote,
    halt_of,
    read_evaluation,
)
from coordinator.runtime.work_lock import WorkLock
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

if TYPE_CHECKING:
    from coordinator.site.cluster import JobState, NodeState

DEFAULT_ROWS = 20
COPIED_FIELDS = {  # fields of a summary that `status --json` copies
    "evaluation_id", "suite", "mode", "step", "checkpoint", "shards_done", "shards", "trials", "scored", "entries",
    "accepted_at", "ended_at", "makespan_seconds", "stragglers", "warnings", "failed_jobs",
}  # fmt: skip
SCORE_FIELDS = ("task", "metric", "filter", "value", "stderr", "higher_is_better")


@dataclass(slots=True)
class EvaluationView:
    """An evaluation on a screen. `halt`: why it does not progress; `held`: a process holds the work folder.

    `ahead`: evaluations served before it, as sentences; `taken`: replaces NO_SLOT; `jobs_left`: its jobs that run without a
    coordinator; `trackers`: tracker -> why it does not have this evaluation.
    """

    summary: Summary
    halt: Halt | None = None
    held: bool = True
    ahead: Sequence[str] = ()
    taken: str = NO_SLOT
    jobs_left: int = 0
    trackers: Mapping[str, str] = field(default_factory=dict)

    @property
    def stopped(self) -> bool:
        if self.halt is None or self.halt.word == PAUSED:
            return False
        return not (self.summary.parked and self.held)

    @property
    def stage(self) -> str:
        return self.halt.word if self.halt is not None and self.summary.parked else self.summary.stage

    @property
    def fault(self) -> str:
        """Why it cannot continue, or ""."""
        return self.summary.parked.error if self.summary.parked else self.summary.fault

    def age(self, now: float) -> float:
        """Return the seconds from its acceptance to its end, to its stop, or to now."""
        until = self.summary.ended_at or (self.halt.since if self.halt and self.stopped else now)
        return max(0.0, until - (self.summary.accepted_at or until))

    def waits_for(self, now: float, *, timed: bool = True) -> list[str]:
        """Describe what it waits for: the evaluations ahead of it, rather than what they have not yet taken."""
        waits = () if self.summary.parked else self.summary.waits
        said = [
            timed_in_words(what, now, timed=timed) for what in waits if what.what != NO_SLOT or not self.ahead
        ]
        return [*(self.taken if what == NO_SLOT else what for what in said), *self.ahead]

    def back_offs(self, now: float) -> dict[str, str]:
        """Return node in back-off -> why, and for how long."""
        return {
            n.name: _back_off(n, now, timed=not self.stopped)
            for n in self.summary.nodes
            if n.status == "back-off"
        }


def choose_shown(
    summaries: Sequence[Summary], *, only: str | None, only_open: bool, only_failed: bool, last: int | None
) -> tuple[list[Summary], int]:
    """Return the summaries to show, open ones first, then the newest `last`, and how many are omitted."""
    found = [
        s
        for s in summaries
        if only in (None, s.evaluation_id)
        and (not only_open or s.ended_at is None)
        and (not only_failed or has_failed(s))
    ]
    found.sort(key=lambda s: (s.ended_at is not None, -s.accepted_at, s.evaluation_id))
    return found[:last], len(found) - len(found[:last])


def has_failed(summary: Summary) -> bool:
    """Return whether it has a failed task or cannot continue. Cancelled evaluations have not failed."""
    halted = summary.parked or summary.fault
    return bool(summary.errors or halted) and not (summary.ended_at and summary.cancelled)


def all_summaries(config: Config) -> list[Summary]:
    found = Summaries(config)
    found.look(0.0)
    return [*found.open, *found.ended]


def view_of(config: Config, summary: Summary, *, held: bool) -> EvaluationView:
    """Return a summary prepared for a screen. `held`: a process holds the work folder."""
    paths = EvaluationPaths(config.work_dir / summary.evaluation_id)
    halt = None if summary.ended_at is not None else halt_of(summary, paths, held=held)
    return EvaluationView(summary, halt, held=held, trackers=_trackers(paths))


def evaluation_views(
    config: Config,
    chosen: Sequence[Summary],
    open_ones: Sequence[Summary],
    ask: Callable[[], Sequence[JobState]] = tuple,
    ask_nodes: Callable[[], Sequence[NodeState]] = tuple,
) -> list[EvaluationView]:
    """Return the state of each of `chosen`. `open_ones`: all evaluations that have not ended.

    `ask`: for the cluster's jobs, called once if no process holds the folder; `ask_nodes`: for its nodes, called once if no
    slot is free.
    """
    held = WorkLock(WorkPaths(config.work_dir).lock).held()
    found = in_serving_order([view_of(config, summary, held=held) for summary in chosen], open_ones)
    if left := [one for one in found if one.stopped and one.summary.jobs and not held]:
        jobs = [job.name for job in ask() if job.phase == "running"]
        for one in left:
            one.jobs_left = sum(name.startswith(job_prefix(one.summary.evaluation_id)) for name in jobs)
    if without := [one for one in found if NO_SLOT in one.waits_for(0.0) and not one.stopped]:
        _say_what_is_taken(without, config, sum(s.gpus for s in open_ones), ask_nodes())
    return found


def in_serving_order(found: list[EvaluationView], open_ones: Iterable[Summary]) -> list[EvaluationView]:
    """Tell waiting evaluations which of `open_ones` are served before them."""
    turns = {s.evaluation_id: s.turn for s in open_ones}
    for one in found:
        if one.stage == "waits":
            one.ahead = ahead_of(one.summary.evaluation_id, turns)
    return found


def _trackers(paths: EvaluationPaths) -> dict[str, str]:
    """Return tracker -> why it does not have this evaluation."""
    if not (paths.root / "trackers.json").exists():
        return {}
    from coordinator.results.trackers.live import tracker_failures

    return tracker_failures(paths)


def view_as_json(one: EvaluationView, folder: Path, now: float) -> dict[str, Any]:
    """Return what `status --json` has about an evaluation. `folder`: the evaluation's."""
    summary = one.summary
    return summary.model_dump(include=COPIED_FIELDS) | {
        "stage": one.stage,
        "age_seconds": one.age(now),
        "eta_seconds": seconds_left(summary, now),
        "stopped": one.stopped,
        "jobs_left": one.jobs_left,
        "nodes_aside": one.back_offs(now),
        "held_jobs": held_jobs(summary, now, timed=not one.stopped),
        "waits_seconds": back_off_seconds_left(summary, now),
        "waits_for": one.waits_for(now),
        "errors": summary.errors,
        "fault": one.fault or None,
        "scores": [{name: getattr(score, name) for name in SCORE_FIELDS} for score in summary.main_scores],
        "trackers": one.trackers,
        "folder": str(folder),
    }


def _back_off(node: Node, now: float, *, timed: bool) -> str:
    left = f" for {format_seconds(node.until - now)} more" if node.until is not None and timed else ""
    return f"in back-off{left} (time {node.times}): {node.why}"


# --- sentences about waits --------------------------------------------------------------------------------------------------


def timed_in_words(what: TimedNote, now: float, *, timed: bool = True) -> str:
    """Describe what it waits for; `timed`: and for how long."""
    since = f" for {format_seconds(now - what.at)}" if timed and what.at is not None else ""
    return f"{what.what}{since}{': ' if what.why else ''}{what.why}"


def back_off_seconds_left(summary: Summary, now: float) -> float | None:
    """Return the seconds until the first node returns, while all are in back-off."""
    return None if summary.waits_until is None else max(0.0, summary.waits_until - now)


def held_jobs(summary: Summary, now: float, *, timed: bool = True) -> dict[str, str]:
    """Return job that Slurm does not accept yet -> why, and when it is submitted again. `timed`: a process is running it."""
    return {
        job.what: f"Slurm does not accept it yet ({job.why})"
        + (f"; submitted again in {format_seconds(job.at - now)}" if timed and job.at is not None else "")
        for job in summary.held
    }


def seconds_left(summary: Summary, now: float) -> float | None:
    """Return the predicted seconds until the last score, at least one; None before the plan, and while it is parked or paused."""
    halted = summary.parked or summary.paused_at is not None
    return None if summary.done_at is None or halted else max(1.0, summary.done_at - now)


def ahead_of(evaluation_id: str, turns: Mapping[str, tuple[float, float]]) -> list[str]:
    """Describe the evaluations served before a waiting one."""
    first = [other for other, turn in turns.items() if turn < turns[evaluation_id]]
    if len(first) > 1:
        return [f"{len(first)} evaluations are served before it"]
    return [f"{other} is served before it" for other in first]


def _say_what_is_taken(
    found: Iterable[EvaluationView], config: Config, own: int, nodes: Sequence[NodeState]
) -> None:
    """Describe nodes and GPUs in use, and the limits of `[borrow]`. `found`: those without a slot; `own`: GPUs in use."""
    from coordinator.decide.evaluation.footprint import UNKNOWN_NEED, gpu_need
    from coordinator.site.cluster.node_choice import gpus_in_words

    said = [gpus_in_words(nodes, own) or NOTHING_FREE]
    if bounds := config.borrow.model_dump(
        include={"max_nodes", "max_gpus", "leave_nodes_free"}, exclude_defaults=True
    ):
        said.append("or [borrow] allows no more: " + ", ".join(f"{k} = {v}" for k, v in bounds.items()))
    for one in found:
        record = read_evaluation(EvaluationPaths(config.work_dir / one.summary.evaluation_id))
        need = UNKNOWN_NEED if record is None else gpu_need(record)
        one.taken = ", ".join(filter(None, [*said, need.left_out(nodes)]))
