"""Paired comparison of one metric over the same documents, and what it says in words. Pure.

Rule: one test decides. It is the paired t test; with clusters of documents (several questions of one passage) the t test
of a mean with cluster-robust errors (CR2, with the degrees of freedom of the effective number of clusters); below FEW
clusters or documents a randomisation of signs, which needs no normal distribution. McNemar's exact test is shown beside
it and decides nothing. One function, `interval`, makes every margin. Sources: Miller, "Adding Error Bars to Evals" (2024);
Bell and McCaffrey (2002) and Carter, Schnepel and Steigerwald (2017) on clusters; Tango, "Equivalence test and confidence
interval for the difference in proportions for the paired-sample design" (1998).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    Values = np.ndarray[Any, np.dtype[np.float64]]

ALPHA = 0.05  # of a verdict, after Benjamini-Hochberg over the leaf tasks of a comparison
POWER = 0.8  # with which the detectable difference is seen
FEW = 20  # below so many clusters, or documents without clusters, signs are randomised
LARGEST = 0.5  # share of the documents in one cluster, from which there is no comparison: fewer than four effective ones
HALVINGS = 50  # of an interval's end, to 1e-15

Test = Literal["paired t", "clustered t", "signs"]
Verdict = Literal["better", "worse", "no evidence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Mean over documents of a metric's values less those of the baseline, and what its interval follows from."""

    documents: int
    difference: float  # mean, in the metric's own unit
    stderr: float  # of the mean difference
    degrees: float  # of freedom; one less than the effective number of clusters, or of documents
    span: float  # largest value less the smallest one, of both checkpoints
    gained: int | None  # of a 0/1 metric: documents that went from 0 to 1
    lost: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired(Estimate):
    """A comparison over the documents that both checkpoints have."""

    clusters: int | None  # None: documents are taken as independent
    p: float  # two-sided
    test: Test
    mcnemar: float | None  # two-sided p of the flips


def paired(before: Values, after: Values, clusters: Sequence[Any] | None = None) -> Paired | str:
    """Compare two checkpoints; a text says why they cannot be compared.

    Arrays: a value a document, in the same order, without NaN; `clusters`: its cluster.
    """
    import numpy as np  # noqa: PLC0415 (other commands start without it)
    from scipy import stats  # noqa: PLC0415

    differences = after - before
    count = len(differences)
    if count < 2:
        return "too few documents"
    mean = float(differences.mean())
    if clusters is None:
        sums, parts, degrees = differences, count, float(count - 1)
        variance = float(differences.var(ddof=1)) / count
    else:
        _, groups = np.unique(np.asarray(clusters), return_inverse=True)
        shares = np.bincount(groups) / count
        if shares.max() >= LARGEST:
            return f"one cluster holds {shares.max():.0%} of the documents".replace("%", " %")
        sums, spread = (np.bincount(groups, weights=each) for each in (differences, differences - mean))
        parts, degrees = len(shares), float(1 / (shares @ shares) - 1)
        variance = float((spread**2 / (1 - shares)).sum()) / count**2
    stderr = variance**0.5
    if parts < FEW:
        test: Test = "signs"
        p = _signs(sums)
    else:
        test = "paired t" if clusters is None else "clustered t"
        p = 2 * float(stats.t(degrees).sf(abs(mean) / stderr)) if stderr else float(mean == 0)
    gained, lost, mcnemar = _flips(before, after)
    return Paired(
        documents=count,
        clusters=None if clusters is None else parts,
        difference=mean,
        stderr=stderr,
        degrees=degrees,
        span=float(max(before.max(), after.max()) - min(before.min(), after.min())),
        p=p,
        test=test,
        gained=gained,
        lost=lost,
        mcnemar=mcnemar,
    )


def interval(one: Estimate, confidence: float) -> tuple[float, float]:
    """Return both ends of a difference's interval, each with the one-sided `confidence`.

    Of a 0/1 metric it is Tango's score interval with Student's quantile, which holds for few documents and flips, over as many
    documents as independent ones would have the same error; of another metric Student's. Where no document differs, at
    most so many might in truth that none is seen by chance, each by `span`.
    """
    quantile = _quantile(one.degrees, confidence)
    if one.gained is None or one.lost is None:
        unseen = 1 - (1 - confidence) ** (1 / (one.degrees + 1))
        reach = quantile * one.stderr if one.stderr else one.span * unseen
        return one.difference - reach, one.difference + reach
    count = one.documents
    independent = ((one.gained + one.lost) / count - one.difference**2) / (count - 1)
    alike = max(1.0, one.stderr**2 / independent if independent > 0 else count / (one.degrees + 1))
    flips = one.gained / alike, one.lost / alike
    return _lowest(*flips, count / alike, quantile), -_lowest(*flips[::-1], count / alike, quantile)


def _lowest(gained: float, lost: float, count: float, quantile: float) -> float:
    """Lower end of Tango's interval: the smallest difference whose score is no farther than `quantile` from the one seen."""
    low, high = -1.0, (gained - lost) / count
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slope = gained + lost - middle * (2 * count - gained + lost)
        root = math.sqrt(max(0.0, slope**2 + 8 * count * lost * middle * (1 - middle)))
        flips = (slope + root) / (2 * count) + middle  # share that differs, the likeliest for this difference
        far = (gained - lost - count * middle) ** 2 > quantile**2 * count * (flips - middle**2)
        low, high = (middle, high) if far else (low, middle)
    return low


@lru_cache(maxsize=4096)
def _quantile(degrees: float, confidence: float) -> float:
    from scipy import stats  # noqa: PLC0415

    return float(stats.t(degrees).ppf(confidence))


def _signs(sums: Values) -> float:
    """Two-sided p of the sum among the sums under all signs; fewer than FEW values."""
    import numpy as np  # noqa: PLC0415

    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    flips = (
        np.arange(2 ** (len(sums) - 1))[:, None] >> np.arange(len(sums) - 1) & 1
    )  # the other half is the opposite
    drawn = np.abs(sums[-1] + (1 - 2 * flips) @ sums[:-1])
    rounding = 1e-12 * float(np.abs(sums).sum())
    return float((drawn >= abs(float(sums.sum())) - rounding).mean())


def _flips(before: Values, after: Values) -> tuple[int | None, int | None, float | None]:
    """(gained, lost, McNemar's exact p) of a 0/1 metric; Nones of another."""
    import numpy as np  # noqa: PLC0415
    from scipy import stats  # noqa: PLC0415

    if not all(np.isin(values, (0.0, 1.0)).all() for values in (before, after)):
        return None, None, None
    gained, lost = int((after > before).sum()), int((after < before).sum())
    mcnemar = float(stats.binomtest(gained, gained + lost).pvalue) if gained + lost else 1.0
    return gained, lost, mcnemar


def verdicts(found: Sequence[tuple[Paired, bool]]) -> list[tuple[Verdict, float, float | None]]:
    """(verdict, adjusted p, detectable difference) of each leaf task and metric of a comparison.

    `found`: with "is higher better?". Benjamini-Hochberg: of the verdicts "better" and "worse" at most ALPHA are false, on
    average. The detectable difference is the true one that is found with POWER where no other score has changed, which
    the correction then asks for ALPHA over their number; None where no document differs.
    """
    from scipy import stats  # noqa: PLC0415

    if not found:
        return []
    adjusted = stats.false_discovery_control([one.p for one, _ in found])
    alone = 1 - ALPHA / 2 / len(found)
    said: list[tuple[Verdict, float, float | None]] = []
    for (one, higher), p in zip(found, map(float, adjusted), strict=True):
        better: Verdict = "better" if (one.difference > 0) == higher else "worse"
        seen = (_quantile(one.degrees, alone) + _quantile(one.degrees, POWER)) * one.stderr
        said.append((better if p < ALPHA and one.difference else "no evidence", p, seen or None))
    return said
