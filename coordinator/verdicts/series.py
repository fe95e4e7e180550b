"""Since when is a score worse, along a training's checkpoints? A CUSUM of one metric, over numbers of checkpoints. Pure.

Rule: each checkpoint is held against the one before and against the robust mean of those before; so is the mean of all
checkpoints since each of the last LONGEST (the generalised likelihood ratio of Siegmund and Venkatraman, 1995). What a
checkpoint says follows from it and from those before it, so a later one changes nothing. Values are better where higher.

The yardstick, the standard error of a difference, has two variances. That of documents is known from paired differences.
That of checkpoints is a robust variance of the detrended differences before, less the mean of their documents' variances:
of successive ones or of those over APART, the larger, since neighbours may be alike. DEGREES and LOOKS are fitted to drawn
series without a variance of documents, the worst case (`tests/verdicts/test_series.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.verdicts.paired import Values

ALPHA = 0.05  # of a false "worse", over all scores and the whole horizon
FEWEST = 6  # earlier checkpoints, below which there is no verdict
LEVEL = 8  # checkpoints before, of the robust mean
SPREAD = 30  # differences before, of the robust variance
APART = 4  # checkpoints, of the longer differences
LONGEST = 10  # checkpoints since a change that is looked for
CUT = 0.2  # share of the differences, the largest, that count as no larger than the others
DEGREES = 0.6  # of freedom of the robust variance, for each difference
LOOKS = 1.5  # independent tests that the tests of one checkpoint are worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Worse:
    """A verdict, in numbers of checkpoints."""

    found: int  # that showed it
    since: int  # first worse one
    low: int  # 95 % interval of `since`
    high: int
    mean: float  # of the checkpoints before


def yardsticks(values: Values, sampling: Values) -> tuple[Values, Values]:
    """(robust mean of the LEVEL checkpoints before, standard error of a difference) of each checkpoint, NaN for the first
    FEWEST.

    Arrays: (…, checkpoints). `sampling`: variance of the mean paired difference to the checkpoint before; the first is unused.
    """
    import numpy as np  # noqa: PLC0415 (other commands start without it)
    from scipy import stats  # noqa: PLC0415

    means, errors = np.full_like(values, np.nan), np.full_like(values, np.nan)
    for now in range(FEWEST, values.shape[-1]):
        first = max(0, now - 1 - SPREAD)
        before = values[..., first:now]
        spread = _robust(np.diff(before), first)
        if now >= FEWEST + APART:
            spread = np.maximum(spread, _robust(before[..., APART:] - before[..., :-APART], first))
        documents = sampling[..., first + 1 : now].mean(-1)
        own = np.maximum(sampling[..., now], documents)  # few flips are no small variance
        errors[..., now] = np.sqrt(own + np.maximum(0, spread - documents))
        means[..., now] = stats.trim_mean(before[..., -LEVEL:], 0.25, axis=-1)
    return means, errors


def _robust(differences: Values, first: int) -> Values:
    """Winsorised variance about the trend, along the last axis, as large as a normal distribution's; 0, which says nothing,
    where most differences are 0. `first`: number of the first difference.
    """
    import numpy as np  # noqa: PLC0415

    count = differences.shape[-1]
    kept = count - math.ceil(CUT * count)
    squares = np.sort((differences @ _detrending(first, count)) ** 2, -1)
    total = squares[..., :kept].sum(-1) + (count - kept) * squares[..., kept - 1]
    moves = np.median(np.abs(differences), -1) > 0
    return moves * total / count / _winsorised(kept / count)  # type: ignore[no-any-return]


@cache
def _detrending(first: int, count: int) -> Values:
    """Matrix that takes a learning curve's trend from its differences: a constant, and one over the checkpoint's number."""
    import numpy as np  # noqa: PLC0415

    trend = np.stack([np.ones(count), 1 / np.arange(first + 1, first + count + 1)], 1)
    return np.eye(count) - trend @ np.linalg.pinv(trend)  # type: ignore[no-any-return]


@cache
def _winsorised(kept: float) -> float:
    """Variance of a standard normal distribution whose largest squares count as its quantile `kept`."""
    from scipy import stats  # noqa: PLC0415

    edge = stats.chi2.ppf(kept, 1)
    return float(stats.chi2.cdf(edge, 3) + (1 - kept) * edge)


@cache
def _limit(level: float, steps: int) -> float:
    """Standard errors of a fall that is seen by chance at one checkpoint with probability `level`."""
    from scipy import stats  # noqa: PLC0415

    return float(stats.t.isf(level / LOOKS, DEGREES * steps)) * (1 + 1 / steps)


def heights(values: Values, sampling: Values, level: float) -> Values:
    """How high each checkpoint's CUSUM is: above 1 it says "worse". Arrays as of `yardsticks`.

    `level`: probability with which one checkpoint may say so by chance.
    """
    import numpy as np  # noqa: PLC0415

    found = np.full_like(values, np.nan)
    means, errors = yardsticks(values, sampling)
    for since in range(FEWEST, values.shape[-1]):
        limit = errors[..., since] * _limit(level, min(since - 1, SPREAD))
        after = values[..., since : since + LONGEST]
        size = np.arange(1, after.shape[-1] + 1)
        fall = means[..., since, None] - np.cumsum(after, -1) / size
        fall /= np.sqrt((1 / size + 1.2 / min(since, LEVEL)) / 2)
        fall[..., 0] = np.maximum(fall[..., 0], values[..., since - 1] - values[..., since])
        # without an error nothing ever differed, and there is no verdict
        high = fall / np.where(limit > 0, limit, np.inf)[..., None]
        ahead = found[..., since : since + LONGEST]
        np.fmax(ahead, high, out=ahead)
    return found


def worse(values: Values, sampling: Values, level: float) -> list[list[Worse]]:
    """Verdicts on each of several series, in order. Arrays: (series, checkpoints).

    After a verdict the series begins anew at its change point.
    """
    import numpy as np  # noqa: PLC0415

    said: list[list[Worse]] = []
    for score, documents, high in zip(values, sampling, heights(values, sampling, level), strict=True):
        said.append([])
        start, over = 0, np.flatnonzero(high > 1)
        while over.size:
            found = start + int(over[0])
            since, low, high_end = (start + place for place in _change(score[start : found + 1]))
            mean = float(yardsticks(score[start : since + 1], documents[start : since + 1])[0][-1])
            said[-1].append(Worse(found=found, since=since, low=low, high=high_end, mean=mean))
            start = since
            over = np.flatnonzero(heights(score[start:], documents[start:], level) > 1)
    return said


def _change(values: Values) -> tuple[int, int, int]:
    """(likeliest first checkpoint of a lower mean, 95 % interval) by the sums of squares about two means."""
    import numpy as np  # noqa: PLC0415

    count = len(values)
    first = max(0, count - LEVEL - LONGEST)
    places = range(max(FEWEST, count - LONGEST), count)
    parts = [(values[first:place], values[place:]) for place in places]
    squares = np.array([sum(float(((p - p.mean()) ** 2).sum()) for p in both) for both in parts])
    squares[[before.mean() <= after.mean() for before, after in parts]] = np.inf
    if not np.isfinite(squares).any():  # a fall after a steep rise
        return count - 1, count - 1, count - 1
    squares += 1e-9 * float(values.var())
    weights = (squares / squares.min()) ** (-(count - first - 2) / 2)
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    inside = order[: int(np.searchsorted(shares, 0.95)) + 1]
    return places[order[0]], places[inside.min()], places[inside.max()]
