"""Rows of `evalspan status`: one for each evaluation of a work folder.

Rule: the row of an ended evaluation comes from its `status.json`, not from its journal. An unreadable
journal gives a row that says so and does not affect other rows. `coordinator.report.status_table` prints them.
"""

from __future__ import annotations

import time
from typing import Any

from coordinator.cli.evaluations import folders, replay
from coordinator.cli.live_screen import done_shards, stage_of
from coordinator.config.schema import Config
from coordinator.evaluation.events import Accepted
from coordinator.evaluation.state import HeldJob, NodeUse, State
from coordinator.report.render import seconds
from coordinator.report.status_table import failed_jobs
from coordinator.runtime.journal import read_events
from coordinator.runtime.status_file import WARNINGS, Ended, Parked, read_evaluation, read_status
from coordinator.trackers.live import failures
from evaljobs.contract.paths import EvaluationPaths


def rows_of(config: Config, only: EvaluationPaths | None = None) -> list[dict[str, Any]]:
    """A row for each evaluation (or for `only`), oldest first."""
    rows = [
        row for paths in ([only] if only else folders(config)) if (row := _row(config, paths)) is not None
    ]
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
