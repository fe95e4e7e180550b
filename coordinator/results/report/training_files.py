"""Builds and stores each training's `Training` and its judged curves, so that no view computes them again.

Rule: the file is valid while the results and reports that it was derived from are unchanged. It is rebuilt after each end, by
a process beside the daemon, and by the first view that finds none. It omits evaluations that have not ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import from_json

from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import (
    Curve,
    CurvePoint,
    Series,
    Worse,
    by_step,
    current_points,
    groups_now,
    make_series,
    with_prices,
)
from coordinator.results.report.load_series import find_heads, load_documents, written_at
from coordinator.results.report.pairs import compare_evaluations, score_differences
from coordinator.results.report.row_verdicts import judge_curves, name_of, overall_of
from coordinator.results.report.scores import Evaluation, Head, head_of
from coordinator.results.report.training import Training, training_of
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, slug
from evaljobs.contract.specs import StateRecord
from evaljobs.contract.storage import make_folder, read_record, write_atomic

log = logging.getLogger(__name__)

Key = tuple[str, str, str]  # (folder of the checkpoints, suite, mode) of a training
Written = dict[str, tuple[int, int]]  # evaluation -> mtimes of its results and its report


class TrainingFile(StateRecord):
    """First line of a training's file; the others are of its series."""

    # one more with each rule of verdicts that changes: an earlier file is made again
    schema_version: Literal[3] = 3
    written: Written
    training: Training


def by_training(heads: Iterable[Head]) -> dict[Key, list[Head]]:
    """Return evaluations of each training, in order."""
    found: dict[Key, list[Head]] = defaultdict(list)
    for head in heads:
        found[head.training].append(head)
    return dict(found)


def series_of(points: Iterable[Evaluation], settings: Config) -> Series:
    """Return a training's series, with verdicts."""

    @cache
    def sampling(before: str, after: str) -> Mapping[str, float]:
        found = score_differences(settings.work_dir, before, after)
        return {name: 0.0 if isinstance(one, str) else one.variance for name, one in found.items()}

    made = make_series(points, settings.gpu_hour_price)
    curves = judge_curves(made.curves, settings.horizon, sampling)
    return made._replace(curves=curves, horizon=settings.horizon)


def read_kept(settings: Config, key: Key, evaluations: Iterable[str]) -> Training | None:
    """Read the stored training; None if its results have changed since, or it lacks one of `evaluations`."""
    return None if (kept := _read(settings, key, evaluations)) is None else kept[0].training


def _read(
    settings: Config, key: Key, evaluations: Iterable[str]
) -> tuple[TrainingFile, Sequence[bytes]] | None:
    try:
        first, *lines = _file(settings.work_dir, key).read_bytes().splitlines()
        kept = TrainingFile.model_validate_json(first)
    except (OSError, ValueError):
        return None
    whole = kept.training.horizon == settings.horizon and all(name in kept.written for name in evaluations)
    return (kept, lines) if whole and kept.written == _written(settings, kept.written) else None


def judge_training(
    settings: Config, heads: Sequence[Head], *, whole: bool, scores: bool = True
) -> tuple[Training, Series]:
    """Judge a training. `whole`: these are all of its evaluations, so store the result; `scores`: load the points' scores."""
    known = _written(settings, (head.evaluation_id for head in heads))
    ended = [head for head in heads if head.evaluation_id in known] or heads
    kept = _read(settings, heads[0].training, known) if whole else None
    if kept is not None and kept[0].written == known:
        training, series = kept[0].training, _unpacked(kept[1])._replace(horizon=settings.horizon)
        if scores:
            series = series._replace(points=current_points(load_documents(settings.work_dir, ended)))
        series = with_prices(series, settings.gpu_hour_price)
    else:
        series = series_of(load_documents(settings.work_dir, ended), settings)
        training = training_of(series.shown(dense=False), lambda *pair: _against(settings, *pair))
        if whole and known:
            _keep(settings, TrainingFile(written=known, training=training), series)
    return training, _with_open(series, heads)


def join_trainings(settings: Config, heads: Sequence[Head]) -> Series:
    """Return one series of several trainings, with verdicts."""
    known = _written(settings, (head.evaluation_id for head in heads))
    ended = (head for head in heads if head.evaluation_id in known)
    return _with_open(series_of(load_documents(settings.work_dir, ended), settings), heads)


def _with_open(series: Series, heads: Iterable[Head]) -> Series:
    """Add the checkpoints that have no ended evaluation."""
    there = {(*point.training, point.checkpoint) for point in series.points}
    begun = [Evaluation(status="open", **h.head) for h in heads if (*h.training, h.checkpoint) not in there]
    return series._replace(points=by_step([*series.points, *begun])) if begun else series


def _against(settings: Config, evaluation: str, earlier: str) -> Mapping[str, Any]:
    try:
        return against_of(compare_evaluations(settings.work_dir, [earlier, evaluation])[1])
    except OperatorError as error:  # one damaged file hides no other training
        log.warning("%s", error)
        return {"verdict": "not comparable", "why": str(error)}


def find_training(settings: Config, key: Key, evaluations: Iterable[str]) -> Training | None:
    """Return the stored training, or judge it now; None if none of its evaluations can be read."""
    if (kept := read_kept(settings, key, evaluations)) is not None:
        return kept
    folder, suite, _ = key
    with suppress(OperatorError):
        found = by_training(find_heads(settings.work_dir, folder, suite, mixed=True))
        if key in found:
            return judge_training(settings, found[key], whole=True, scores=False)[0]
    return None


def training_of_evaluation(settings: Config, name: str) -> Training | None:
    """Return the training that an evaluation belongs to, like `find_training`; None if its record cannot be read."""
    with suppress(OSError, ValidationError):
        record = read_record(EvaluationPaths(settings.work_dir / name).evaluation, EvaluationRecord)
        return find_training(settings, Head(**head_of(record)).training, [name])
    return None


def against_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of `Against` from rows of a comparison."""
    names = {
        verdict: tuple(name_of(row) for row in rows if row["verdicts"][-1]["verdict"] == verdict)
        for verdict in ("better", "worse")
    }
    whole = overall_of(rows)[-1]
    if not whole["tasks"]:
        return {"verdict": "not comparable", "why": "no task of both can be compared", **names}
    known = {
        "change": whole["difference"],
        **{name: whole[name] for name in ("verdict", "reach", "tasks", "of")},
    }
    return {**known, **names}


# --- the file --------------------------------------------------------------------------------------------------------


def _written(settings: Config, evaluations: Iterable[str]) -> Written:
    """Return the times of those with results."""
    found = {name: written_at(EvaluationPaths(settings.work_dir / name)) for name in evaluations}
    return {name: both for name, both in found.items() if both[0]}


def _file(work_dir: Path, key: Key) -> Path:
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    return WorkPaths(work_dir).trainings / f"{slug(key[1])}-{digest}.json"


def _keep(settings: Config, kept: TrainingFile, series: Series) -> None:
    """Write the file: its head; points, without scores; then a line per curve, whose points refer to theirs by number."""
    place = {point.evaluation_id: i for i, point in enumerate(series.points)}
    about = {
        "points": [p.row() for p in series.points],
        "groups": groups_now(series.points),
        "superseded": series.superseded,
        "curves": len(series.curves),
    }
    lines = [kept.model_dump_json(), json.dumps(about)]
    for curve in (*series.curves, *series.means):
        rows = ((place[p.evaluation_id], *p[1:]) for p in curve.points)
        columns: dict[str, Any] = dict(zip(CurvePoint._fields, zip(*rows, strict=True), strict=True))
        columns["worse"] = {i: one.model_dump() for i, one in enumerate(columns["worse"]) if one}
        lines.append(json.dumps({**curve._asdict(), "points": columns}))
    with suppress(OSError):  # another user's folder, or a full disk
        file = _file(settings.work_dir, (kept.training.folder, kept.training.suite, kept.training.mode))
        make_folder(file.parent)
        write_atomic(file, "\n".join(lines).encode())


def _unpacked(lines: Sequence[bytes]) -> Series:
    about = from_json(lines[0])
    points = [Evaluation(**point, groups=about["groups"]) for point in about["points"]]
    ids = [point.evaluation_id for point in points]
    curves = []
    for line in lines[1:]:
        curve = from_json(line)
        columns = curve["points"]
        columns["evaluation_id"] = [ids[i] for i in columns["evaluation_id"]]
        worse = {int(i): Worse(**one) for i, one in columns["worse"].items()}
        columns["worse"] = [worse.get(i) for i in range(len(columns["value"]))]
        curve["points"] = tuple(map(CurvePoint._make, zip(*columns.values(), strict=True)))
        curves.append(Curve(**curve))
    count = about["curves"]
    return Series(points, curves[:count], curves[count:], superseded=about["superseded"])
