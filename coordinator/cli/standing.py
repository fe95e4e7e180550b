"""Rows of `evalspan status`: one for each evaluation of a work folder.

Rule: an ended evaluation is read from `ended.json`, not from its journal. An unreadable journal
gives a row that says so and does not affect other rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from coordinator.cli.app import replay
from coordinator.cli.live_screen import done_shards, stage_of
from coordinator.config.schema import Config
from coordinator.errors import EvalspanError
from coordinator.evaluation.events import Accepted
from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import HeldJob, NodeUse, State
from coordinator.report.render import seconds
from coordinator.report.status_table import failed_jobs
from coordinator.runtime.journal import read_events
from coordinator.runtime.parked import Fault, read_fault
from coordinator.runtime.summary import WARNINGS, Ended, read_ended
from coordinator.trackers.live import failures
from evaljobs.contract.paths import EvaluationPaths


def folders(config: Config) -> Iterator[EvaluationPaths]:
    """Folders of all evaluations with a journal."""
    for journal in Path(config.work_dir).glob("*/journal.jsonl"):
        yield EvaluationPaths(journal.parent)


def open_states(config: Config) -> list[State]:
    """Evaluations that have not ended, oldest first. Unreadable journals are skipped."""
    found = []
    for paths in folders(config):
        if read_ended(paths) is None:
            with contextlib.suppress(EvalspanError, OSError):
                found.append(replay(list(read_events(paths.journal)), config))
    return sorted((s for s in found if s.ended_at is None), key=lambda state: state.record.accepted_at)


def rows_of(config: Config, only: EvaluationPaths | None = None) -> list[dict[str, Any]]:
    """A row for each evaluation (or for `only`), oldest first."""
    rows = [
        row for paths in ([only] if only else folders(config)) if (row := _row(config, paths)) is not None
    ]
    return sorted(rows, key=lambda row: -row["age_seconds"])


def _row(config: Config, paths: EvaluationPaths) -> dict[str, Any] | None:
    """The row of one evaluation; None where its journal is empty."""
    ended = read_ended(paths)
    if ended is not None:
        row = _of_ended(ended)
    else:
        fault = read_fault(paths)
        try:
            events = list(read_events(paths.journal))
            if not events:
                return None
            if isinstance(events[0], Accepted) and events[0].record.evaluation_id != paths.root.name:
                return None  # a copy of another evaluation's folder
            row = _of_state(replay(events, config), fault)
        except Exception as error:  # noqa: BLE001 (one bad row must not hide the others)
            why = fault.error if fault is not None else f"its journal cannot be read: {error}"
            row = _of_record(paths, fault, why)
    return {**row, "failed_jobs": failed_jobs(paths), "trackers": failures(paths), "folder": str(paths.root)}


def _of_state(state: State, fault: Fault | None) -> dict[str, Any]:
    return {
        "evaluation_id": state.evaluation_id,
        "suite": state.record.suite.name,
        "step": state.record.checkpoint.step,
        "stage": stage_of(state) if fault is None or state.ended_at is not None else _standing(fault),
        "shards_done": done_shards(state),
        "shards": len(state.shards.by_name),
        "trials": len(state.trials.live),
        "scored": sum(e.status == "scored" for e in state.entries),
        "entries": len(state.entries),
        "age_seconds": time.time() - state.record.accepted_at,
        "nodes_aside": {n.name: _aside(n) for n in state.nodes.by_name.values() if n.status == "back-off"},
        "held_jobs": {name: _held(job) for name, job in sorted(state.jobs.held.items())},
        "waits_seconds": None if state.waits_until is None else max(0.0, state.waits_until - time.time()),
        "stragglers": {
            t: _straggles(times, ended=t not in state.trials.live)
            for t, times in state.trials.stragglers.items()
        },
        "errors": {e.name: e.error for e in state.entries if e.error},
        "warnings": list(dict.fromkeys(state.warnings))[-WARNINGS:],
        "fault": fault.error if fault is not None and state.ended_at is None else None,
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


def _of_record(paths: EvaluationPaths, fault: Fault | None, why: str) -> dict[str, Any]:
    """A row from `evaluation.json` alone, where the journal cannot be read."""
    record = None
    with contextlib.suppress(OSError, ValidationError):
        record = EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    return {
        "evaluation_id": paths.root.name,
        "suite": record.suite.name if record is not None else "",
        "step": record.checkpoint.step if record is not None else None,
        "stage": _standing(fault) if fault is not None else "unreadable",
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


def _standing(fault: Fault) -> str:
    return "given up" if fault.given_up else "parked"


def _straggles(times: float, *, ended: bool) -> str:
    return f"takes {times:.1f} times as long as the others{' (it has ended)' if ended else ''}"


def _aside(node: NodeUse) -> str:
    left = (
        ""
        if node.back_off_until is None
        else f" for {seconds(max(0.0, node.back_off_until - time.time()))} more"
    )
    return f"in back-off{left} (time {node.back_offs}): {node.why}"


def _held(job: HeldJob) -> str:
    left = max(0.0, job.due_at - time.time())
    return f"a limit on jobs keeps it out ({job.why}); submitted again in {seconds(left)}"
