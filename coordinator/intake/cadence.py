"""The tasks of a suite that a checkpoint is asked: those with `every = k` at each k-th checkpoint of its training.

Rule: the first checkpoint that is evaluated counts as number 0 and is asked all; others count in the order in which they were
accepted, each once. With `every = "auto"`, k follows from the scores so far, and counts from the last checkpoint that was asked. A
checkpoint that is asked again is asked what it was asked before. Called by `from_settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath

from coordinator.decide.evaluation.records import EvaluationRecord
from evaljobs.contract.paths import slug
from evaljobs.contract.specs import CheckpointSpec, SuiteSpec
from evaljobs.contract.storage import find_record

Cadences = Callable[[Path, SuiteSpec, CheckpointSpec], Mapping[str, int]]
"""Returns the cadence of tasks of a suite: at every k-th checkpoint of a training, by their scores so far."""


def not_asked(
    work_dir: Path, suite: SuiteSpec, checkpoint: CheckpointSpec, cadences: Cadences | None = None
) -> tuple[str, ...]:
    """Return the tasks whose turn it is not at this checkpoint. Reads the records of the training's evaluations.

    `cadences`: computes those of tasks with `every = "auto"`; None: such tasks are asked at each checkpoint.
    """
    every = {task.name: task.every for task in suite.tasks if task.every != 1}
    if not every or checkpoint.step in suite.all_at:
        return ()
    place, first, mine = PurePath(checkpoint.announced), dict[str, float](), list[EvaluationRecord]()
    skipped: dict[str, set[str]] = {}  # checkpoint -> tasks that none of its evaluations asks
    for record in _records(work_dir, suite):
        other = PurePath(record.checkpoint.announced)
        if other == place:
            mine.append(record)
        elif other.parent == place.parent:
            first[str(other)] = min(record.accepted_at, first.get(str(other), record.accepted_at))
            skipped[str(other)] = skipped.get(str(other), {*every}) & {*record.not_asked}
    if mine:
        latest = max(mine, key=lambda record: record.accepted_at)
        return tuple(name for name in every if name in latest.not_asked)
    latest_first = sorted(first, key=lambda other: -first[other])
    known = cadences(work_dir, suite, checkpoint) if cadences and "auto" in every.values() else {}

    def is_due(name: str, count: int | str) -> bool:
        if isinstance(count, int):
            return len(first) % count == 0
        asked = (number for number, other in enumerate(latest_first, 1) if name not in skipped[other])
        return next(asked, known.get(name, 1)) >= known.get(name, 1)

    return tuple(name for name, count in every.items() if not is_due(name, count))


def _records(work_dir: Path, suite: SuiteSpec) -> Iterator[EvaluationRecord]:
    """Yield the records of evaluations of this suite in this mode; one that cannot be read counts for nothing."""
    for file in work_dir.glob(f"*-{slug(suite.name)[:24]}-*/evaluation.json"):
        record = find_record(file, EvaluationRecord)
        if record is not None and (record.suite.name, record.suite.mode) == (suite.name, suite.mode):
            yield record
