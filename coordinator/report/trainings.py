"""Makes and keeps each training's `Training`, so that no view computes it again.

Rule: the file counts while the results that it was made of are those on disk. It is made anew after each end, by a process
beside the daemon, and by the first view that finds none.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from coordinator.config.schema import Config
from coordinator.errors import OperatorError
from coordinator.evaluation.records import EvaluationRecord
from coordinator.report.learning_curves import Point, Series
from coordinator.report.load_series import find_series
from coordinator.report.sampling import compared, series_of
from coordinator.report.training import Training, training_of
from coordinator.report.verdicts import overall_of
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug
from evaljobs.contract.specs import Kept
from evaljobs.contract.storage import make_folder, read_record, write_record

log = logging.getLogger(__name__)

Key = tuple[str, str, str]  # of a training: (folder of the checkpoints, suite, mode)


class TrainingFile(Kept):
    """What is kept of a training."""

    schema_version: int = 1
    results: dict[str, int]  # evaluation -> when its results.json was written, ns since 1970
    training: Training


def key_of(point: Point) -> Key:
    return str(PurePosixPath(point.checkpoint).parent), point.suite, point.mode


def by_training(points: Iterable[Point]) -> dict[Key, list[Point]]:
    """Points of each training, in their order."""
    found: dict[Key, list[Point]] = defaultdict(list)
    for point in points:
        found[key_of(point)].append(point)
    return dict(found)


def read_kept(settings: Config, key: Key, evaluations: Iterable[str]) -> Training | None:
    """What is kept of a training; None where its results have changed since, or it lacks one of `evaluations`."""
    try:
        kept = read_record(_file(settings.work_dir, key), TrainingFile)
    except (OSError, ValidationError):
        return None
    whole = kept.training.horizon == settings.horizon and all(name in kept.results for name in evaluations)
    return kept.training if whole and kept.results == _written(settings.work_dir, kept.results) else None


def judge(settings: Config, points: Sequence[Point], *, whole: bool) -> tuple[Training, Series]:
    """Judge a training by its points; its series has verdicts. `whole`: of all of them, so that it is kept, where it is not."""
    series = series_of(points, settings)
    results = _written(settings.work_dir, [p.evaluation_id for p in points])
    if whole and (kept := read_kept(settings, key_of(points[0]), results)) is not None:
        return kept, series

    def against(evaluation: str, earlier: str) -> Mapping[str, Any]:
        try:
            return against_of(compared(settings.work_dir, [earlier, evaluation], mixed=False)[1])
        except OperatorError as error:  # one damaged file hides no other training
            log.warning("%s", error)
            return {"verdict": "not comparable", "why": str(error)}

    made = training_of(series, against)
    if not whole:
        return made, series
    with suppress(OSError):  # another user's folder, or a full disk
        file = _file(settings.work_dir, key_of(points[0]))
        make_folder(file.parent)
        write_record(file, TrainingFile(results=results, training=made))
    return made, series


def find_training(settings: Config, key: Key, evaluations: Iterable[str]) -> Training | None:
    """What is kept of a training, else made now; None where none of its evaluations can be read."""
    if (kept := read_kept(settings, key, evaluations)) is not None:
        return kept
    folder, suite, mode = key
    with suppress(OperatorError):
        found = find_series(settings.work_dir, folder, suite, mixed=True)
        if (points := by_training(found).get((folder, suite, mode))) is not None:
            return judge(settings, points, whole=True)[0]
    return None


def of_evaluation(settings: Config, name: str) -> Training | None:
    """Of the training that an evaluation belongs to, as `find_training`; None where its record cannot be read."""
    try:
        record = read_record(EvaluationPaths(settings.work_dir / name).evaluation, EvaluationRecord)
    except (OSError, ValidationError):
        return None
    folder = str(PurePosixPath(record.checkpoint.announced).parent)
    return find_training(settings, (folder, record.suite.name, record.suite.mode or "exact"), [name])


def against_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of `Against` that rows of a comparison say."""
    names = {
        verdict: tuple(
            f"{row['task']}/{row['metric'].removesuffix(',none')}"
            for row in rows
            if row["verdicts"][-1]["verdict"] == verdict
        )
        for verdict in ("better", "worse")
    }
    whole = overall_of(rows)[-1]
    if not whole["tasks"]:
        return {"verdict": "not comparable", "why": "no task of both can be compared", **names}
    known = {
        "change": whole["difference"],
        "reach": whole["reach"],
        "tasks": whole["tasks"],
        "of": whole["of"],
    }
    return {"verdict": whole["verdict"], **known, **names}


def _written(work_dir: Path, evaluations: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in evaluations:
        with suppress(OSError):
            found[name] = EvaluationPaths(work_dir / name).results.stat().st_mtime_ns
    return found


def _file(work_dir: Path, key: Key) -> Path:
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return WorkPaths(work_dir).trainings / f"{slug(key[1])}-{digest}.json"
