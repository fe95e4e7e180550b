"""Learning curves: scores and costs of one training's checkpoints. Pure.

Rule: a curve is one suite, task, metric and filter over training steps, a point per checkpoint. Since when it is worse, is
said by `coordinator.report.verdicts`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import hypot, isfinite, nan
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ConfigDict, Field

from coordinator.base.strict_json import finite
from coordinator.evaluation.records import checkpoint_name
from evaljobs.contract.columns import BITS, DENSE
from evaljobs.contract.specs import Record

# how two results differ in their modes, request digests and score keys; "": comparable, or without keys
Difference = Literal["", "mode", "requests", "score"]
MEAN = "mean of all tasks"
SCORES = ConfigDict(allow_inf_nan=True)  # a score of lm-eval may be NaN


class Worse(Record):
    """Since when a score is worse: labels of checkpoints."""

    since: str  # first worse one
    low: str  # 95 % interval of `since`
    high: str
    mean: float  # robust mean before


class ScoreValue(Record):
    """One value of lm-eval's results."""

    model_config = SCORES

    task: str  # or group
    metric: str  # such as "acc"
    filter: str  # of the answers, such as "strict-match"; "none": none
    value: float  # as lm-eval gives it
    stderr: float | None = None  # None: lm-eval gives none
    higher_is_better: bool = True  # as lm-eval says of the metric
    documents: int | None = None  # of a group: of all its tasks
    version: str = ""  # the task's own, as lm-eval gives it
    n_shot: int | None = None  # examples in each prompt
    keys: tuple[str, str] = ("", "")  # what was asked and score key; empty where results.json has none
    differs: Difference = (
        ""  # in a series: how it was asked otherwise than at the checkpoint before, as of `CurvePoint`
    )

    @property
    def measure(self) -> str:
        """The metric, with the filter of the answers where there is one: "exact_match,strict-match"."""
        return self.metric if self.filter == "none" else f"{self.metric},{self.filter}"

    @property
    def name(self) -> str:
        """Readable and unique within a suite."""
        return f"{self.task}/{self.measure}"


class Point(Record):
    """One checkpoint: its evaluation, its scores (none while it runs), what it cost."""

    model_config = SCORES

    evaluation_id: str
    suite: str
    checkpoint: str
    step: int | None
    status: str  # done | failed | cancelled | open (it has not ended) | unreadable (its files are damaged)
    mode: str = "exact"
    accepted_at: float  # unix seconds
    makespan_seconds: float | None = None  # without `paused_seconds`
    paused_seconds: float = 0.0  # no coordinator ran it, and none of its jobs worked
    gpu_seconds: float | None = None
    slot: str = "GPU"  # what these seconds are of, as of `gpu_use.slot_word`
    cost: float | None = None  # gpu_seconds at the price that was given, in its currency
    scores: tuple[ScoreValue, ...] = ()
    groups: dict[str, tuple[str, ...]] = Field(default_factory=dict)  # group of the suite -> its leaf tasks

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last score."""
        return self.accepted_at + (self.makespan_seconds or 0.0) + self.paused_seconds

    @property
    def label(self) -> str:
        return str(self.step) if self.step is not None else checkpoint_name(self.checkpoint)


class CurvePoint(Record):
    """A value on a curve.

    `differs`: the point before had another "mode", other "requests" or another "score" key, so the two are not comparable.
    """

    model_config = SCORES

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
    worse: Worse | None = None  # that this checkpoint shows the score to be worse
    differs: Difference = ""
    documents: int | None = None


class Curve(Record):
    """A score over checkpoints, in order of training; at least one."""

    model_config = SCORES

    suite: str
    task: str
    metric: str
    filter: str
    name: str
    higher_is_better: bool
    points: tuple[CurvePoint, ...]

    @property
    def measure(self) -> str:
        """As of its scores."""
        return self.name.removeprefix(f"{self.task}/")

    @property
    def is_share(self) -> bool:
        """Is higher better, and all of it between 0 and 1?"""
        return self.higher_is_better and all(0 <= p.value <= 1 for p in self.points if isfinite(p.value))

    @property
    def best(self) -> CurvePoint:
        """The best point so far. It is a description: the best of many is partly chance."""
        return best_of(self.points, higher_is_better=self.higher_is_better)


def best_of(points: Sequence[CurvePoint], *, higher_is_better: bool) -> CurvePoint:
    """The first of the points with the best value."""
    sign = 1 if higher_is_better else -1
    return max(points, key=lambda p: (isfinite(p.value), sign * p.value))


class Series(Record):
    """All checkpoints of a training. `--json` prints exactly this."""

    model_config = SCORES

    schema_version: int = 1
    points: tuple[Point, ...]
    curves: tuple[Curve, ...]
    means: tuple[Curve, ...] = ()  # of each suite: of all its tasks, as of `means_of`, then of its groups
    gpu_hour_price: float | None = None
    superseded: int = 0  # earlier evaluations of a checkpoint on the same suite, which are left out
    horizon: int | None = None  # checkpoints for which the verdicts are calibrated; None: there are none


def scores_of(results: Mapping[str, Any]) -> tuple[ScoreValue, ...]:
    """The numbers in lm-eval's results, in its order; aliases and texts are left out. Behind them dense signals, where
    `columns.with_signals` put them.
    """
    versions, shots = results.get("versions", {}), results.get("n-shot", {})
    better: Mapping[str, Any] = results.get("higher_is_better", {})
    found = []
    tables = {**results.get("results", {}), **results.get("groups", {})}
    for task, values in (*tables.items(), *results.get("dense", {}).items()):
        for key, number in values.items():
            metric, _, which = key.partition(",")
            value = nan if number is None else number  # as results.json has it
            if not which or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = values.get(f"{metric}_stderr,{which}")
            higher = metric != BITS if which == DENSE else better.get(task, {}).get(metric)
            found.append(
                ScoreValue(
                    task=task,
                    metric=metric,
                    filter=which,
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    higher_is_better=True if higher is None else bool(higher),
                    documents=values.get("n", _documents(results, task)),
                    version="" if versions.get(task) is None else str(versions[task]),
                    n_shot=shots[task] if isinstance(shots.get(task), int) else None,
                    keys=keys_of(results, task),
                )
            )
    return tuple(found)


def _documents(results: Mapping[str, Any], task: str) -> int | None:
    """Documents of a task, or of all tasks of a group; None where lm-eval does not say."""
    counts = [
        results.get("n-samples", {}).get(leaf, {}).get("effective")
        for leaf in set(_leaves(results.get("group_subtasks", {}), task, frozenset()))
    ]
    known = [count for count in counts if isinstance(count, int)]
    return sum(known) if known and len(known) == len(counts) else None


def keys_of(results: Mapping[str, Any], task: str) -> tuple[str, str]:
    """(what was asked, score key) of a task, or of all tasks of a group; "" where results.json has none."""
    keys = results.get("evalspan", {}).get("keys", {})
    leaves = sorted(set(_leaves(results.get("group_subtasks", {}), task, frozenset())))
    if not leaves or any(leaf not in keys for leaf in leaves):
        return "", ""
    # earlier versions wrote the request digest alone, which holds versions, too
    kind = "asks" if all(keys[leaf].get("asks") for leaf in leaves) else "requests"
    asked = [keys[leaf].get(kind, "") for leaf in leaves]
    score = [keys[leaf].get("score", "") for leaf in leaves]
    if len(leaves) > 1:
        asked, score = ([hashlib.sha256("".join(part).encode()).hexdigest()] for part in (asked, score))
    return asked[0] and f"{kind} {asked[0]}", score[0]


def leaves_of(results: Mapping[str, Any], task: str) -> list[str]:
    """Leaf tasks of a group, sorted; none of a task."""
    groups = results.get("group_subtasks", {})
    return sorted(set(_leaves(groups, task, frozenset()))) if groups.get(task) else []


def groups_of(results: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Each group of results -> its leaf tasks."""
    groups = results.get("group_subtasks", {})
    return {group: tuple(leaves_of(results, group)) for group, members in groups.items() if members}


def mode_of(results: Mapping[str, Any]) -> str:
    """The mode of results; those of versions without modes are exact."""
    return str(results.get("evalspan", {}).get("mode") or "exact")


def _leaves(groups: Mapping[str, Any], name: str, seen: frozenset[str]) -> Iterator[str]:
    members = groups.get(name) or ()
    if not members or name in seen:
        yield name
        return
    for member in members:
        yield from _leaves(groups, member, seen | {name})


def difference(before: tuple[str, str], after: tuple[str, str]) -> Difference:
    """What differs between two pairs of keys; nothing where one is unknown, or of another kind."""
    kinds = {key.rpartition(" ")[0] for key in (before[0], after[0])}
    if before[0] and after[0] and len(kinds) == 1 and before[0] != after[0]:
        return "requests"
    if before[1] and after[1] and before[1] != after[1]:
        return "score"
    return ""


def in_order(points: Iterable[Point]) -> list[Point]:
    """Points in training order, suite by suite; a score says whether it is comparable with that of the point before."""
    last: dict[tuple[str, str], tuple[str, ScoreValue]] = {}
    compared = []
    for point in sorted(points, key=lambda p: (p.suite, p.step is None, float(p.step or 0), p.accepted_at)):
        scores = []
        for score in point.scores:
            mode, before = last.get((point.suite, score.name), (point.mode, score))
            differs: Difference = "mode" if mode != point.mode else difference(before.keys, score.keys)
            scores.append(
                score if score.differs == differs else score.model_copy(update={"differs": differs})
            )
            last[point.suite, score.name] = point.mode, score
        compared.append(point.model_copy(update={"scores": tuple(scores)}))
    return compared


def labels(points: Sequence[Point]) -> list[str]:
    """A short name for each point, unique among them: its step or folder, and more only where two are alike."""
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


def make_series(points: Iterable[Point], gpu_hour_price: float | None = None) -> Series:
    """Points in training order, and their curves, without verdicts; of two evaluations of a checkpoint in one mode, the later."""
    latest: dict[tuple[str, str, str], Point] = {}
    by_time = sorted(points, key=lambda p: p.accepted_at)
    for point in by_time:
        latest[point.suite, point.checkpoint, point.mode] = point
    ordered = in_order(latest.values())
    if gpu_hour_price is not None:
        ordered = [
            p.model_copy(update={"cost": p.gpu_seconds / 3600 * gpu_hour_price})
            if p.gpu_seconds is not None
            else p
            for p in ordered
        ]
    curves: list[Curve] = []
    means: list[Curve] = []
    for suite in dict.fromkeys(p.suite for p in ordered):
        alike = [p for p in ordered if p.suite == suite]
        rows: dict[str, list[tuple[str, Point, ScoreValue]]] = defaultdict(list)
        for label, point in zip(labels(alike), alike, strict=True):
            for score in point.scores:
                rows[score.name].append((label, point, score))
        made = [_curve(suite, row) for row in rows.values()]
        curves += made
        means += means_of(suite, made, max(alike, key=lambda p: (bool(p.scores), p.accepted_at)).groups)
    return Series(
        points=tuple(ordered),
        curves=tuple(curves),
        means=tuple(means),
        gpu_hour_price=gpu_hour_price,
        superseded=len(by_time) - len(latest),
    )


def _curve(suite: str, row: Sequence[tuple[str, Point, ScoreValue]]) -> Curve:
    last, before = row[-1][2], None
    made: list[CurvePoint] = []
    for label, point, score in row:
        made.append(
            CurvePoint(
                evaluation_id=point.evaluation_id,
                label=label,
                step=point.step,
                value=score.value,
                stderr=score.stderr,
                change=None if before is None else score.value - before,
                differs=score.differs,
                documents=score.documents,
            )
        )
        before = score.value
    facts = last.model_dump(include={"task", "metric", "filter", "higher_is_better"})
    return Curve(suite=suite, name=last.name, points=tuple(made), **facts)


def means_of(suite: str, curves: Sequence[Curve], groups: Mapping[str, Sequence[str]]) -> Iterator[Curve]:
    """The mean of all tasks, then of each group that is in no other one and has no score of its own.

    A task counts by its first score of which higher is better and which lies between 0 and 1. A checkpoint that lacks one of
    them has no mean. No mean of fewer than two tasks. `groups`: group -> its leaf tasks.
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


def top_groups(groups: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Groups whose tasks are not all in a larger one."""
    return {
        group: members
        for group, members in groups.items()
        if not any({*members} < {*others} for others in groups.values())
    }


def _mean(suite: str, name: str, members: Sequence[Curve]) -> Iterator[Curve]:
    known = [{p.evaluation_id: p for p in curve.points} for curve in members]
    made: list[CurvePoint] = []
    for point in known[0].values() if len(known) > 1 else ():
        parts = [one[point.evaluation_id] for one in known if point.evaluation_id in one]
        if len(parts) < len(known) or not all(isfinite(p.value) for p in parts):
            continue
        errors = [p.stderr for p in parts if p.stderr is not None]
        value = sum(p.value for p in parts) / len(parts)
        facts: dict[str, Any] = {
            "value": value,
            "stderr": hypot(*errors) / len(parts) if len(errors) == len(parts) else None,
            "change": value - made[-1].value if made else None,
        }
        made.append(
            CurvePoint(evaluation_id=point.evaluation_id, label=point.label, step=point.step, **facts)
        )
    if made:
        facts = {"task": name, "metric": "mean", "filter": "none", "name": f"{name}/mean"}
        yield Curve(suite=suite, higher_is_better=True, points=tuple(made), **facts)


CSV_COLUMNS = (
    "suite", "step", "checkpoint", "evaluation_id", "status", "task", "metric", "filter", "value", "stderr",
    "documents", "makespan_seconds", "gpu_seconds", "cost",
    "version", "n_shot", "higher_is_better", "differs", "paused_seconds", "mode",
    "mean_before", "yardstick", "worse_since", "worse_low", "worse_high",
)  # fmt: skip


def to_csv(series: Series) -> Iterator[str]:
    """A line per checkpoint and score, then its means; a checkpoint without scores has one line with empty columns."""
    judged = {(p.evaluation_id, curve.name): p for curve in series.curves for p in curve.points}
    means: dict[str, list[tuple[Curve, CurvePoint]]] = defaultdict(list)
    for curve in series.means:
        for p in curve.points:
            means[p.evaluation_id].append((curve, p))
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for point in series.points:
        known = point.model_dump(exclude={"scores", "groups"})
        if not point.scores:
            writer.writerow(known)
        for score in point.scores:
            more = judged[point.evaluation_id, score.name]
            facts = score.model_dump() | more.model_dump(include={"mean_before", "yardstick"})
            facts["higher_is_better"] = int(score.higher_is_better)
            worse = more.worse.model_dump() if more.worse is not None else {}
            writer.writerow(known | facts | {f"worse_{name}": value for name, value in worse.items()})
        for curve, p in means[point.evaluation_id]:
            facts = curve.model_dump(include={"task", "metric", "filter"}) | {"higher_is_better": 1}
            writer.writerow(known | facts | p.model_dump(include={"value", "stderr"}))
        yield out.getvalue()
        out.seek(0)
        out.truncate()


def to_json(series: Series, beside: Mapping[str, Any] = MappingProxyType({})) -> Iterator[str]:
    """The record with `beside` as JSON, a line each checkpoint and curve, so that no text of the whole is made."""
    many = ("points", "curves", "means")
    head = series.model_dump(exclude=set(many)) | dict(beside)
    yield json.dumps(finite(head))[:-1]
    for name in many:
        yield f',\n"{name}": ['
        for i, one in enumerate(getattr(series, name)):
            yield ("\n" if i == 0 else ",\n") + one.model_dump_json(exclude={"groups"})
        yield "]"
    yield "}\n"
