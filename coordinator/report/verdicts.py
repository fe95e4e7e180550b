"""Verdicts on scores by their documents' values: against a baseline, the leftmost evaluation, or along a training.

Rule: a leaf task's metric has a verdict where it is the mean of its documents' values, and where both evaluations asked
and scored alike. All verdicts of a comparison are corrected together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from coordinator.report.learning_curves import Curve, Worse
from coordinator.verdicts.paired import ALPHA as VERDICT_ALPHA
from coordinator.verdicts.paired import Paired, interval, paired, verdicts
from coordinator.verdicts.series import ALPHA, FEWEST, worse, yardsticks
from coordinator.verdicts.series import variances as spread_of
from evaljobs.contract.columns import DENSE

if TYPE_CHECKING:
    from coordinator.verdicts.paired import Values
    from evaljobs.contract.columns import Columns

MEANING = (
    "Verdicts: a paired test over the same documents, corrected for the number of scores; 5 % of the verdicts may be "
    'false. "Would be seen": the change, in this score alone, that is found four times in five after that correction. '
    '"±": the wider half of the two-sided 95 % interval.'
)
ALONG = (
    "Worse since: the score fell below the mean of the checkpoints before, or below the last one. In {horizon} checkpoints "
    "without a drop, at most 5 % of trainings have such a verdict by chance. It needs 6 earlier checkpoints, and stays as it is."
)
PLACES = ("since", "low", "high")  # of a verdict along a series
MOST_APART = 1e-9  # relative; a score that is farther from the mean of its documents is no mean
UNLIKE: Mapping[str, str] = {
    "mode": "computed in another mode; --mixed compares them all the same",
    "requests": "asked with other prompts or settings",
    "score": "scored in another way",
}


def add_verdicts(
    rows: Sequence[dict[str, Any]], columns: Callable[[int, str], Columns | None], *, mixed: bool = False
) -> None:
    """Add "verdicts" to rows of `comparison`: for each evaluation but the first how its score stands to the first one's.

    `columns`: (number of the evaluation, leaf task) -> its documents. Each verdict is a mapping with "verdict" and "words";
    with "why" where there is none, else with the fields of `Paired`; "adjusted", p after the correction; "detectable"; and of
    the two-sided 95 % interval "low", "high" and "reach", its wider half.
    """
    found: list[tuple[dict[str, Any], Paired, bool]] = []
    for row in rows:
        row["verdicts"] = said = []
        for i in range(1, len(row["values"])):
            one = _pair(row, i, columns, mixed)
            said.append({"verdict": "not comparable", "why": one, "words": f"not comparable: {one}"})
            if not isinstance(one, str):
                found.append((said[-1], one, row["higher_is_better"]))
    for (place, one, _), (verdict, adjusted, detectable) in zip(
        found, verdicts([(one, higher) for _, one, higher in found]), strict=True
    ):
        low, high = interval(one, 1 - VERDICT_ALPHA / 2)
        place.clear()
        place.update(verdict=verdict, adjusted=adjusted, detectable=detectable, **asdict(one))
        place.update(low=low, high=high, reach=max(one.difference - low, high - one.difference))
        place["words"] = _words(verdict, detectable)


def _words(verdict: str, detectable: float | None) -> str:
    """Beside a score: "worse", "no evidence (0.0310 would be seen)"."""
    if verdict != "no evidence":
        return verdict
    return f"no evidence ({detectable:.4f} would be seen)" if detectable else "no document differs"


def _pair(
    row: Mapping[str, Any], i: int, columns: Callable[[int, str], Columns | None], mixed: bool
) -> Paired | str:
    """Compare with the first evaluation; a text says why there is no comparison."""
    if None in (row["values"][0], row["values"][i]):
        return "one has no score"
    if (unlike := row["differs"][i]) and not (unlike == "mode" and mixed):
        return UNLIKE[unlike]
    if row["leaves"]:
        return "a group: see its tasks"
    both = [columns(k, row["task"]) for k in (0, i)]
    metric = row["metric"].removesuffix(f",{DENSE}")
    if both[0] is None or both[1] is None:
        return "its samples were removed"
    if not (is_mean(both[0], metric, row["values"][0]) and is_mean(both[1], metric, row["values"][i])):
        return "its score is no mean of its documents"
    return paired(*aligned(both[0], both[1], metric))


def is_mean(columns: Columns, metric: str, score: float) -> bool:
    """Return whether a score is the mean of its documents' values."""
    import numpy as np  # noqa: PLC0415

    return metric in columns and near(float(np.nanmean(columns[metric])), score)


def near(mean: float, score: float) -> bool:
    """Return whether a score is this mean, but for rounding."""
    return abs(mean - score) <= MOST_APART * max(1.0, abs(score))


def aligned(before: Columns, after: Columns, metric: str) -> tuple[Values, Values, Sequence[str] | None]:
    """(values, the other's values, clusters) of the documents that both have, with equal content, in one order."""
    import numpy as np  # noqa: PLC0415

    _, ours, theirs = np.intersect1d(before["doc_id"], after["doc_id"], return_indices=True)
    a, b = before[metric][ours], after[metric][theirs]
    same = (before["doc_hash"][ours] == after["doc_hash"][theirs]) & ~np.isnan(a) & ~np.isnan(b)
    clusters = after["cluster"][theirs][same] if "cluster" in after else None
    return a[same], b[same], clusters


Sampling = Callable[[str, str], Mapping[str, float]]
"""(evaluation before, evaluation) -> score name -> variance of the mean paired difference; 0: it is not known."""


def judged(curves: Sequence[Curve], horizon: int, sampling: Sampling) -> list[Curve]:
    """Curves whose points say since when a score is worse, in a training of `horizon` checkpoints.

    A series begins anew where a point is not comparable with the one before, or is no number. All scores that its first two
    checkpoints have share ALPHA; so do their dense signals.
    """
    import numpy as np  # noqa: PLC0415

    # (checkpoints, level) -> number of a curve, its first point, variances: what is computed together
    alike: dict[tuple[int, float], list[tuple[int, int, list[float]]]] = defaultdict(list)
    for c, curve in enumerate(curves):
        breaks = [i for i, p in enumerate(curve.points) if p.differs or not isfinite(p.value)]
        for start, end in pairwise([0, *breaks, len(curve.points)]):
            first = start if isfinite(curve.points[start].value) else start + 1
            run = curve.points[first:end] if end - first > FEWEST else ()
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
        said = worse(values, documents, level, spread)
        every = zip(group, runs, signs * means, errors, signs, said, strict=True)
        for (c, first, _), run, mean, error, sign, drops in every:
            at = {
                one.found: Worse(mean=sign[0] * one.mean, **{k: run[getattr(one, k)].label for k in PLACES})
                for one in drops
            }
            for i in range(FEWEST, count):
                known = {"mean_before": float(mean[i]), "yardstick": float(error[i]), "worse": at.get(i)}
                points[c][first + i] = run[i].model_copy(update=known)
    return [
        curve.model_copy(update={"points": tuple(made)}) for curve, made in zip(curves, points, strict=True)
    ]
