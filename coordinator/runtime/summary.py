"""What stays known of an evaluation that is over, so that its journal is read no more.

Rule: `ended.json` is written when an evaluation has ended and holds what the daemon, `status` and the backlog ask of
ended ones. It counts for as long as the journal is as long as it was then; one that is gone on with (`retry`) is
read from its journal, as before. It may be missing: then the journal is read.
It does not know: scores (results.json) or times (report.json).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from pydantic import ValidationError

from coordinator.evaluation.state import State
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Record
from evaljobs.contract.storage import write_record

SCHEMA_VERSION = 1
WARNINGS = 5  # that are kept: the last


class Ended(Record):
    """An evaluation that is over. `started`: GPUs were taken for it; `cancelled`: why it was cancelled or dropped."""

    schema_version: int = SCHEMA_VERSION
    evaluation_id: str
    journal_bytes: int
    accepted_at: float  # unix seconds
    ended_at: float
    checkpoint: str  # the folder that training wrote
    step: int | None
    suite: str
    converted_digest: str | None = None  # names what was converted for it
    cancelled: str = ""
    started: bool
    shards: int
    shards_done: int
    scored: int
    entries: int
    stragglers: Mapping[str, float]  # trial -> times that it took as long as the others
    errors: Mapping[str, str]
    warnings: tuple[str, ...]


def write_ended(state: State, paths: EvaluationPaths) -> None:
    """Keep what there is to know of it. Where the disk refuses, its journal is read again by whoever asks."""
    if state.ended_at is None:
        return
    with contextlib.suppress(OSError):
        write_record(paths.ended, ended_of(state, paths.journal.stat().st_size))


def ended_of(state: State, journal_bytes: int) -> Ended:
    """What a state that has ended comes to. Pure."""
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
        converted_digest=state.conversion.announced.digest
        if state.conversion.announced is not None
        else None,
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


def read_ended(paths: EvaluationPaths) -> Ended | None:
    """None where it has not ended, or where only its journal can tell."""
    try:
        found = Ended.model_validate_json(paths.ended.read_bytes())
        current = found.schema_version == SCHEMA_VERSION and found.evaluation_id == paths.root.name
        return found if current and found.journal_bytes == paths.journal.stat().st_size else None
    except (OSError, ValidationError):
        return None
