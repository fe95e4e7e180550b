"""A training's series with verdicts, which need the variances of paired differences between its checkpoints.

Rule: they are computed of the documents' columns when a series is first shown, and kept beside the later evaluation.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.columns import columns, with_signals
from coordinator.report.comparisons import comparison
from coordinator.report.learning_curves import Point, Series, make_series
from coordinator.report.load_series import point_of
from coordinator.report.verdicts import add_verdicts, judged, variances
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import read_record, write_record

if TYPE_CHECKING:
    from evaljobs.contract.columns import Columns

log = logging.getLogger(__name__)


class Pair(Kept):
    """Of two evaluations: variances of their scores' differences."""

    written: tuple[int, int]  # when both results.json were written, ns since 1970
    variances: dict[str, float]


class PairedFile(Kept):
    """`paired.json`: pairs with the checkpoint before; of a score that it lacks, with the last one that has it."""

    schema_version: int = 1
    pairs: dict[str, Pair]  # by the id of the evaluation before


def series_of(points: Iterable[Point], settings: Config) -> Series:
    """A training's series, with verdicts."""

    @cache
    def sampling(before: str, after: str) -> Mapping[str, float]:
        return _variances(*(EvaluationPaths(settings.work_dir / name) for name in (before, after)))

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


def _variances(before: EvaluationPaths, after: EvaluationPaths) -> Mapping[str, float]:
    pair = before, after
    first, last = (paths.results.stat().st_mtime_ns for paths in pair)
    kept: dict[str, Pair] = {}
    with contextlib.suppress(OSError, ValidationError):
        kept = read_record(after.paired, PairedFile).pairs
    found = kept.get(before.root.name)
    if found is not None and found.written == (first, last):
        return found.variances
    records = [read_record(paths.evaluation, EvaluationRecord) for paths in pair]

    @cache
    def documents(i: int, task: str) -> Columns | None:
        try:
            return columns(pair[i], records[i], task)
        except OperatorError as error:  # one damaged file hides no other score
            log.warning("%s", error)
            return None

    results = [json.loads(paths.results.read_bytes()) for paths in pair]
    rows = comparison([with_signals(*each) for each in zip(pair, records, results, strict=True)])
    made = Pair(written=(first, last), variances=variances(rows, documents))
    with contextlib.suppress(OSError):  # another user's folder, or a full disk
        write_record(after.paired, PairedFile(pairs=kept | {before.root.name: made}))
    return made.variances
