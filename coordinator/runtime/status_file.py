"""`status.json` of an evaluation: its summary once it has ended, or why it is parked.

Rule: the journal stays the truth. The summary counts while the journal has the length that it had at the end; without a
valid one, or after a `retry`, the journal is read. Of one that has ended in another journal format the summary is made of
its other files. The daemon, `status` and the backlog read this file.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from coordinator.evaluation.records import EvaluationRecord
from coordinator.evaluation.state import State
from coordinator.runtime.journal import ended_in_other_format
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import write_record

SCHEMA_VERSION = 1
WARNINGS = 5  # number of warnings in a summary: the last ones


class Ended(Kept):
    """An evaluation that has ended. `started`: it used GPUs; `cancelled`: why it was cancelled or dropped, or ""."""

    what: Literal["ended"] = "ended"
    schema_version: int = SCHEMA_VERSION
    evaluation_id: str
    journal_bytes: int
    accepted_at: float  # unix seconds
    ended_at: float  # unix seconds
    checkpoint: str  # the folder that training wrote
    step: int | None
    suite: str
    mode: str = "exact"
    converted_digest: str | None = None  # of the announced checkpoint: names its converted copy
    cancelled: str = ""
    started: bool
    shards: int
    shards_done: int
    scored: int
    entries: int
    stragglers: Mapping[str, float]  # trial -> its time as a multiple of the other trials' time
    errors: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def result(self) -> str:
        return "cancelled" if self.cancelled else "failed" if self.errors else "done"


class Parked(Kept):
    """An evaluation that cannot go on now. `cancelled`: the reason of a cancellation that waits for its return, or ""."""

    what: Literal["parked"] = "parked"
    schema_version: int = SCHEMA_VERSION
    evaluation_id: str
    at: float  # unix seconds
    error: str
    until: float | None  # unix seconds of the next try; None: given up until `evalspan retry`
    cancelled: str = ""


_STATUS: TypeAdapter[Ended | Parked] = TypeAdapter(Ended | Parked)


def read_status(paths: EvaluationPaths) -> Ended | Parked | None:
    """What became of an evaluation; None where only its journal says it."""
    try:
        found = _STATUS.validate_json(paths.status.read_bytes())
        grown = isinstance(found, Ended) and found.journal_bytes != paths.journal.stat().st_size
    except (OSError, ValidationError):
        return _of_files(paths)
    current = found.schema_version == SCHEMA_VERSION and found.evaluation_id == paths.root.name
    return found if current and not grown else _of_files(paths)


def _of_files(paths: EvaluationPaths) -> Ended | None:
    """The summary of an evaluation that has ended in another journal format; None of any other."""
    if not ended_in_other_format(paths.journal) or (record := read_evaluation(paths)) is None:
        return None
    results: dict[str, Any] = {}
    report: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        results = json.loads(paths.results.read_bytes())
        report = json.loads(paths.report.read_bytes())
    errors, shards = results.get("failed", {}), len(report.get("shards", ()))
    return Ended(
        evaluation_id=paths.root.name,
        journal_bytes=paths.journal.stat().st_size,
        accepted_at=record.accepted_at,
        ended_at=(paths.results if results else paths.journal).stat().st_mtime,
        checkpoint=record.checkpoint.announced,
        step=record.checkpoint.step,
        suite=record.suite.name,
        mode=record.suite.mode or "exact",
        cancelled="on request" if report.get("status") == "cancelled" else "",
        started=bool(report.get("gpus")),
        shards=shards,
        shards_done=shards,
        scored=sum(entry["status"] == "scored" for entry in report.get("entries", ())),
        entries=len(record.suite.tasks),
        stragglers={},
        errors=errors,
        warnings=tuple(report.get("warnings", ()))[-WARNINGS:],
    )


def write_ended(state: State, paths: EvaluationPaths) -> None:
    """Write the summary of an evaluation that has ended. Where the disk refuses it, readers use the journal."""
    if state.ended_at is not None:
        with contextlib.suppress(OSError):
            write_record(paths.status, ended_of(state, paths.journal.stat().st_size))


def ended_of(state: State, journal_bytes: int) -> Ended:
    """The summary of a state that has ended. Pure."""
    if state.ended_at is None:
        raise ValueError(f"{state.evaluation_id} has not ended")
    checkpoint = state.record.checkpoint
    return Ended(
        evaluation_id=state.evaluation_id,
        journal_bytes=journal_bytes,
        accepted_at=state.record.accepted_at,
        ended_at=state.ended_at,
        checkpoint=checkpoint.announced,
        step=checkpoint.step,
        suite=state.record.suite.name,
        mode=state.record.suite.mode or "exact",
        converted_digest=state.converted_digest,
        cancelled=state.ending.cancelled,
        started=any(n.lanes for n in state.nodes.by_name.values()),
        shards=len(state.shards.by_name),
        shards_done=len(state.shards.by_name) - state.shards.todo,
        scored=sum(e.status == "scored" for e in state.entries),
        entries=len(state.entries),
        stragglers=dict(state.trials.stragglers),
        errors={e.name: e.error for e in state.entries if e.error},
        warnings=tuple(dict.fromkeys(state.warnings))[-WARNINGS:],
    )


def write_parked(paths: EvaluationPaths, parked: Parked) -> None:
    """Write why an evaluation is parked, where its folder exists and the disk takes it."""
    with contextlib.suppress(OSError):
        if paths.root.is_dir():
            write_record(paths.status, parked)


def remove_status(paths: EvaluationPaths) -> None:
    """Remove the file of an evaluation that goes on."""
    with contextlib.suppress(OSError):
        paths.status.unlink(missing_ok=True)


def read_evaluation(paths: EvaluationPaths) -> EvaluationRecord | None:
    """The record that an evaluation was accepted with; None where it cannot be read."""
    try:
        return EvaluationRecord.model_validate_json(paths.evaluation.read_bytes())
    except (OSError, ValidationError):
        return None
