"""Differences between the scores of two evaluations over the documents of both, kept beside the later one.

Rule: where both have the same documents, all tasks are compared in one pass a metric. What is kept counts while both
results.json are unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.columns import documents, with_signals
from coordinator.report.learning_curves import difference, keys_of, leaves_of
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


@dataclass(frozen=True)
class _Evaluated:
    """The scores of an evaluation's leaf tasks and their documents. Arrays have a value a task, in order of rows."""

    scores: Mapping[tuple[str, str], float]  # (task, column) -> value
    keys: Mapping[str, tuple[str, str]]  # task -> as of `keys_of`
    documents: Documents

    @cached_property
    def starts(self) -> Array:
        import numpy as np  # noqa: PLC0415

        starts: Array = np.array([rows.start for rows in self.documents.rows.values()])
        return starts

    @cached_property
    def binary(self) -> dict[str, Array]:
        """Of each metric: have the documents of a task only 0 and 1?"""
        import numpy as np  # noqa: PLC0415

        return {
            name: np.logical_and.reduceat((c == 0) | (c == 1) | np.isnan(c), self.starts)
            for name, c in self.documents.columns.items()
            if name not in (DOCUMENT, HASH, CLUSTER)
        }

    @cached_property
    def means(self) -> dict[str, Array]:
        """Of each metric: the mean of a task's documents, NaN without any."""
        import numpy as np  # noqa: PLC0415

        found = {}
        for name in self.binary:
            known, values = _known(self.documents.columns[name], self.starts)
            with np.errstate(invalid="ignore"):
                found[name] = np.add.reduceat(values, self.starts) / known
        return found


def _known(column: Array, starts: Array) -> tuple[Array, Array]:
    """(documents of each task that have a value, the column with 0 for the others)."""
    import numpy as np  # noqa: PLC0415

    lacks = np.isnan(column)
    return np.add.reduceat(~lacks, starts, dtype=np.int64), np.where(lacks, 0.0, column)


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
    both = [one for one in before.scores if one in after.scores]
    unlike = {task for task, _ in both if difference(before.keys[task], after.keys[task])}
    fast = _in_vectors(before, after) if _same_documents(before.documents, after.documents) else None
    found: dict[str, Difference | None] = {}
    for task, name in both:
        measure = f"{name},{DENSE}" if "," not in name else name.removesuffix(",none")
        found[f"{task}/{measure}"] = None
        if task in unlike:
            continue
        if fast is not None and (task, name) in fast:
            found[f"{task}/{measure}"] = fast[task, name]
            continue
        parts = [one.documents.of(task) for one in (before, after)]
        means = [one.scores[task, name] for one in (before, after)]
        if parts[0] is None or parts[1] is None:
            continue
        if is_mean(parts[0], name, means[0]) and is_mean(parts[1], name, means[1]):
            one = estimate(*aligned(parts[0], parts[1], name))
            if not isinstance(one, str):
                found[f"{task}/{measure}"] = one.kept()
    return found


def _same_documents(before: Documents, after: Documents) -> bool:
    import numpy as np  # noqa: PLC0415

    return (
        bool(before.rows)
        and before.rows == after.rows
        and all(np.array_equal(before.columns[name], after.columns[name]) for name in (DOCUMENT, HASH))
    )


def _in_vectors(before: _Evaluated, after: _Evaluated) -> dict[tuple[str, str], Difference | None]:
    """(task, column) -> difference, of the same documents; tasks with clusters are left out."""
    import numpy as np  # noqa: PLC0415

    starts, rows = after.starts, after.documents.tasks
    order = sorted(rows, key=lambda task: rows[task].start)
    columns = [one.documents.columns for one in (before, after)]
    sizes = np.diff([*starts, len(columns[1][DOCUMENT])])
    clustered = np.add.reduceat(columns[1].get(CLUSTER, np.zeros(sizes.sum(), bool)) != 0, starts)
    found: dict[tuple[str, str], Difference | None] = {}
    for name in before.binary.keys() & after.binary.keys():
        changes = columns[1][name] - columns[0][name]
        known, values = _known(changes, starts)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = np.add.reduceat(values, starts) / known
            spread = np.nan_to_num(changes - np.repeat(means, sizes))
            variances = np.add.reduceat(spread**2, starts) / (known - 1) / known
        flips = [np.add.reduceat(sign * changes > 0, starts, dtype=np.int64) for sign in (1, -1)]
        binary = before.binary[name] & after.binary[name]
        table = zip(
            *(c.tolist() for c in (clustered, known, means, variances, binary, *flips)),
            *(one.means[name].tolist() for one in (before, after)),
            strict=True,
        )
        for task, (clusters, count, mean, variance, flags, gained, lost, *scored) in zip(
            order, table, strict=True
        ):
            said = [one.scores.get((task, name), nan) for one in (before, after)]
            if not clusters and count > 1 and all(map(near, scored, said)):
                counts = (gained, lost) if flags else (None, None)
                found[task, name] = Difference(count, mean, variance, count - 1.0, *counts)
            elif not clusters:
                found[task, name] = None
    return found
