"""A training's series with verdicts, which need the variances of paired differences between its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.columns import columns, with_signals
from coordinator.report.comparisons import comparison
from coordinator.report.learning_curves import Point, Series, make_series
from coordinator.report.load_series import point_of
from coordinator.report.pairs import differences
from coordinator.report.verdicts import add_verdicts, judged
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.storage import read_record


def series_of(points: Iterable[Point], settings: Config) -> Series:
    """A training's series, with verdicts."""

    @cache
    def sampling(before: str, after: str) -> Mapping[str, float]:
        found = differences(settings.work_dir, before, after)
        return {name: 0.0 if one is None else one.variance for name, one in found.items()}

    made = make_series(points, settings.gpu_hour_price)
    curves = judged(made.curves, settings.horizon, sampling)
    return made.model_copy(update={"curves": tuple(curves), "horizon": settings.horizon})


def compared(
    work_dir: Path, evaluations: Sequence[str], *, mixed: bool = False, dense: bool = False
) -> tuple[list[Point], list[dict[str, Any]], list[tuple[EvaluationPaths, dict[str, Any]]]]:
    """(points, rows of their scores with verdicts, folder and results.json of each) of evaluations.

    `mixed`: verdicts also between modes; `dense`: also of dense signals. OperatorError for one that has no results.
    """
    points, places, records = [], [], []
    for name in evaluations:
        paths = EvaluationPaths(work_dir / name)
        record = read_record(paths.evaluation, EvaluationRecord)
        if not paths.results.exists():
            raise OperatorError(f"{record.evaluation_id} has no results yet")
        points.append(point_of(paths, record))
        records.append(record)
        results = json.loads(paths.results.read_bytes())
        places.append((paths, with_signals(paths, record, results) if dense else results))
    rows = comparison([results for _, results in places])
    columns_once = cache(lambda i, task: columns(places[i][0], records[i], task))
    add_verdicts(rows, columns_once, mixed=mixed)
    return points, rows, places
