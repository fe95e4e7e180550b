"""Rows of `evalspan status`, one for each evaluation of a work folder, and which logs there are.

Rule: the row of an ended evaluation comes from its `status.json`, not from its journal. An unreadable
journal gives a row that says so and does not affect other rows. `listing` prints the rows.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.cli.screen.progress import (
    NO_SLOT,
    NOTHING_FREE,
    ahead_of,
    done_shards,
    eta_seconds,
    has_pending,
    held_jobs,
    stage_of,
    waits_of,
    with_turn,
)
from coordinator.cli.screen.score_lines import Scores, first_of_each, main_scores, read_results
from coordinator.cluster import Cluster, ClusterError, JobState, NodeState
from coordinator.cluster.daemon_job import DAEMON, daemon_job, own_options, sbatch_line
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_reasons import gpus_in_words
from coordinator.config.schema import Config
from coordinator.evaluation.events import Accepted
from coordinator.evaluation.footprint import UNKNOWN_NEED, gpu_need
from coordinator.evaluation.state import NodeUse, State
from coordinator.report.learning_curves import ScoreValue
from coordinator.report.render import seconds
from coordinator.runtime.halts import last_sign, word_of
from coordinator.runtime.journal import OtherFormatError, WorkLock, read_events
from coordinator.runtime.replay import replay
from coordinator.runtime.status_file import WARNINGS, Ended, Parked, read_evaluation, read_status
from coordinator.runtime.wiring import slurm_options
from coordinator.trackers.live import failures
from evaljobs.contract import folded
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.queue.redis_client import QueueUnavailable
from evaljobs.queue.work_queue import QueueSnapshot, WorkQueue

Row = dict[str, Any]  # what `--json` prints of an evaluation

OVER = ("ended", "cancelled")  # stages of a row without further work
ROWS = 20  # shown by default
LISTING_SECONDS = 5.0  # longest wait for `squeue`, which only explains what waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which rows are asked for. `last`: at most so many, the newest; None: all."""

    open: bool = False
    failed: bool = False
    last: int | None = None

    def of(self, rows: Sequence[Row]) -> tuple[list[Row], int]:
        """The rows to show, those that are not over first, then the newest first; and how many are left out."""
        found = [
            r for r in rows if (not self.open or r["stage"] not in OVER) and (not self.failed or failed(r))
        ]
        found.sort(key=lambda r: (r["stage"] in OVER, -r["accepted_at"], r["evaluation_id"]))
        shown = found if self.last is None else found[: self.last]
        return shown, len(found) - len(shown)


def failed(row: Row) -> bool:
    """Has it a failed task, or can it not go on? What was cancelled has not failed."""
    return bool(row["errors"] or row["fault"]) and row["stage"] != "cancelled"


def facts_of(
    config: Config,
    only: EvaluationPaths | None = None,
    ask: Callable[[], Sequence[JobState]] = tuple,
    ask_nodes: Callable[[], Sequence[NodeState]] = tuple,
) -> list[Row]:
    """A row for each evaluation (or for `only`), without what `with_details` reads from further files; oldest first.

    `ask`: for the cluster's jobs, called once where a job is pending. `ask_nodes`: for its nodes, called once
    where no slot is free.
    """
    asked = cache(ask)
    runs = WorkLock(WorkPaths(config.work_dir).lock).held()
    rows = _read(config, [only] if only else _folders(config), asked, runs=runs)
    if not runs:
        for row in rows:
            row["stopped"] = row["stage"] not in OVER
            if row["stopped"]:
                sign = last_sign(EvaluationPaths(Path(row["folder"])))
                row["age_seconds"] = max(0.0, sign - float(row["accepted_at"]))
            if row["stopped"] and (names := row.get("job_names")):
                row["jobs_left"] = sum(j.phase == "running" and j.name in names for j in asked())
    for row in rows:
        row.pop("job_names", None)
    if only and any(row["stage"] == "waits" for row in rows):
        others = [paths for paths in _folders(config) if paths.root != only.root]
        _count_ahead(rows, _read(config, others, asked, runs=runs))
    else:
        _count_ahead(rows, ())
    say_what_is_taken(rows, config, ask_nodes)
    return sorted(rows, key=lambda row: (row["accepted_at"], row["evaluation_id"]))


def _folders(config: Config) -> list[EvaluationPaths]:
    return [EvaluationPaths(journal.parent) for journal in config.work_dir.glob("*/journal.jsonl")]


def _read(
    config: Config, folders: Iterable[EvaluationPaths], ask: Callable[[], Sequence[JobState]], *, runs: bool
) -> list[Row]:
    """`runs`: a process holds the work folder."""
    return [row for paths in folders if (row := _row(config, paths, ask, runs=runs)) is not None]


def say_what_is_taken(
    rows: Sequence[Row], config: Config, ask_nodes: Callable[[], Sequence[NodeState]]
) -> None:
    """Say of each one that has no slot which nodes and GPUs are taken; [borrow] only where it is set."""
    own = sum(row.pop("gpus", 0) for row in rows)
    needs = [(row, row.pop("need", UNKNOWN_NEED)) for row in rows]
    found = [(row, need) for row, need in needs if NO_SLOT in row["waits_for"] and not row["stopped"]]
    if not found:
        return
    nodes = ask_nodes()
    said = [gpus_in_words(nodes, own) or NOTHING_FREE]
    if bounds := config.borrow.model_dump(
        include={"max_nodes", "max_gpus", "leave_nodes_free"}, exclude_defaults=True
    ):
        said.append("or [borrow] allows no more: " + ", ".join(f"{k} = {v}" for k, v in bounds.items()))
    for row, need in found:
        mine = ", ".join(filter(None, [*said, need.left_out(nodes)]))
        row["waits_for"] = [mine if what == NO_SLOT else what for what in row["waits_for"]]


def _count_ahead(rows: Sequence[Row], others: Sequence[Row]) -> None:
    """Say of each of `rows` that waits how many of all are served before it."""
    turns = {r["evaluation_id"]: (-r.pop("priority", 0), r["accepted_at"]) for r in (*rows, *others)}
    there = {
        name: turns[name] for r in (*rows, *others) if r["stage"] not in OVER and (name := r["evaluation_id"])
    }
    for row in rows:
        if row["stage"] == "waits":
            row["waits_for"] = with_turn(row["waits_for"], ahead_of(row["evaluation_id"], there))


def with_details(row: Row) -> Row:
    """The row, with failed jobs, trackers, main scores and makespan read from the evaluation's files."""
    paths = EvaluationPaths(Path(row["folder"]))
    more: Row = {"failed_jobs": failed_jobs(paths), "trackers": failures(paths)}
    if row["stage"] in OVER:
        more["scores"] = [_score(s) for s in main_scores(paths.results)]
        report = read_results(paths.report) or {}
        # one that died with its node left no outcome: the report has the cluster's word, in capitals
        died = {g["trial"]: g["ended"] for g in report.get("gpus", ()) if g["ended"].isupper()}
        more["failed_jobs"] = {name: f"its job ended: {word}" for name, word in died.items()} | more[
            "failed_jobs"
        ]
        more["makespan_seconds"] = report.get("makespan_seconds", row["ended_at"] - row["accepted_at"])
    return row | more


def _row(
    config: Config, paths: EvaluationPaths, ask: Callable[[], Sequence[JobState]], *, runs: bool
) -> Row | None:
    """The row of one evaluation; None where its journal is empty. `runs`: a process goes on with it."""
    status = read_status(paths)
    if isinstance(status, Ended):
        return row_of_ended(status, paths)
    try:
        events = list(read_events(paths.journal))
        if not events:
            return None
        if isinstance(events[0], Accepted) and events[0].record.evaluation_id != paths.root.name:
            return None  # a copy of another evaluation's folder
        return _row_of_state(replay(events, config), status, paths, ask, runs=runs)
    except Exception as error:  # noqa: BLE001 (one bad row must not hide the others)
        if isinstance(error, OtherFormatError):
            return _row_of_record(paths, None, str(error))
        why = status.error if status is not None else f"its journal cannot be read: {error}"
        return _row_of_record(paths, status, why)


def _blank(paths: EvaluationPaths) -> Row:
    """What a row holds where there is nothing to say."""
    return {
        "evaluation_id": paths.root.name, "suite": "", "mode": "exact", "step": None, "checkpoint": "", "stage": "unreadable",
        "shards_done": 0, "shards": 0, "trials": 0, "scored": 0, "entries": 0, "accepted_at": 0.0, "ended_at": None,
        "age_seconds": 0.0, "makespan_seconds": None, "eta_seconds": None, "stopped": False, "jobs_left": 0, "nodes_aside": {},
        "held_jobs": {}, "waits_seconds": None, "waits_for": [], "stragglers": {}, "errors": {}, "warnings": [],
        "fault": None, "scores": [], "failed_jobs": {}, "trackers": {}, "folder": str(paths.root),
    }  # fmt: skip


def _row_of_state(
    state: State,
    parked: Parked | None,
    paths: EvaluationPaths,
    ask: Callable[[], Sequence[JobState]],
    *,
    runs: bool,
) -> Row:
    now = time.time()
    queue = queue_now(paths, state) if runs and state.index.running else None
    listed = ask() if any(has_pending(state.jobs.by_name[name], now) for name in state.jobs.live) else ()
    parked = None if state.ended_at is not None else parked
    scores = Scores()
    return _blank(paths) | {
        "evaluation_id": state.evaluation_id,
        "suite": state.record.suite.name,
        "mode": state.record.suite.mode or "exact",
        "step": state.record.checkpoint.step,
        "checkpoint": state.record.checkpoint.announced,
        "priority": state.record.priority,
        "stage": stage_of(state, now, queue) if parked is None else word_of(parked),
        "shards_done": done_shards(state),
        "shards": len(state.shards.by_name),
        "trials": len(state.trials.live),
        "gpus": _gpus_in_use(state),
        "need": gpu_need(state.record),
        "job_names": frozenset(state.jobs.live),
        "scored": sum(e.status == "scored" for e in state.entries),
        "entries": len(state.entries),
        "accepted_at": state.record.accepted_at,
        "ended_at": state.ended_at,
        "age_seconds": (state.ended_at or now) - state.record.accepted_at,
        "eta_seconds": None if parked is not None or state.ended_at is not None else eta_seconds(state, now),
        "nodes_aside": {
            n.name: _back_off(n, timed=runs) for n in state.nodes.by_name.values() if n.status == "back-off"
        },
        "held_jobs": held_jobs(state, now, timed=runs),
        "waits_seconds": None if state.waits_until is None else max(0.0, state.waits_until - now),
        "waits_for": waits_of(state, now, listed) if parked is None else [],
        "stragglers": {
            t: _straggles(times, ended=t not in state.trials.live)
            for t, times in state.trials.stragglers.items()
        },
        "errors": {e.name: e.error for e in state.entries if e.error},
        "warnings": list(dict.fromkeys(state.warnings))[-WARNINGS:],
        "scores": [_score(s) for e in state.entries for s in first_of_each(scores.of(e))],
        "fault": parked.error if parked is not None else None,
    }


def queue_now(paths: EvaluationPaths, state: State) -> QueueSnapshot | None:
    """The work queue of an evaluation; None where it has none, or its Redis is not reached from here."""
    if not state.shards.leaves or state.winding_down:
        return None
    with suppress(QueueUnavailable):
        address = WorkPaths(paths.root.parent).redis_address
        return WorkQueue.connect(address, state.evaluation_id).snapshot()
    return None


def _gpus_in_use(state: State) -> int:
    """GPUs of its trials whose jobs run."""
    running = sum(
        state.jobs.by_name[t.job].members.get(t.member) == "running" for t in state.trials.live.values()
    )
    return running * state.record.options.gpus_per_trial


def row_of_ended(ended: Ended, paths: EvaluationPaths) -> Row:
    """The row of an evaluation that has ended, from its summary alone."""
    return _blank(paths) | {
        "evaluation_id": ended.evaluation_id,
        "suite": ended.suite,
        "mode": ended.mode,
        "step": ended.step,
        "checkpoint": ended.checkpoint,
        "stage": "cancelled" if ended.cancelled else "ended",
        "shards_done": ended.shards_done,
        "shards": ended.shards,
        "scored": ended.scored,
        "entries": ended.entries,
        "accepted_at": ended.accepted_at,
        "ended_at": ended.ended_at,
        "age_seconds": ended.ended_at - ended.accepted_at,
        "stragglers": {t: _straggles(times, ended=True) for t, times in ended.stragglers.items()},
        "errors": dict(ended.errors),
        "warnings": list(ended.warnings),
    }


def _row_of_record(paths: EvaluationPaths, parked: Parked | None, why: str) -> Row:
    """A row from `evaluation.json` alone, where the journal cannot be read."""
    record = read_evaluation(paths)
    known: Row = {"fault": why} | ({"stage": word_of(parked)} if parked is not None else {})
    if record is not None:
        known |= {
            "suite": record.suite.name,
            "mode": record.suite.mode or "exact",
            "step": record.checkpoint.step,
            "checkpoint": record.checkpoint.announced,
            "priority": record.priority,
            "entries": len(record.suite.tasks),
            "accepted_at": record.accepted_at,
            "age_seconds": time.time() - record.accepted_at,
        }
    return _blank(paths) | known


def _score(score: ScoreValue) -> Row:
    return score.model_dump(include={"task", "metric", "filter", "value", "stderr", "higher_is_better"})


def _straggles(times: float, *, ended: bool) -> str:
    return f"takes {times:.1f} times as long as the others{' (it has ended)' if ended else ''}"


def _back_off(node: NodeUse, *, timed: bool) -> str:
    left = (
        ""
        if node.back_off_until is None or not timed
        else f" for {seconds(max(0.0, node.back_off_until - time.time()))} more"
    )
    return f"in back-off{left} (time {node.back_offs}): {node.why}"


def listed_jobs(config: Config) -> list[JobState]:
    """Slurm's list of this work folder's jobs, with the reason of each pending one; empty where it cannot be had."""
    if shutil.which("squeue") is None:  # the cluster's kind may be an option of `eval` alone
        return []
    cluster: Cluster = SlurmCli(replace(slurm_options(config), timeout_seconds=LISTING_SECONDS))
    try:
        return cluster.jobs()
    except ClusterError:
        return []


def queued_daemons(config: Config) -> list[JobState]:
    """This work folder's daemon jobs that are pending; empty where they cannot be had."""
    if config.cluster.kind != "slurm" or shutil.which("squeue") is None:
        return []
    options = slurm_options(config)
    try:
        cluster = SlurmCli(replace(options, timeout_seconds=LISTING_SECONDS))
        return [job for job in cluster.jobs_named(daemon_job(options).name) if job.phase == "pending"]
    except ClusterError:
        return []


def wrapped_daemon(config: Config, rest: str, script: str = DAEMON) -> str:
    """How SCRIPT.sbatch is submitted; "" without Slurm. `rest`: words behind it, with a space before them.

    Its time is what partition, account and QOS allow; a day where Slurm does not say.
    """
    if config.cluster.kind != "slurm":
        return ""
    options = slurm_options(config)
    job, own = daemon_job(options), own_options(options)
    with suppress(ClusterError):
        job = SlurmCli(replace(own, timeout_seconds=LISTING_SECONDS)).within_limits(job)
    return sbatch_line(job, options, wrapper(script), rest, named=script == DAEMON)


def wrapper(script: str = DAEMON) -> Path:
    """SCRIPT.sbatch of this installation, or of the clone."""
    name = f"{script}.sbatch"
    installed = Path(sys.prefix) / "share" / "evalspan" / name
    return installed if installed.exists() else Path(__file__).resolve().parents[3] / "scripts" / name


def listed_nodes(config: Config) -> list[NodeState]:
    """Slurm's list of this work folder's nodes; empty where it cannot be had."""
    if config.cluster.kind != "slurm" or shutil.which("sinfo") is None:
        return []
    try:
        return SlurmCli(replace(slurm_options(config), timeout_seconds=LISTING_SECONDS)).nodes()
    except ClusterError:
        return []


def failed_jobs(paths: EvaluationPaths) -> dict[str, str]:
    """Job or trial -> its error line, by their outcome files; retried ones included."""
    found = {}
    for file in folded.files_in(paths.outcomes, "*.failed.json"):
        try:
            outcome = OUTCOME.validate_json(folded.read_bytes(file))
        except (OSError, ValidationError):
            continue
        if isinstance(outcome, Failed):
            found[outcome.name] = outcome.error
    return found


def logs_of(state: State, paths: EvaluationPaths, what: str | None) -> list[Path]:
    """Log files that `what` names: (part of) a job's or trial's name, or a shard of the trial."""
    files = folded.files_in(paths.logs, "*.log")
    if what is None:
        return files
    shards = [s for name, s in state.shards.by_name.items() if what in (name, name.replace("|", " "))]
    trials = {Path(s.frame.file).stem for s in shards if s.frame is not None}
    jobs = {info.job.log: info for info in state.jobs.by_name.values()}
    chosen = [f for f in files if what in f.name]
    for pattern, info in jobs.items():
        for member, trial in enumerate(info.trials):
            if trial in trials or trial == what:
                chosen.append(Path(pattern.replace("%i", str(member))))
    return sorted({f for f in chosen if folded.exists(f)})
