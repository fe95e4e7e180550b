"""`evalspan status`: a row for each evaluation of a work folder, how rows are printed, and which logs there are.

Rule: the row of an ended evaluation comes from its `status.json`, not from its journal. An unreadable
journal gives a row that says so and does not affect other rows. An evaluation's id is never cut, since
people copy it: where a row does not fit the terminal, each evaluation takes two lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from coordinator.cli.evaluations import replay
from coordinator.cli.live_screen import done_shards, stage_of
from coordinator.config.schema import Config
from coordinator.evaluation.events import Accepted
from coordinator.evaluation.state import HeldJob, NodeUse, State
from coordinator.intake.pending import PendingFile
from coordinator.report.render import by_reason, seconds
from coordinator.runtime.journal import read_events
from coordinator.runtime.status_file import WARNINGS, Ended, Parked, read_evaluation, read_status
from coordinator.trackers.live import failures
from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths

COLUMNS = ("evaluation", "stage", "shards", "trials", "scored", "age")


def rows_of(config: Config, only: EvaluationPaths | None = None) -> list[dict[str, Any]]:
    """A row for each evaluation (or for `only`), oldest first."""
    folders = [only] if only else [EvaluationPaths(j.parent) for j in config.work_dir.glob("*/journal.jsonl")]
    rows = [row for paths in folders if (row := _row(config, paths)) is not None]
    return sorted(rows, key=lambda row: -row["age_seconds"])


def _row(config: Config, paths: EvaluationPaths) -> dict[str, Any] | None:
    """The row of one evaluation; None where its journal is empty."""
    status = read_status(paths)
    if isinstance(status, Ended):
        row = _of_ended(status)
    else:
        try:
            events = list(read_events(paths.journal))
            if not events:
                return None
            if isinstance(events[0], Accepted) and events[0].record.evaluation_id != paths.root.name:
                return None  # a copy of another evaluation's folder
            row = _of_state(replay(events, config), status)
        except Exception as error:  # noqa: BLE001 (one bad row must not hide the others)
            why = status.error if status is not None else f"its journal cannot be read: {error}"
            row = _of_record(paths, status, why)
    return {**row, "failed_jobs": failed_jobs(paths), "trackers": failures(paths), "folder": str(paths.root)}


def _of_state(state: State, parked: Parked | None) -> dict[str, Any]:
    return {
        "evaluation_id": state.evaluation_id,
        "suite": state.record.suite.name,
        "step": state.record.checkpoint.step,
        "stage": stage_of(state) if parked is None or state.ended_at is not None else _stage(parked),
        "shards_done": done_shards(state),
        "shards": len(state.shards.by_name),
        "trials": len(state.trials.live),
        "scored": sum(e.status == "scored" for e in state.entries),
        "entries": len(state.entries),
        "age_seconds": time.time() - state.record.accepted_at,
        "nodes_aside": {n.name: _back_off(n) for n in state.nodes.by_name.values() if n.status == "back-off"},
        "held_jobs": {name: _held(job) for name, job in sorted(state.jobs.held.items())},
        "waits_seconds": None if state.waits_until is None else max(0.0, state.waits_until - time.time()),
        "stragglers": {
            t: _straggles(times, ended=t not in state.trials.live)
            for t, times in state.trials.stragglers.items()
        },
        "errors": {e.name: e.error for e in state.entries if e.error},
        "warnings": list(dict.fromkeys(state.warnings))[-WARNINGS:],
        "fault": parked.error if parked is not None and state.ended_at is None else None,
    }


def _of_ended(ended: Ended) -> dict[str, Any]:
    return {
        "evaluation_id": ended.evaluation_id,
        "suite": ended.suite,
        "step": ended.step,
        "stage": "cancelled" if ended.cancelled else "ended",
        "shards_done": ended.shards_done,
        "shards": ended.shards,
        "trials": 0,
        "scored": ended.scored,
        "entries": ended.entries,
        "age_seconds": time.time() - ended.accepted_at,
        "nodes_aside": {},
        "held_jobs": {},
        "waits_seconds": None,
        "stragglers": {t: _straggles(times, ended=True) for t, times in ended.stragglers.items()},
        "errors": dict(ended.errors),
        "warnings": list(ended.warnings),
        "fault": None,
    }


def _of_record(paths: EvaluationPaths, parked: Parked | None, why: str) -> dict[str, Any]:
    """A row from `evaluation.json` alone, where the journal cannot be read."""
    record = read_evaluation(paths)
    return {
        "evaluation_id": paths.root.name,
        "suite": record.suite.name if record is not None else "",
        "step": record.checkpoint.step if record is not None else None,
        "stage": _stage(parked) if parked is not None else "unreadable",
        "shards_done": 0,
        "shards": 0,
        "trials": 0,
        "scored": 0,
        "entries": len(record.suite.tasks) if record is not None else 0,
        "age_seconds": time.time() - record.accepted_at if record is not None else 0.0,
        "nodes_aside": {},
        "held_jobs": {},
        "waits_seconds": None,
        "stragglers": {},
        "errors": {},
        "warnings": [],
        "fault": why,
    }


def _stage(parked: Parked) -> str:
    return "given up" if parked.until is None else "parked"


def _straggles(times: float, *, ended: bool) -> str:
    return f"takes {times:.1f} times as long as the others{' (it has ended)' if ended else ''}"


def _back_off(node: NodeUse) -> str:
    left = (
        ""
        if node.back_off_until is None
        else f" for {seconds(max(0.0, node.back_off_until - time.time()))} more"
    )
    return f"in back-off{left} (time {node.back_offs}): {node.why}"


def _held(job: HeldJob) -> str:
    left = max(0.0, job.due_at - time.time())
    return f"a limit on jobs keeps it out ({job.why}); submitted again in {seconds(left)}"


def failed_jobs(paths: EvaluationPaths) -> dict[str, str]:
    """Job or trial -> its error line, by their outcome files; retried ones included."""
    found = {}
    for file in sorted(paths.outcomes.glob("*.failed.json")) if paths.outcomes.is_dir() else ():
        try:
            outcome = OUTCOME.validate_json(file.read_bytes())
        except (OSError, ValidationError):
            continue
        if isinstance(outcome, Failed):
            found[outcome.name] = outcome.error
    return found


def logs_of(state: State, paths: EvaluationPaths, what: str | None) -> list[Path]:
    """Log files that `what` names: (part of) a job's or trial's name, or a shard of the trial."""
    files = sorted(paths.logs.glob("*.log"))
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
    return sorted({f for f in chosen if f.exists()})


def show_status(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a row per evaluation, then what went wrong."""
    if not rows:
        console.print(
            "no evaluations here yet: `evalspan submit` or `evalspan eval` starts one", soft_wrap=True
        )
        return
    cells = [_cells(row) for row in rows]
    widths = [max(len(c[i]) for c in [*cells, COLUMNS]) for i in range(len(COLUMNS))]
    if sum(widths) + 3 * len(widths) > console.width:
        for evaluation, *figures in cells:
            console.print(evaluation, style="bold", soft_wrap=True, highlight=False, markup=False)
            said = ", ".join(f for f in _said(figures) if f)
            console.print(f"  {said}", highlight=False, markup=False)
    else:
        table = Table(*COLUMNS, header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for cell in cells:
            table.add_row(*cell)
        console.print(table)
    for row in rows:
        for what, style in _troubles(row):
            console.print(f"{row['evaluation_id']}: {what}", style=style, soft_wrap=True, markup=False)


def show_pending(console: Console, checkpoints: PendingFile, now: float) -> None:
    """Print pending checkpoints and refused ones, each with its reason. `now`: unix seconds."""
    lines = [
        (w.checkpoint, w.suite, f"waits, {seconds(max(0.0, now - w.since))} by now: {w.why}", "yellow")
        for w in checkpoints.waiting
    ]
    lines += [
        (r.checkpoint, r.suite, f"refused {seconds(max(0.0, now - r.at))} ago: {r.why}", "red")
        for r in checkpoints.refused
    ]
    for checkpoint, suite, what, style in lines:
        said = f"{checkpoint} (suite {suite}): {what}"
        console.print(said, style=style, soft_wrap=True, highlight=False, markup=False)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shards = f"{row['shards_done']}/{row['shards']}" if row["shards"] else "-"
    scored = f"{row['scored']}/{row['entries']}"
    age = seconds(row["age_seconds"])
    return row["evaluation_id"], row["stage"], shards, str(row["trials"]), scored, age


def _said(figures: Sequence[str]) -> Iterable[str]:
    stage, shards, trials, scored, age = figures
    return (stage, f"{shards} shards" if shards != "-" else "", f"{trials} trials" if trials != "0" else "",
            f"{scored} scored", age)  # fmt: skip


def _troubles(row: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What went wrong, worst first, with its colour."""
    if row["fault"] is not None:
        yield row["fault"], "red"
    for name, why in {**by_reason(row["errors"]), **row["nodes_aside"]}.items():
        yield f"{name}: {why}", "red"
    if row["waits_seconds"] is not None:
        yield f"all nodes are in back-off: it waits for {seconds(row['waits_seconds'])} more", "red"
    for name, why in row["held_jobs"].items():
        yield f"{name}: {why}", "yellow"
    for name, why in row["stragglers"].items():
        yield f"{name} {why}", "yellow"
    for name, why in row["failed_jobs"].items():
        yield (
            f"{name} failed and was made up for: {why}"
            if row["stage"] in ("ended", "cancelled")
            else f"{name}: {why}",
            "yellow",
        )
    for name, why in row["trackers"].items():
        yield f"not in {name}: {why} (`evalspan export --left` tries again)", "yellow"
