"""Differences between the scores of two evaluations over the documents of both, kept beside the later one.

Rule: where both have the same documents, all tasks are compared in one pass a metric. What is kept counts while both
results.json are unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.evaluation.records import EvaluationRecord
from coordinator.report import verdicts
from coordinator.report.columns import documents, with_signals
from coordinator.report.learning_curves import ScoreValue, difference, keys_of, leaves_of
from coordinator.report.verdicts import aligned, is_mean, near
from coordinator.verdicts.paired import Difference, estimate
from evaljobs.contract.columns import CLUSTER, DENSE, DOCUMENT, HASH, Documents
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import read_record, write_atomic
from evaljobs.errors import OperatorError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger(__name__)

MOST_PAIRS = 8  # of an evaluation, that are kept
Differences = Mapping[str, Difference | None]


def differences(work_dir: Path, before: str, after: str) -> Differences:
    """Score name -> its difference, after less before, of the leaf tasks' scores that both evaluations (ids) have.

    None: its documents cannot be compared. OSError, ValueError or OperatorError where an evaluation cannot be read.
    """
    pair = [EvaluationPaths(work_dir / name) for name in (before, after)]
    written = [paths.results.stat().st_mtime_ns for paths in pair]
    head = json.dumps([before, *written])
    kept: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        kept = pair[1].paired.read_text().splitlines()
        for line in kept:
            if line.startswith(head):
                names, *columns = json.loads(line[len(head) :])
                found = map(Difference._make, zip(*columns, strict=True))
                return {
                    name: None if one.degrees == 0 else one for name, one in zip(names, found, strict=True)
                }
    made = _compared(*(_read(paths.root, at) for paths, at in zip(pair, written, strict=True)))
    rows = [(0, 0.0, 0.0, 0.0, None, None) if one is None else one for one in made.values()]
    line = head + json.dumps([list(made), *zip(*rows, strict=True)] if rows else [[]] * 7)
    others = [one for one in kept if not one.startswith(f'["{before}",')]
    with contextlib.suppress(OSError):  # another user's folder, or a full disk
        write_atomic(pair[1].paired, "".join(f"{one}\n" for one in [*others, line][-MOST_PAIRS:]).encode())
    return made


class _Metric(NamedTuple):
    """One metric of the tasks whose documents all have a value. `tasks`: their numbers; other arrays: a value a task."""

    tasks: Array
    values: Array  # of the documents of these tasks, one after the other
    starts: Array
    means: Array
    binary: Array  # are all values 0 or 1?


def overall(found: Differences, scores: Iterable[ScoreValue]) -> dict[str, Any]:
    """The record of `verdicts.overall`. `found`: of `differences`; `scores`: of the later evaluation, in order."""
    return verdicts.overall(
        (
            one.task,
            one.higher_is_better,
            (one.value - (change.difference if change else 0.0), one.value),
            change,
        )
        for one in scores
        if one.name in found and one.filter != DENSE
        for change in [found[one.name]]
    )


@dataclass(frozen=True)
class _Evaluated:
    """The scores of an evaluation's leaf tasks and their documents."""

    scores: Mapping[tuple[str, str], float]  # (task, column) -> value
    keys: Mapping[str, tuple[str, str]]  # task -> as of `keys_of`
    documents: Documents

    @cached_property
    def order(self) -> list[str]:
        """Tasks in order of rows: what numbers mean."""
        return sorted(self.documents.tasks, key=lambda task: self.documents.tasks[task].start)

    @cached_property
    def metrics(self) -> dict[str, _Metric]:
        """Without those of tasks with clusters."""
        import numpy as np  # noqa: PLC0415

        columns = dict(self.documents.columns)
        starts = np.array([self.documents.tasks[task].start for task in self.order])
        sizes = np.diff([*starts, len(columns.pop(DOCUMENT))])
        del columns[HASH]
        clustered = np.maximum.reduceat(columns.pop(CLUSTER, np.zeros(sizes.sum())) != 0, starts)
        found = {}
        for name, column in columns.items():
            whole = ~(np.maximum.reduceat(np.isnan(column), starts) | clustered)
            if whole.any():
                values = column if whole.all() else column[np.repeat(whole, sizes)]
                first = np.cumsum(sizes[whole]) - sizes[whole]
                binary = np.minimum.reduceat((values == 0) | (values == 1), first)
                means = np.add.reduceat(values, first) / sizes[whole]
                found[name] = _Metric(np.flatnonzero(whole), values, first, means, binary)
        return found


@lru_cache(maxsize=2)
def _read(root: Path, _written: int) -> _Evaluated:
    paths = EvaluationPaths(root)
    record = read_record(paths.evaluation, EvaluationRecord)
    results = json.loads(paths.results.read_bytes())
    try:
        found = documents(paths, record)
    except OperatorError as error:  # one damaged file hides no score
        log.warning("%s", error)
        found = Documents({}, {})
    tables = {**results.get("results", {}), **results.get("groups", {})}
    tasks = [task for task in tables if not leaves_of(results, task)]
    dense = with_signals(paths, record, results)["dense"]
    scores = {
        (task, name.removesuffix(f",{DENSE}")): nan if value is None else float(value)
        for task in tasks
        for name, value in {**tables[task], **dense.get(task, {})}.items()
        if "," in name and "_stderr," not in name and (value is None or isinstance(value, int | float))
    }
    return _Evaluated(scores, {task: keys_of(results, task) for task in tasks}, found)


def _compared(before: _Evaluated, after: _Evaluated) -> dict[str, Difference | None]:
    unlike = {
        task for task in before.keys.keys() & after.keys if difference(before.keys[task], after.keys[task])
    }
    same = _same_documents(before.documents, after.documents)
    fast = _in_vectors(before, after) if same else {}
    found: dict[str, Difference | None] = {}
    for task, name in (one for one in before.scores if one in after.scores):
        score = f"{task}/{name.removesuffix(',none')}" if "," in name else f"{task}/{name},{DENSE}"
        if task in unlike:
            found[score] = None
        elif (task, name) in fast:
            found[score] = fast[task, name]
        else:
            found[score] = _one(before, after, task, name)
    return found


def _same_documents(before: Documents, after: Documents) -> bool:
    import numpy as np  # noqa: PLC0415

    return (
        bool(before.rows)
        and before.rows == after.rows
        and all(np.array_equal(before.columns[name], after.columns[name]) for name in (DOCUMENT, HASH))
    )


def _in_vectors(before: _Evaluated, after: _Evaluated) -> dict[tuple[str, str], Difference | None]:
    """(task, column) -> difference, of all tasks in which each document has a value and no cluster."""
    import numpy as np  # noqa: PLC0415

    found: dict[tuple[str, str], Difference | None] = {}
    for name, theirs in before.metrics.items():
        ours = after.metrics.get(name)
        if ours is None or not np.array_equal(ours.tasks, theirs.tasks):
            continue
        changes = ours.values - theirs.values
        sizes = np.diff([*ours.starts, len(changes)])
        means = np.add.reduceat(changes, ours.starts) / sizes
        spread = changes - np.repeat(means, sizes)
        variances = np.add.reduceat(spread * spread, ours.starts) / np.maximum(sizes - 1, 1) / sizes
        gained, lost = (np.add.reduceat(sign * changes > 0, ours.starts, dtype=np.int64) for sign in (1, -1))
        arrays = (
            sizes,
            means,
            variances,
            ours.binary & theirs.binary,
            gained,
            lost,
            theirs.means,
            ours.means,
        )
        tasks = [after.order[number] for number in ours.tasks]
        for task, size, mean, variance, flags, up, down, *scored in zip(
            tasks, *(array.tolist() for array in arrays), strict=True
        ):
            said = [one.scores.get((task, name), nan) for one in (before, after)]
            if size > 1 and near(scored[0], said[0]) and near(scored[1], said[1]):
                flips = (up, down) if flags else (None, None)
                found[task, name] = Difference(size, mean, variance, size - 1.0, *flips)
            else:
                found[task, name] = None
    return found


def _one(before: _Evaluated, after: _Evaluated, task: str, name: str) -> Difference | None:
    """Compare one metric of one task over the documents that both have."""
    theirs, ours = (one.documents.of(task) for one in (before, after))
    if theirs is None or ours is None:
        return None
    if not (
        is_mean(theirs, name, before.scores[task, name]) and is_mean(ours, name, after.scores[task, name])
    ):
        return None
    one = estimate(*aligned(theirs, ours, name))
    return None if isinstance(one, str) else one.kept()
