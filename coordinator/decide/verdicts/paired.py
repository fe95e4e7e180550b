"""Paired comparison of one metric over the same documents, and its description. Pure.

Rule: one test decides. It is the paired t test; with clusters of documents (several questions of one passage) the t test of a
mean with cluster-robust errors (CR2, with the degrees of freedom of the effective number of clusters); below FEW clusters or
documents a randomisation of signs, which does not assume a normal distribution. McNemar's exact test is only shown beside it.
All margins come from one function, `confidence_interval`. Sources: Miller, "Adding Error Bars to Evals" (2024); Bell and McCaffrey
(2002) and Carter, Schnepel and Steigerwald (2017) on clusters; Tango, "Equivalence test and confidence interval for the
difference in proportions for the paired-sample design" (1998).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Values = np.ndarray[Any, np.dtype[np.float64]]

ALPHA = 0.05  # of a verdict, after Benjamini-Hochberg over the leaf tasks of a comparison
POWER = 0.8  # of the detectable difference
FEW_CLUSTERS = 20  # with fewer clusters, or documents without clusters, signs are randomised
# largest cluster's share of the documents that can be compared: beyond it, fewer than four effective clusters
MAX_CLUSTER_SHARE = 0.5
INTERVAL_HALVINGS = 50  # of an interval's end, to 1e-15

Verdict = Literal["better", "worse", "no evidence"]


class Paired(NamedTuple):
    """Mean difference of a metric's values from the baseline's over documents, with the data for its test and interval."""

    documents: int  # common to both checkpoints
    difference: float  # mean, in the metric's own unit
    variance: float  # of the mean difference
    degrees: float  # of freedom; the effective number of clusters, or of documents, minus one
    span: float  # largest minus smallest value of both checkpoints
    gained: int | None  # of a 0/1 metric: documents that went from 0 to 1
    lost: int | None
    clusters: int | None = None  # None: documents are taken as independent
    signs: float | None = None  # two-sided p under all signs, if that is the test
    tasks: int | None = None  # number of tasks averaged; None: a single task

    @property
    def stderr(self) -> float:
        """Standard error of the mean difference."""
        return math.sqrt(self.variance)

    @property
    def test(self) -> str:
        """Name of the test: paired t | clustered t | signs | pooled t."""
        if self.signs is not None:
            return "signs"
        return (
            "pooled t" if self.tasks is not None else "paired t" if self.clusters is None else "clustered t"
        )

    @property
    def p(self) -> float:
        """Two-sided p, from Student's distribution unless from signs."""
        from scipy import special  # noqa: PLC0415 (other commands start without it)

        if self.signs is not None:
            return self.signs
        if not self.variance:
            return float(self.difference == 0)
        return 2 * float(special.stdtr(self.degrees, -abs(self.difference) / self.stderr))

    @property
    def mcnemar(self) -> float | None:
        """Two-sided p of the flips."""
        from scipy import special  # noqa: PLC0415

        if self.gained is None or self.lost is None or self.tasks is not None:
            return None
        flips = self.gained + self.lost
        return min(1.0, 2 * float(special.bdtr(min(self.gained, self.lost), flips, 0.5))) if flips else 1.0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Paired:
        """Rebuild the comparison from `facts`, without its signs."""
        known = {name: facts[name] for name in cls._fields if name in facts}
        return cls(**known, variance=facts["stderr"] ** 2)

    def facts(self) -> dict[str, Any]:
        """Fields for JSON."""
        known = {name: value for name, value in self._asdict().items() if name not in ("variance", "signs")}
        if self.tasks is None:
            del known["tasks"]
        return {**known, **{name: getattr(self, name) for name in ("stderr", "p", "test", "mcnemar")}}


def compare_paired(before: Values, after: Values, clusters: Sequence[Any] | None = None) -> Paired | str:
    """Compare two checkpoints, or return why they cannot be compared.

    Arrays: one value per document, in the same order, without NaN; `clusters`: its cluster.
    """
    import numpy as np  # noqa: PLC0415 (other commands start without it)

    differences = after - before
    count = len(differences)
    if count < 2:
        return "too few documents"
    mean = float(differences.mean())
    if clusters is None:
        sums, degrees = differences, float(count - 1)
        variance = float(differences.var(ddof=1)) / count
    else:
        _, groups = np.unique(np.asarray(clusters), return_inverse=True)
        shares = np.bincount(groups) / count
        if shares.max() >= MAX_CLUSTER_SHARE:
            return f"one cluster holds {shares.max():.0%} of the documents".replace("%", " %")
        sums, spread = (np.bincount(groups, weights=each) for each in (differences, differences - mean))
        degrees = float(1 / (shares @ shares) - 1)
        variance = float((spread**2 / (1 - shares)).sum()) / count**2
    gained = lost = None
    if all(np.isin(values, (0.0, 1.0)).all() for values in (before, after)):
        gained, lost = int((after > before).sum()), int((after < before).sum())
    span = float(max(before.max(), after.max()) - min(before.min(), after.min()))
    signs = _signs(sums) if len(sums) < FEW_CLUSTERS else None
    number = None if clusters is None else len(sums)
    return Paired(count, mean, variance, degrees, span, gained, lost, number, signs)


def pool_differences(parts: Sequence[Paired], weights: Sequence[float] | None = None) -> Paired:
    """Compare the mean of several tasks' scores, given at least one difference in `parts`.

    `weights`: of the tasks in the mean, with sum 1; None: equal. Tasks are independent, so variances add up, and the degrees
    of freedom follow Welch and Satterthwaite.
    """
    shares = [1 / len(parts)] * len(parts) if weights is None else weights
    errors = [w**2 * one.variance for w, one in zip(shares, parts, strict=True)]
    difference = sum(w * one.difference for w, one in zip(shares, parts, strict=True))
    variance = sum(errors)
    spread = sum(e**2 / one.degrees for e, one in zip(errors, parts, strict=True))
    degrees = variance**2 / spread if spread else sum(one.degrees for one in parts)
    flips = [(one.gained, one.lost) for one in parts if one.gained is not None and one.lost is not None]
    return Paired(
        documents=sum(one.documents for one in parts),
        difference=difference,
        variance=variance,
        degrees=degrees,
        span=1.0,
        gained=sum(up for up, _ in flips) if flips else None,
        lost=sum(down for _, down in flips) if flips else None,
        tasks=len(parts),
    )


def confidence_interval(one: Paired, confidence: float) -> tuple[float, float]:
    """Return both ends of a difference's interval, each with the one-sided `confidence`.

    For 0/1 metrics, Tango's score interval with Student's quantile, which holds for few documents and flips, using the number
    of independent documents with the same standard error; otherwise Student's interval. If no document differs, the ends
    assume the most differing documents, each by `span`, of which chance would still show none.
    """
    quantile = _quantile(one.degrees, confidence)
    if one.gained is None or one.lost is None or one.tasks is not None:
        unseen = 1 - (1 - confidence) ** (1 / (one.degrees + 1))
        reach = quantile * one.stderr if one.stderr else one.span * unseen
        return one.difference - reach, one.difference + reach
    count = one.documents
    independent = ((one.gained + one.lost) / count - one.difference**2) / (count - 1)
    alike = max(1.0, one.stderr**2 / independent if independent > 0 else count / (one.degrees + 1))
    flips = one.gained / alike, one.lost / alike
    return _lowest(*flips, count / alike, quantile), -_lowest(*flips[::-1], count / alike, quantile)


def _lowest(gained: float, lost: float, count: float, quantile: float) -> float:
    """Return the lower end of Tango's interval: the smallest difference whose score is within `quantile` of the observed one."""
    low, high = -1.0, (gained - lost) / count
    for _ in range(INTERVAL_HALVINGS):
        middle = (low + high) / 2
        slope = gained + lost - middle * (2 * count - gained + lost)
        root = math.sqrt(max(0.0, slope**2 + 8 * count * lost * middle * (1 - middle)))
        # likeliest share of differing documents for this difference
        flips = (slope + root) / (2 * count) + middle
        far = (gained - lost - count * middle) ** 2 > quantile**2 * count * (flips - middle**2)
        low, high = (middle, high) if far else (low, middle)
    return low


@lru_cache(maxsize=4096)
def _quantile(degrees: float, confidence: float) -> float:
    from scipy import special  # noqa: PLC0415

    return float(special.stdtrit(degrees, confidence))


def _signs(sums: Values) -> float:
    """Two-sided p of the sum among the sums under all signs; fewer than FEW values."""
    import numpy as np  # noqa: PLC0415

    sums = sums[sums != 0]
    if not len(sums):
        return 1.0
    flips = (
        np.arange(2 ** (len(sums) - 1))[:, None] >> np.arange(len(sums) - 1) & 1
    )  # the other half is symmetric
    drawn = np.abs(sums[-1] + (1 - 2 * flips) @ sums[:-1])
    rounding = 1e-12 * float(np.abs(sums).sum())
    return float((drawn >= abs(float(sums.sum())) - rounding).mean())


def adjusted_verdicts(found: Sequence[tuple[Paired, bool]]) -> list[tuple[Verdict, float, float | None]]:
    """Return (verdict, adjusted p, detectable difference) of each leaf task and metric of a comparison.

    `found`: with whether higher is better. Benjamini-Hochberg: on average at most ALPHA of the verdicts "better" and "worse"
    are false. The detectable difference is the true one that is found with POWER if no other score has changed, for which the
    correction requires ALPHA over their number; None if no document differs.
    """
    adjusted: dict[int, float] = {}
    every, least = [one.p for one, _ in found], 1.0
    for rank, i in sorted(enumerate(sorted(range(len(every)), key=every.__getitem__), 1), reverse=True):
        adjusted[i] = least = min(least, every[i] * len(every) / rank)
    alone = 1 - ALPHA / 2 / max(1, len(found))
    said: list[tuple[Verdict, float, float | None]] = []
    for i, (one, higher) in enumerate(found):
        p = adjusted[i]
        better: Verdict = "better" if (one.difference > 0) == higher else "worse"
        seen = (_quantile(one.degrees, alone) + _quantile(one.degrees, POWER)) * one.stderr
        said.append((better if p < ALPHA and one.difference else "no evidence", p, seen or None))
    return said
