"""Verdicts on scores from their documents' values: against a baseline, the leftmost evaluation, or along a training.

Rule: a leaf task's metric has a verdict if it is the mean of its documents' values and both evaluations have equal requests
and scoring; a group's score has one if it is a mean of such scores. The verdicts of a comparison's tasks are corrected
together, as are those of its groups; `overall_difference` is one test.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

from coordinator.decide.verdicts.paired import ALPHA as VERDICT_ALPHA
from coordinator.decide.verdicts.paired import (
    Paired,
    adjusted_verdicts,
    confidence_interval,
    pool_differences,
)
from coordinator.decide.verdicts.series import ALPHA, MIN_CHECKPOINTS, find_worse, yardsticks
from coordinator.decide.verdicts.series import difference_variances as spread_of
from coordinator.results.report.learning_curves import Curve, Worse
from evaljobs.contract.columns import DENSE, SUITE_MEAN

VERDICTS_NOTE = (
    "Verdicts: a paired test over the same documents, corrected for the number of scores; 5 % of the verdicts may be "
    'false. "Would be seen": the change, in this score alone, that is found four times in five after that correction. '
    '"±": the wider half of the two-sided 95 % interval.'
)
SERIES_NOTE = (
    "Worse since: the score fell below the mean of the checkpoints before, or below the last one. In {horizon} checkpoints "
    "without a drop, at most 5 % of trainings have such a verdict by chance. It needs 6 earlier checkpoints, and stays as it is."
)
VERDICT_POINTS = ("since", "low", "high")  # of a verdict along a series
MOST_APART = 1e-9  # relative; a score farther from a mean is not that mean
UNLIKE_WORDS: Mapping[str, str] = {
    "mode": "computed in another mode; --mixed compares them anyway",
    "requests": "run with different prompts or settings",
    "score": "scored differently",
}


def add_verdicts(
    rows: Sequence[dict[str, Any]], found: Sequence[Mapping[str, Paired | str]], *, mixed: bool = False
) -> None:
    """Add "verdicts" to rows of `comparison`: how each evaluation's score compares with the first one's.

    `found`: from `pairs.score_differences`, for each evaluation but the first. Each verdict is a mapping with "verdict" and
    "words"; with "why" if there is none, otherwise with the facts of `Paired`; "adjusted", p after the correction;
    "detectable"; and of the two-sided 95 % interval "low", "high" and "reach", its wider half.
    """
    tasks = {(row["task"], row["metric"]): row for row in rows if not row["leaves"]}

    def of_task(row: Mapping[str, Any], i: int) -> Paired | str:
        return found[i - 1].get(name_of(row), "its samples were removed")

    _judge([*tasks.values()], of_task, mixed=mixed)
    _judge([row for row in rows if row["leaves"]], lambda row, i: _of_group(row, i, tasks), mixed=mixed)


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of a row's score."""
    return f"{row['task']}/{row['metric'].removesuffix(',none')}"


def _judge(
    rows: Sequence[dict[str, Any]], compare: Callable[[dict[str, Any], int], Paired | str], *, mixed: bool
) -> None:
    """Add "verdicts" to rows, corrected together."""
    found: list[tuple[dict[str, Any], Paired, bool]] = []
    for row in rows:
        row["verdicts"] = said = []
        for i in range(1, len(row["values"])):
            one = _unlike(row, i, mixed=mixed) or compare(row, i)
            said.append({"verdict": "not comparable", "why": one, "words": f"not comparable: {one}"})
            if not isinstance(one, str):
                found.append((said[-1], one, row["higher_is_better"]))
    for (place, one, _), (verdict, adjusted, detectable) in zip(
        found, adjusted_verdicts([(one, higher) for _, one, higher in found]), strict=True
    ):
        place.clear()
        place.update(verdict=verdict, adjusted=adjusted, detectable=detectable, **one.facts(), **_ends(one))
        place["words"] = _words(verdict, detectable)


def _ends(one: Paired) -> dict[str, float]:
    low, high = confidence_interval(one, 1 - VERDICT_ALPHA / 2)
    return {"low": low, "high": high, "reach": max(one.difference - low, high - one.difference)}


def _words(verdict: str, detectable: float | None) -> str:
    """Return the text beside a score: "worse", "no evidence (0.0310 would be seen)"."""
    if verdict != "no evidence":
        return verdict
    return f"no evidence ({detectable:.4f} would be seen)" if detectable else "no document differs"


def _unlike(row: Mapping[str, Any], i: int, *, mixed: bool) -> str:
    """Return why a score is not comparable with the first one, whatever its documents; "" if it is."""
    if None in (row["values"][0], row["values"][i]):
        return "not asked at both" if any(row["not_asked"]) else "one has no score"
    unlike = row["differs"][i]
    return UNLIKE_WORDS[unlike] if unlike and not (unlike == "mode" and mixed) else ""


def _of_group(
    row: Mapping[str, Any], i: int, tasks: Mapping[tuple[str, str], Mapping[str, Any]]
) -> Paired | str:
    """Compare a group by its tasks, weighted as in its score. `tasks`: rows with verdicts by (task, metric)."""
    members = [
        tasks.get((leaf, row["metric"])) or _first_score(leaf, tasks.values()) for leaf in row["leaves"]
    ]
    parts = []
    for leaf, member in zip(row["leaves"], members, strict=True):
        if member is None or (row["metric"] not in (member["metric"], SUITE_MEAN)):
            return f"{leaf} has no such score"
        said = member["verdicts"][i - 1]
        if "why" in said:
            return f"{leaf}: {said['why']}"
        parts.append(Paired.of(said))
    documents = sum(one.documents for one in parts)
    for weights in ([1 / len(parts)] * len(parts), [one.documents / documents for one in parts]):
        sums = [sum(w * m["values"][k] for w, m in zip(weights, members, strict=True) if m) for k in (0, i)]
        if is_mean(sums[0], row["values"][0]) and is_mean(sums[1], row["values"][i]):
            return pool_differences(parts, weights)
    return "its score is not a mean over its tasks"


def _first_score(task: str, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return a task's first score for which higher is better."""
    return next((row for row in rows if row["task"] == task and row["higher_is_better"]), None)


def overall_difference(
    scores: Iterable[tuple[str, bool, Sequence[float | None], Paired | None]],
) -> dict[str, Any]:
    """Compare two evaluations by the mean of their tasks, each by its first score from 0 to 1 for which higher is better.

    `scores`: (leaf task, whether higher is better, its values, its difference) in order, without dense signals. The record
    has the fields of a verdict, and `of`: the tasks with such a score, of which `tasks` can be compared.
    """
    first: dict[str, Paired | None] = {}
    for task, higher, values, one in scores:
        if higher and all(value is not None and 0 <= value <= 1 for value in values):
            first.setdefault(task, one)
    parts = [one for one in first.values() if one is not None]
    if not parts:
        return {
            "verdict": "not comparable",
            "words": "not comparable: no task is",
            "tasks": 0,
            "of": len(first),
        }
    found = pool_differences(parts)
    ((verdict, _, detectable),) = adjusted_verdicts([(found, True)])
    ends = _ends(found)
    count = f"{len(parts)} of {len(first)}" if len(parts) < len(first) else f"{len(parts)}"
    words = f"{found.difference:+.4f} ± {ends['reach']:.4f} over {count} tasks: {_words(verdict, detectable)}"
    known = {"verdict": verdict, "detectable": detectable, **found.facts(), **ends}
    return {**known, "of": len(first), "words": words}


def overall_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `overall_difference` of each evaluation but the first against the first one. `rows`: with verdicts."""
    scores = [row for row in rows if not row["leaves"] and not row["metric"].endswith(f",{DENSE}")]
    return [
        overall_difference(
            (
                r["task"],
                r["higher_is_better"],
                (r["values"][0], r["values"][i + 1]),
                None if "why" in r["verdicts"][i] else Paired.of(r["verdicts"][i]),
            )
            for r in scores
        )
        for i in range(len(rows[0]["verdicts"]) if rows else 0)
    ]


def is_mean(mean: float, score: float) -> bool:
    """Return whether a score equals this mean, except for rounding."""
    return abs(mean - score) <= MOST_APART * max(1.0, abs(score))


Sampling = Callable[[str, str], Mapping[str, float]]
"""(earlier evaluation, evaluation) -> score name -> variance of the mean paired difference; 0: unknown."""


def judge_curves(curves: Sequence[Curve], horizon: int, sampling: Sampling) -> list[Curve]:
    """Return curves whose points tell since when a score is worse, in a training of `horizon` checkpoints.

    A series starts over if a point is not comparable with the previous one, or is not a number. All scores that its first two
    checkpoints have share ALPHA; so do their dense signals.
    """
    import numpy as np  # noqa: PLC0415

    # (checkpoints, level) -> number of a curve, its first point, variances: computed together
    alike: dict[tuple[int, float], list[tuple[int, int, list[float]]]] = defaultdict(list)
    for c, curve in enumerate(curves):
        breaks = [i for i, p in enumerate(curve.points) if p.differs or not isfinite(p.value)]
        for start, end in pairwise([0, *breaks, len(curve.points)]):
            first = start if isfinite(curve.points[start].value) else start + 1
            run = curve.points[first:end] if end - first > MIN_CHECKPOINTS else ()
            found = [sampling(a.evaluation_id, b.evaluation_id) for a, b in pairwise(run)]
            if found and curve.name in found[0]:
                alike_scores = [
                    name for name in found[0] if name.endswith(f",{DENSE}") == (curve.filter == DENSE)
                ]
                level = ALPHA / len(alike_scores) / horizon
                documents = [0.0, *(one.get(curve.name, 0.0) for one in found)]
                alike[len(documents), level].append((c, first, documents))
    points = [list(curve.points) for curve in curves]
    for (count, level), group in alike.items():
        runs = [points[c][first : first + count] for c, first, _ in group]
        signs = np.array([[1.0 if curves[c].higher_is_better else -1.0] for c, _, _ in group])
        values, documents = (
            signs * [[p.value for p in run] for run in runs],
            np.array([one for *_, one in group]),
        )
        spread = spread_of(values, documents)
        means, errors = yardsticks(values, documents, spread)
        said = find_worse(values, documents, level, spread)
        every = zip(group, runs, signs * means, errors, signs, said, strict=True)
        for (c, first, _), run, mean, error, sign, drops in every:
            at = {
                one.found: Worse(
                    mean=sign[0] * one.mean, **{k: run[getattr(one, k)].label for k in VERDICT_POINTS}
                )
                for one in drops
            }
            for i in range(MIN_CHECKPOINTS, count):
                known = {"mean_before": float(mean[i]), "yardstick": float(error[i]), "worse": at.get(i)}
                points[c][first + i] = run[i]._replace(**known)
    return [curve._replace(points=tuple(made)) for curve, made in zip(curves, points, strict=True)]
