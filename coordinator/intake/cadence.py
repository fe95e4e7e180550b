"""Which tasks of a suite a checkpoint is asked: those with `every = k` at each k-th checkpoint of its training.

Rule: the first checkpoint that is evaluated counts as number 0 and is asked all; others count in the order in which they were
accepted, each once. A checkpoint that is asked again is asked what it was asked before. Called by `from_settings`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath

from coordinator.decide.evaluation.records import EvaluationRecord
from evaljobs.contract.paths import slug
from evaljobs.contract.specs import CheckpointSpec, SuiteSpec
from evaljobs.contract.storage import find_record


def not_asked(work_dir: Path, suite: SuiteSpec, checkpoint: CheckpointSpec) -> tuple[str, ...]:
    """Tasks whose turn it is not at this checkpoint. Reads the records of the training's evaluations."""
    every = {task.name: task.every for task in suite.tasks if task.every > 1}
    if not every:
        return ()
    place, first, mine = PurePath(checkpoint.announced), dict[str, float](), list[EvaluationRecord]()
    for record in _records(work_dir, suite):
        other = PurePath(record.checkpoint.announced)
        if other == place:
            mine.append(record)
        elif other.parent == place.parent:
            first[str(other)] = min(record.accepted_at, first.get(str(other), record.accepted_at))
    if mine:
        latest = max(mine, key=lambda record: record.accepted_at)
        return tuple(name for name in every if name in latest.not_asked)
    return tuple(name for name, count in every.items() if len(first) % count)


def _records(work_dir: Path, suite: SuiteSpec) -> Iterator[EvaluationRecord]:
    """Yield the records of evaluations of this suite in this mode; one that cannot be read counts for nothing."""
    for file in work_dir.glob(f"*-{slug(suite.name)[:24]}-*/evaluation.json"):
        record = find_record(file, EvaluationRecord)
        if record is not None and (record.suite.name, record.suite.mode) == (suite.name, suite.mode):
            yield record
