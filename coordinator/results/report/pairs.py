"""Pairwise comparisons of evaluations over their common documents, stored beside the later one.

Rule: if both have the same documents, all tasks are compared in one pass per metric. Stored comparisons are valid while both
results.json are unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from coordinator.decide.verdicts.paired import FEW_CLUSTERS, Paired, compare_paired
from coordinator.errors import OperatorError
from coordinator.results.report.comparisons import comparison_rows
from coordinator.results.report.load_series import read_document
from coordinator.results.report.row_verdicts import UNLIKE_WORDS, add_verdicts, is_mean
from coordinator.results.report.scores import Evaluation, ScoreValue, key_difference
from coordinator.results.report.stored_documents import read_documents
from evaljobs.contract.columns import CLUSTER, DENSE, DOCUMENT, HASH, Documents
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import write_atomic
from evaljobs.errors import OperatorError as DamagedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

log = logging.getLogger(__name__)

MOST_PAIRS = 8  # stored per evaluation
SCREEN = (
    "{0} is a screen evaluation: its scores are estimates that answer its suite's own question, and are not compared with "
    "others; `evalspan report {0}` shows its verdicts"
)
NO_SAMPLES = "its samples were removed"
NO_MEAN = "its score is not a mean over its documents"
Differences = Mapping[str, Paired | str]


def compare_evaluations(
    work_dir: Path, evaluations: Sequence[str], *, mixed: bool = False, dense: bool = False
) -> tuple[list[Evaluation], list[dict[str, Any]]]:
    """Return (documents, rows of their scores with verdicts) of evaluations.

    `mixed`: verdicts also between modes; `dense`: also for dense signals. Raise OperatorError if one has no results.
    """
    made = [read_document(EvaluationPaths(work_dir / name)) for name in evaluations]
    for one in made:
        if one.mode == "screen":
            raise OperatorError(SCREEN.format(one.evaluation_id))
        if one.status == "open":
            raise OperatorError(f"{one.evaluation_id} has no results yet")
    rows = comparison_rows(made, dense=dense)
    found = [score_differences(work_dir, evaluations[0], name) for name in evaluations[1:]]
    add_verdicts(rows, found, mixed=mixed)
    return made, rows


def score_differences(work_dir: Path, before: str, after: str) -> Differences:
    """Return score name -> its difference, after minus before, for leaf-task scores that both evaluations (ids) have.

    A text tells why its documents cannot be compared. Raise OSError, ValueError or OperatorError if an evaluation cannot be
    read.
    """
    pair = [EvaluationPaths(work_dir / name) for name in (before, after)]
    written = [paths.results.stat().st_mtime_ns for paths in pair]
    head = json.dumps([before, *written])
    kept: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        kept = pair[1].paired.read_text().splitlines()
        for line in kept:
            if line.startswith(head):
                found = json.loads(line[len(head) :])
                return {name: one if isinstance(one, str) else Paired(*one) for name, one in found.items()}
    made = compare_evaluated(*(_read(paths.root, at) for paths, at in zip(pair, written, strict=True)))
    others = [one for one in kept if not one.startswith(f'["{before}",')]
    with contextlib.suppress(OSError):  # another user's folder, or a full disk
        lines = [*others, head + json.dumps(made)][-MOST_PAIRS:]
        write_atomic(pair[1].paired, "".join(f"{one}\n" for one in lines).encode())
    return made


class _Metric(NamedTuple):
    """One metric of the tasks whose documents all have a value. `tasks`: their numbers; other arrays: one value per task."""

    tasks: Array
    values: Array  # of the documents of these tasks, concatenated
    starts: Array
    means: Array
    low: Array
    high: Array
    binary: Array  # whether all values are 0 or 1


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and its documents."""

    evaluation: Evaluation
    documents: Documents

    @cached_property
    def scores(self) -> dict[tuple[str, str], ScoreValue]:
        """Scores of leaf tasks, by task and column of the documents."""
        leaves = (score for score in self.evaluation.scores if score.task not in self.evaluation.groups)
        return {(score.task, _column(score)): score for score in leaves}

    @cached_property
    def order(self) -> list[str]:
        """Tasks in order of rows: the meaning of numbers."""
        return sorted(self.documents.tasks, key=lambda task: self.documents.tasks[task].start)

    @cached_property
    def metrics(self) -> dict[str, _Metric]:
        """Metrics, except those of tasks with clusters."""
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
                low, high = np.minimum.reduceat(values, first), np.maximum.reduceat(values, first)
                found[name] = _Metric(np.flatnonzero(whole), values, first, means, low, high, binary)
        return found


@lru_cache(maxsize=2)
def _read(root: Path, _written: int) -> Evaluated:
    paths = EvaluationPaths(root)
    made = read_document(paths)
    try:
        found = read_documents(paths)
    except DamagedError as error:  # one damaged file hides no score
        log.warning("%s", error)
        found = Documents({}, {})
    return Evaluated(made, found)


def _column(score: ScoreValue) -> str:
    """Return the column of documents that the score is the mean of."""
    return score.metric if score.filter == DENSE else f"{score.metric},{score.filter}"


def compare_evaluated(before: Evaluated, after: Evaluated) -> dict[str, Paired | str]:
    """Return the `score_differences` of loaded evaluations."""
    fast = _in_vectors(before, after) if _same_documents(before.documents, after.documents) else {}
    found: dict[str, Paired | str] = {}
    for key in (one for one in before.scores if one in after.scores):
        first, last = before.scores[key], after.scores[key]
        if unlike := key_difference(first.keys, last.keys):
            found[last.name] = UNLIKE_WORDS[unlike]
        else:
            found[last.name] = fast.get(key) or compare_one(before, after, key)
    return found


def _same_documents(before: Documents, after: Documents) -> bool:
    import numpy as np  # noqa: PLC0415

    return (
        bool(before.rows)
        and before.rows == after.rows
        and all(np.array_equal(before.columns[name], after.columns[name]) for name in (DOCUMENT, HASH))
    )


def _in_vectors(before: Evaluated, after: Evaluated) -> dict[tuple[str, str], Paired | str]:
    """Return (task, column) -> difference of all tasks with at least FEW documents, complete values and no clusters."""
    import numpy as np  # noqa: PLC0415

    found: dict[tuple[str, str], Paired | str] = {}
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
        spans = np.maximum(ours.high, theirs.high) - np.minimum(ours.low, theirs.low)
        arrays = (
            sizes,
            means,
            variances,
            spans,
            ours.binary & theirs.binary,
            gained,
            lost,
            theirs.means,
            ours.means,
        )
        tasks = [after.order[number] for number in ours.tasks]
        for task, size, mean, variance, span, flags, up, down, *scored in zip(
            tasks, *(array.tolist() for array in arrays), strict=True
        ):
            said = [
                one.scores[task, name].value if (task, name) in one.scores else nan for one in (before, after)
            ]
            if not (is_mean(scored[0], said[0]) and is_mean(scored[1], said[1])):
                found[task, name] = NO_MEAN
            elif size >= FEW_CLUSTERS:
                flips = (up, down) if flags else (None, None)
                found[task, name] = Paired(size, mean, variance, size - 1.0, span, *flips)
    return found


def compare_one(before: Evaluated, after: Evaluated, key: tuple[str, str]) -> Paired | str:
    """Compare one metric of one task over the common documents."""
    import numpy as np  # noqa: PLC0415

    task, metric = key
    theirs, ours = (one.documents.of(task) for one in (before, after))
    if theirs is None or ours is None:
        return NO_SAMPLES
    for columns, score in ((theirs, before.scores[key]), (ours, after.scores[key])):
        if metric not in columns or not is_mean(float(np.nanmean(columns[metric])), score.value):
            return NO_MEAN
    _, mine, others = np.intersect1d(theirs["doc_id"], ours["doc_id"], return_indices=True)
    a, b = theirs[metric][mine], ours[metric][others]
    same = (theirs["doc_hash"][mine] == ours["doc_hash"][others]) & ~np.isnan(a) & ~np.isnan(b)
    clusters = ours["cluster"][others][same] if "cluster" in ours else None
    return compare_paired(a[same], b[same], clusters)
