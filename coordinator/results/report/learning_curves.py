"""Learning curves: scores of one training's checkpoints. Pure.

Rule: a curve is one suite, task, metric and filter over training steps, a point per checkpoint. `coordinator.results.report.row_verdicts`
decides since when it is worse.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot, isfinite
from types import MappingProxyType
from typing import Any, NamedTuple

from coordinator.base.strict_json import replace_non_finite
from coordinator.results.report.scores import (
    Difference,
    Evaluation,
    ScoreValue,
    key_difference,
    measure_of,
    top_groups,
)
from evaljobs.contract.columns import DENSE
from evaljobs.contract.specs import Record

MEAN = "mean of all tasks"


class Worse(Record):
    """The checkpoints since which a score is worse, as labels."""

    since: str  # first worse one
    low: str  # 95 % interval of `since`
    high: str
    mean: float  # robust mean before


class CurvePoint(NamedTuple):
    """A value on a curve.

    `differs`: the previous point had another "mode", other "requests" or another "score" key, so the two are not comparable.
    """

    evaluation_id: str
    label: str
    step: int | None
    value: float
    stderr: float | None
    change: float | None = None
    mean_before: float | None = (
        None  # robust mean of the checkpoints before; None: fewer than six, or no verdicts
    )
    yardstick: float | None = None  # standard error of a difference to a checkpoint before
    worse: Worse | None = None  # set if this checkpoint shows the score to be worse
    differs: Difference = ""
    documents: int | None = None


class Curve(NamedTuple):
    """A score over checkpoints, in training order; at least one."""

    suite: str
    task: str
    metric: str
    filter: str
    higher_is_better: bool
    points: tuple[CurvePoint, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        """As in its scores."""
        return self.task, self.metric, self.filter

    @property
    def measure(self) -> str:
        """As in its scores."""
        return measure_of(self.metric, self.filter)

    @property
    def name(self) -> str:
        """As in its scores."""
        return f"{self.task}/{self.measure}"

    @property
    def is_share(self) -> bool:
        """Whether higher is better and all values are between 0 and 1."""
        return self.higher_is_better and all(0 <= p.value <= 1 for p in self.points if isfinite(p.value))

    @property
    def best(self) -> CurvePoint:
        """The best point so far. Only a description: the best of many is partly chance."""
        return best_of(self.points, higher_is_better=self.higher_is_better)


def best_of(points: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint:
    """Return the first point with the best value."""
    sign = 1 if higher_is_better else -1
    return max(points, key=lambda p: (isfinite(p.value), sign * p.value))


class Series(NamedTuple):
    """All checkpoints of a training. `--json` prints exactly this."""

    points: Sequence[Evaluation]
    curves: Sequence[Curve]
    means: Sequence[Curve] = ()  # for each suite: the mean of all its tasks (`means_of`), then of its groups
    gpu_hour_price: float | None = None
    superseded: int = 0  # earlier evaluations of a checkpoint on the same suite, omitted here
    horizon: int | None = None  # checkpoints for which the verdicts are calibrated; None: no verdicts

    def shown(self, *, dense: bool) -> Series:
        """Return the series without curves and scores of dense signals unless `dense`."""
        if dense:
            return self
        points = [
            p.model_copy(update={"scores": tuple(s for s in p.scores if s.filter != DENSE)})
            for p in self.points
        ]
        return self._replace(points=points, curves=[c for c in self.curves if c.filter != DENSE])


def by_step(points: Iterable[Evaluation]) -> list[Evaluation]:
    """Return points in training order, suite by suite."""
    return sorted(points, key=lambda p: (p.suite, p.step is None, float(p.step or 0), p.accepted_at))


def in_order(points: Iterable[Evaluation]) -> list[Evaluation]:
    """Return points in training order, suite by suite; each score says whether it is comparable with the previous point's."""
    last: dict[tuple[str, str, str, str], tuple[str, ScoreValue]] = {}
    compared = []
    for point in by_step(points):
        scores = []
        for score in point.scores:
            key = point.suite, *score.key
            mode, before = last.get(key, (point.mode, score))
            differs: Difference = "mode" if mode != point.mode else key_difference(before.keys, score.keys)
            scores.append(score if score.differs == differs else score._replace(differs=differs))
            last[key] = point.mode, score
        compared.append(point.model_copy(update={"scores": tuple(scores)}))
    return compared


def point_labels(points: Sequence[Evaluation]) -> list[str]:
    """Return a short, unique label for each point: its step or folder, with more only where two are alike."""
    parents = [p.checkpoint.rstrip("/").split("/")[-2:-1] for p in points]
    trainings = ["/".join([*parent, p.label]) for parent, p in zip(parents, points, strict=True)]
    for made in (
        [p.label for p in points],
        [f"{p.label} {p.mode}" for p in points],
        [f"{p.label} {p.suite}" for p in points],
        trainings,
        [f"{training} {p.suite}" for training, p in zip(trainings, points, strict=True)],
    ):
        if len(set(made)) == len(points):
            return made
    return [f"{p.label} {p.evaluation_id.rsplit('-', 1)[-1]}" for p in points]


def make_series(points: Iterable[Evaluation], gpu_hour_price: float | None = None) -> Series:
    """Return points in training order and their curves, without verdicts; of equal checkpoints in one mode, the later."""
    every = list(points)
    ordered = current_points(every)
    curves: list[Curve] = []
    means: list[Curve] = []
    for suite in dict.fromkeys(p.suite for p in ordered):
        alike = [p for p in ordered if p.suite == suite]
        rows: dict[tuple[str, ...], list[tuple[str, Evaluation, ScoreValue]]] = defaultdict(list)
        for label, point in zip(point_labels(alike), alike, strict=True):
            for score in point.scores:
                rows[score.key].append((label, point, score))
        made = [_curve(suite, row) for row in rows.values()]
        curves += made
        means += means_of(suite, made, groups_now(alike))
    return with_prices(Series(ordered, curves, means, superseded=len(every) - len(ordered)), gpu_hour_price)


def current_points(points: Iterable[Evaluation]) -> list[Evaluation]:
    """Return `in_order`, keeping the later of two evaluations of a checkpoint in one mode, first of those with scores."""
    ranked = sorted(points, key=lambda p: (bool(p.scores or p.screened), p.accepted_at))
    return in_order({(p.suite, p.checkpoint, p.mode): p for p in ranked}.values())


def groups_now(points: Iterable[Evaluation]) -> Mapping[str, Sequence[str]]:
    """Return groups of a suite, from its latest evaluation with scores -> their leaf tasks."""
    return max(points, key=lambda p: (bool(p.scores), p.accepted_at)).groups


def with_prices(series: Series, gpu_hour_price: float | None) -> Series:
    """Return the series with the cost of each checkpoint, if a price is given."""
    if gpu_hour_price is None:
        return series
    points = [
        p if p.gpu_seconds is None else p.model_copy(update={"cost": p.gpu_seconds / 3600 * gpu_hour_price})
        for p in series.points
    ]
    return series._replace(points=points, gpu_hour_price=gpu_hour_price)


def _curve(suite: str, row: Sequence[tuple[str, Evaluation, ScoreValue]]) -> Curve:
    last, before = row[-1][2], None
    made: list[CurvePoint] = []
    for label, point, score in row:
        change = None if before is None else score.value - before
        known = CurvePoint(point.evaluation_id, label, point.step, score.value, score.stderr, change)
        made.append(known._replace(differs=score.differs, documents=score.documents))
        before = score.value
    return Curve(suite, last.task, last.metric, last.filter, last.higher_is_better, tuple(made))


def means_of(suite: str, curves: Sequence[Curve], groups: Mapping[str, Sequence[str]]) -> Iterator[Curve]:
    """Yield the mean of all tasks, then of each top-level group without a score of its own.

    A task counts by its first score that lies between 0 and 1 and for which higher is better. A checkpoint that lacks one of
    them has no mean, nor do fewer than two tasks. `groups`: group -> its leaf tasks.
    """
    first: dict[str, Curve] = {}
    for curve in curves:
        if curve.task not in groups and curve.filter != DENSE and curve.is_share:
            first.setdefault(curve.task, curve)
    yield from _mean(suite, MEAN, list(first.values()))
    own = {curve.task for curve in curves}
    for group, members in top_groups(groups).items():
        if group not in own:
            yield from _mean(suite, group, [first[task] for task in members if task in first])


def _mean(suite: str, name: str, members: Sequence[Curve]) -> Iterator[Curve]:
    known = [{p.evaluation_id: p for p in curve.points} for curve in members]
    made: list[CurvePoint] = []
    for point in known[0].values() if len(known) > 1 else ():
        parts = [one[point.evaluation_id] for one in known if point.evaluation_id in one]
        if len(parts) < len(known) or not all(isfinite(p.value) for p in parts):
            continue
        errors = [p.stderr for p in parts if p.stderr is not None]
        value = sum(p.value for p in parts) / len(parts)
        stderr = hypot(*errors) / len(parts) if len(errors) == len(parts) else None
        made.append(CurvePoint(*point[:3], value, stderr, value - made[-1].value if made else None))
    if made:
        yield Curve(suite, name, "mean", "none", True, tuple(made))


CSV_COLUMNS = (
    "suite", "step", "checkpoint", "evaluation_id", "status", "task", "metric", "filter", "value", "stderr",
    "documents", "makespan_seconds", "gpu_seconds", "cost",
    "version", "n_shot", "higher_is_better", "differs", "paused_seconds", "mode",
    "mean_before", "yardstick", "worse_since", "worse_low", "worse_high",
)  # fmt: skip


def to_csv(series: Series) -> Iterator[str]:
    """Yield a line per checkpoint and score, then its means; a checkpoint without scores has one line with empty columns."""
    judged = {(p.evaluation_id, *curve.key): p for curve in series.curves for p in curve.points}
    means: dict[str, list[tuple[Curve, CurvePoint]]] = defaultdict(list)
    for curve in series.means:
        for p in curve.points:
            means[p.evaluation_id].append((curve, p))
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for point in series.points:
        known = point.row()
        if not point.scores:
            writer.writerow(known)
        for score in point.scores:
            more = judged[point.evaluation_id, *score.key]
            facts = {**score._asdict(), "mean_before": more.mean_before, "yardstick": more.yardstick}
            facts["higher_is_better"] = int(score.higher_is_better)
            worse = more.worse.model_dump() if more.worse is not None else {}
            writer.writerow(known | facts | {f"worse_{name}": value for name, value in worse.items()})
        for curve, p in means[point.evaluation_id]:
            mean = {"task": curve.task, "metric": curve.metric, "filter": curve.filter, "higher_is_better": 1}
            writer.writerow(known | mean | {"value": p.value, "stderr": p.stderr})
        yield out.getvalue()
        out.seek(0)
        out.truncate()


def to_json(series: Series, beside: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """Yield the record with `beside` as JSON, one line per checkpoint and curve, to keep the text out of memory."""
    many = {
        "points": map(_point_as_json, series.points),
        "curves": map(_as_json, series.curves),
        "means": map(_as_json, series.means),
    }
    head = {name: value for name, value in series._asdict().items() if name not in many}
    yield json.dumps(replace_non_finite({"schema_version": 1, **head, **beside}))[:-1]
    for name, each in many.items():
        yield f',\n"{name}": ['
        for i, one in enumerate(each):
            yield ("\n" if i == 0 else ",\n") + json.dumps(replace_non_finite(one))
        yield "]"
    yield "}\n"


def _point_as_json(point: Evaluation) -> dict[str, Any]:
    screened = [one.model_dump() for one in point.screened]
    known = {**point.row(), "scores": [score._asdict() for score in point.scores]}
    return known | ({"screened": screened} if screened else {})


def _as_json(curve: Curve) -> dict[str, Any]:
    points = [{**p._asdict(), "worse": p.worse and p.worse.model_dump()} for p in curve.points]
    return {**curve._asdict(), "name": curve.name, "points": points}
