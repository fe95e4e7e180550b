"""Detection of the checkpoint since which a score is worse in a training: a CUSUM of one metric over checkpoint numbers.
Pure.

Rule: each checkpoint is compared with the previous one and with the robust mean of those before; so is the mean of the latest
ones, over windows that grow by GROWTH up to all checkpoints, with the mean of as many before them (the generalised likelihood
ratio of Siegmund and Venkatraman, 1995). A checkpoint's verdict follows from it and earlier ones, so later ones change
nothing. Values are better if higher.

The yardstick, the standard error of a difference, has two variances. That of documents is known from paired differences. That
of checkpoints is a robust variance of the earlier detrended differences, minus the mean of their documents' variances: of
successive checkpoints or those APART, whichever is larger, since neighbours may be similar. Where rises are far larger than
falls, the score is being learnt and its rises are no scatter: the variance is then that of the falls. In the mean of a window
it counts as that of an autoregression with the correlation ALIKE: even a hundred checkpoints estimate their correlation too
coarsely for the limits that many scores need. WIDER, DEGREES and LOOKS are fitted to simulated series with that correlation, and any
share of documents in their variance, over twice the horizon (`scripts/bench_verdicts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coordinator.decide.verdicts.paired import Values

ALPHA = 0.05  # of any false "worse", over all scores and the whole horizon
MIN_CHECKPOINTS = 6  # earlier checkpoints needed for a verdict
LEVEL_CHECKPOINTS = 8  # earlier checkpoints in the robust mean that a single one is compared with
LEVEL_OF_MANY = 64  # earlier checkpoints, at most, in the mean that a long window is compared with
TRIMMED_VARIANCE = 1.2  # variance of a robust mean relative to that of the mean
SPREAD_DIFFERENCES = 100  # earlier differences in the robust variance
LONG_DIFFERENCE = 4  # checkpoints between the ends of the longer differences
MAX_CORRELATION = 0.6  # correlation of neighbours' scatter up to which false verdicts stay within ALPHA
WINDOW_GROWTH = 1.25  # ratio of successive window lengths
MIN_DATING_WINDOW = 10  # earlier checkpoints, at least, in which a change is dated
VARIANCE_FACTOR = 1.4  # factor of the robust variance, to allow for its own error
CLIPPED_SHARE = 0.2  # share of the largest differences that count as no larger than the others
DEGREES_OF_FREEDOM = 1.5  # of freedom of the robust variance, per difference
STEEP_RISE = 10.0  # ratio of the squares of rises to those of falls, above which rises are no scatter
FALLS_FACTOR = 2.0  # factor of the falls' variance, to allow for its own error
FALLS_ERROR = 4.0  # that factor grows by this over the number of falls
INDEPENDENT_TESTS = 2.0  # independent tests equivalent to the tests of one checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Worse:
    """A verdict, in numbers of checkpoints."""

    found: int  # the checkpoint that showed it
    since: int  # the first worse one
    low: int  # 95 % interval of `since`
    high: int
    mean: float  # of the earlier checkpoints


Spread = tuple["Values", "Values"]  # as from `difference_variances`


def yardsticks(values: Values, sampling: Values, spread: Spread | None = None) -> tuple[Values, Values]:
    """Return (robust mean of the LEVEL previous checkpoints, standard error of a difference) of each checkpoint, NaN for the
    first FEWEST.

    Arrays: (…, checkpoints). `sampling`: variance of the mean paired difference from the previous checkpoint; the first is
    unused. `spread`: from `difference_variances`, if known.
    """
    import numpy as np  # noqa: PLC0415 (other commands start without it)

    means, (documents, scatter) = (
        np.full_like(values, np.nan),
        spread or difference_variances(values, sampling),
    )
    for now in range(MIN_CHECKPOINTS, values.shape[-1]):
        means[..., now] = _level(values[..., max(0, now - LEVEL_CHECKPOINTS) : now])
    return means, np.sqrt(documents + scatter)


def _level(values: Values) -> Values:
    """Return the mean along the last axis without the lowest and the highest quarter."""
    import numpy as np  # noqa: PLC0415

    cut = values.shape[-1] // 4
    return np.sort(values, -1)[..., cut : values.shape[-1] - cut].mean(-1)  # type: ignore[no-any-return]


def difference_variances(values: Values, sampling: Values) -> Spread:
    """Return variances of a difference from an earlier checkpoint: of documents, of checkpoints. NaN for the first FEWEST."""
    import numpy as np  # noqa: PLC0415

    documents, scatter = np.full_like(values, np.nan), np.full_like(values, np.nan)
    for now in range(MIN_CHECKPOINTS, values.shape[-1]):
        first = max(0, now - 1 - SPREAD_DIFFERENCES)
        before = values[..., first:now]
        spread = _robust(np.diff(before), first)
        if now >= MIN_CHECKPOINTS + LONG_DIFFERENCE:
            spread = np.maximum(
                spread, _robust(before[..., LONG_DIFFERENCE:] - before[..., :-LONG_DIFFERENCE], first)
            )
        spread = _without_rises(np.diff(before), spread)
        known = sampling[..., first + 1 : now].mean(-1)
        documents[..., now] = np.maximum(sampling[..., now], known)  # few flips do not mean a small variance
        scatter[..., now] = np.maximum(0, VARIANCE_FACTOR * spread - known)
    return documents, scatter


def _robust(differences: Values, first: int) -> Values:
    """Return the winsorised variance about the trend along the last axis, scaled to a normal distribution's; 0, which means
    nothing, if most differences are 0. `first`: number of the first difference.
    """
    import numpy as np  # noqa: PLC0415

    count = differences.shape[-1]
    kept = count - math.ceil(CLIPPED_SHARE * count)
    trend, inverse = _trend(first, count)
    squares = np.sort((differences - (differences @ trend) @ inverse) ** 2, -1)
    total = squares[..., :kept].sum(-1) + (count - kept) * squares[..., kept - 1]
    moves = np.median(np.abs(differences), -1) > 0
    return moves * total / count / _winsorised(kept / count)  # type: ignore[no-any-return]


def _without_rises(differences: Values, spread: Values) -> Values:
    """Return `spread`; where rises are far larger than falls, at most the variance that the falls show. It is scaled from
    differences of neighbours, assumed to correlate by MAX_CORRELATION, to those LONG_DIFFERENCE apart.
    """
    import numpy as np  # noqa: PLC0415

    rises, falls = ((np.maximum(0, part) ** 2).sum(-1) for part in (differences, -differences))
    many = np.maximum(1, (differences < 0).sum(-1))
    factor = FALLS_FACTOR * (1 - MAX_CORRELATION**LONG_DIFFERENCE) / (1 - MAX_CORRELATION)
    variance = factor * (1 + FALLS_ERROR / many) * 2 * falls / differences.shape[-1]
    steep = (falls > 0) & (rises > STEEP_RISE * falls)
    return np.where(steep, np.minimum(spread, variance), spread)  # type: ignore[no-any-return]


@cache
def _trend(first: int, count: int) -> tuple[Values, Values]:
    """Return the trend of a learning curve's differences, a constant and one over the checkpoint number, and its inverse."""
    import numpy as np  # noqa: PLC0415

    trend = np.stack([np.ones(count), 1 / np.arange(first + 1, first + count + 1)], 1)
    return trend, np.linalg.pinv(trend)


@cache
def _winsorised(kept: float) -> float:
    """Return the variance of a standard normal distribution whose largest squares are cut to its quantile `kept`."""
    from scipy import special  # noqa: PLC0415

    edge = special.chdtri(1, 1 - kept)
    return float(special.chdtr(3, edge) + (1 - kept) * edge)


@cache
def _limit(level: float, steps: int) -> float:
    """Return the drop, in standard errors, that chance shows at one checkpoint with probability `level`."""
    from scipy import special  # noqa: PLC0415

    return -float(special.stdtrit(DEGREES_OF_FREEDOM * steps, level / INDEPENDENT_TESTS)) * (1 + 1 / steps)


@cache
def _windows(since: int, count: int) -> tuple[Values, Values, Values, Values]:
    """Return lengths of windows that begin at `since`, lengths of those before them, and the variances of the difference of
    their means: of documents, and of checkpoints that are ALIKE; each relative to a difference of two checkpoints.
    """
    import numpy as np  # noqa: PLC0415

    lengths = [1]
    while (longer := max(lengths[-1] + 1, int(lengths[-1] * WINDOW_GROWTH))) <= count - since:
        lengths.append(longer)
    size = np.array(lengths)
    before = np.minimum(
        since, np.clip(2 ** np.floor(np.log2(2 * size)).astype(int), LEVEL_CHECKPOINTS, LEVEL_OF_MANY)
    )
    faded, faded_before, rest = 1 - MAX_CORRELATION**size, 1 - MAX_CORRELATION**before, 1 - MAX_CORRELATION
    after, level = (
        (1 + MAX_CORRELATION - 2 * MAX_CORRELATION * left / (n * rest)) / (n * rest)
        for n, left in ((size, faded), (before, faded_before))
    )
    shared = MAX_CORRELATION * faded * faded_before / (size * before * rest**2)
    scatter = (after + TRIMMED_VARIANCE * level - 2 * shared) / (2 * (1 - MAX_CORRELATION**LONG_DIFFERENCE))
    return size, before, (1 / size + TRIMMED_VARIANCE / before) / 2, scatter


def cusum_heights(values: Values, sampling: Values, level: float) -> Values:
    """Return the height of each checkpoint's CUSUM: above 1 means "worse". Arrays as in `yardsticks`.

    `level`: probability of exceeding it at one checkpoint by chance.
    """
    return _scan(values, sampling, level)[0]


def _scan(
    values: Values, sampling: Values, level: float, spread: Spread | None = None
) -> tuple[Values, Values]:
    """Return (height, length of the window that attains it) of each checkpoint."""
    import numpy as np  # noqa: PLC0415

    found, longest = np.full_like(values, np.nan), np.ones_like(values)
    documents, scatter = spread or difference_variances(values, sampling)
    one = np.sqrt(documents + scatter)
    one[one == 0] = np.inf
    sums, count = np.cumsum(values, -1), values.shape[-1]
    for since in range(MIN_CHECKPOINTS, count):
        size, before, known, jitter = _windows(since, count)
        last: Any = since + size - 1
        levels = {n: _level(values[..., since - n : since]) for n in {*before.tolist()}}
        fall = np.stack([levels[n] for n in before.tolist()], -1)
        fall -= (sums[..., last] - sums[..., since - 1, None]) / size
        errors = np.sqrt(documents[..., since, None] * known + scatter[..., since, None] * jitter)
        errors[errors == 0] = np.inf  # nothing ever differed, so there is no verdict
        high = fall / errors
        step = values[..., since - 1] - values[..., since]
        high[..., 0] = np.maximum(high[..., 0], step / one[..., since])
        high /= _limit(level, min(since - 1, SPREAD_DIFFERENCES))
        higher = ~(high <= found[..., last])
        found[..., last] = np.where(higher, high, found[..., last])
        longest[..., last] = np.where(higher, size, longest[..., last])
    return found, longest


def find_worse(
    values: Values, sampling: Values, level: float, spread: Spread | None = None
) -> list[list[Worse]]:
    """Return verdicts on each of several series, in order. Arrays: (series, checkpoints). `spread`: as in `yardsticks`.

    After a verdict the series starts over at its change point.
    """
    import numpy as np  # noqa: PLC0415

    said: list[list[Worse]] = [[] for _ in values]
    for i, scan in enumerate(zip(*_scan(values, sampling, level, spread), strict=True)):
        start, (high, longest) = 0, scan
        while (over := np.flatnonzero(high > 1)).size:
            found = start + int(over[0])
            change = _change(values[i, start : found + 1], int(longest[over[0]]))
            since, low, last = (start + place for place in change)
            mean = float(_level(values[i, start:since][-LEVEL_CHECKPOINTS:]))
            said[i].append(Worse(found=found, since=since, low=low, high=last, mean=mean))
            start = since
            high, longest = _scan(values[i, start:], sampling[i, start:], level)
    return said


def _change(values: Values, size: int) -> tuple[int, int, int]:
    """Return (likeliest first checkpoint of a lower mean, 95 % interval) by the sums of squares about two means.

    `size`: length of the window that shows it; the change is searched for in twice as many checkpoints.
    """
    import numpy as np  # noqa: PLC0415

    count = len(values)
    near = max(MIN_DATING_WINDOW, 2 * size)
    first = max(0, count - LEVEL_CHECKPOINTS - near)
    places = range(max(MIN_CHECKPOINTS, count - near), count)
    parts = [(values[first:place], values[place:]) for place in places]
    squares = np.array([sum(float(((p - p.mean()) ** 2).sum()) for p in both) for both in parts])
    squares[[before.mean() <= after.mean() for before, after in parts]] = np.inf
    if not np.isfinite(squares).any():  # a drop after a steep rise
        return count - 1, count - 1, count - 1
    squares += 1e-9 * float(values.var())
    weights = (squares / squares.min()) ** (-(count - first - 2) / 2)
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    inside = order[: int(np.searchsorted(shares, 0.95)) + 1]
    return places[order[0]], places[inside.min()], places[inside.max()]
