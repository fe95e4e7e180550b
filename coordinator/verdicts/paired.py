"""Paired comparison of one metric over the same documents, and what it says in words. Pure.

Rule: one test decides. It is the paired t test; with clusters of documents (several questions of one passage) the t test
of a mean with cluster-robust errors (CR1, G - 1 degrees of freedom); below FEW clusters or documents a randomisation of
signs, which needs no normal distribution. McNemar's exact test is shown beside it and decides nothing. Sources: Miller,
"Adding Error Bars to Evals" (2024); Cameron and Miller, "A Practitioner's Guide to Cluster-Robust Inference" (2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

    Values = np.ndarray[Any, np.dtype[np.float64]]

ALPHA = 0.05  # of a verdict, after Benjamini-Hochberg over the leaf tasks of a comparison
POWER = 0.8  # with which the detectable difference is seen
FEW = 20  # below so many clusters, or documents without clusters, signs are randomised

Test = Literal["paired t", "clustered t", "signs"]
Verdict = Literal["better", "worse", "no evidence"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Values of a metric less those of the baseline, over the documents that both have. In the metric's own unit."""

    documents: int
    clusters: int | None  # None: documents are taken as independent
    difference: float  # mean
    stderr: float  # of the mean difference
    low: float  # 95 % interval
    high: float
    p: float  # two-sided
    test: Test
    detectable: float | None  # smallest true difference that is seen with POWER; None: no document differs
    gained: int | None  # of a 0/1 metric: documents that went from 0 to 1
    lost: int | None
    mcnemar: float | None  # two-sided p of the flips


def paired(before: Values, after: Values, clusters: Sequence[Any] | None = None) -> Paired | None:
    """Compare two checkpoints. Arrays: a value a document, in the same order, without NaN; `clusters`: its cluster.

    None for fewer than two documents, or fewer than two clusters.
    """
    import numpy as np  # noqa: PLC0415 (other commands start without it)
    from scipy import stats  # noqa: PLC0415

    differences = after - before
    count = len(differences)
    if count < 2:
        return None
    mean = float(differences.mean())
    groups = None
    if clusters is None:
        sums, parts = differences, count
        variance = float(differences.var(ddof=1)) / count
    else:
        _, groups = np.unique(np.asarray(clusters), return_inverse=True)
        sums, parts = np.bincount(groups, weights=differences), int(groups.max()) + 1
        if parts < 2:
            return None
        spread = np.bincount(groups, weights=differences - mean)
        variance = parts / (parts - 1) * float(spread @ spread) / count**2
    stderr = variance**0.5
    law = stats.t(parts - 1)
    reach = float(law.ppf(1 - ALPHA / 2)) * stderr
    if parts < FEW:
        test: Test = "signs"
        p = _signs(sums)
    else:
        test = "paired t" if clusters is None else "clustered t"
        p = 2 * float(law.sf(abs(mean) / stderr)) if stderr else float(mean == 0)
    gained, lost, mcnemar = _flips(before, after)
    return Paired(
        documents=count,
        clusters=None if clusters is None else parts,
        difference=mean,
        stderr=stderr,
        low=mean - reach,
        high=mean + reach,
        p=p,
        test=test,
        detectable=(reach + float(law.ppf(POWER)) * stderr) or None,
        gained=gained,
        lost=lost,
        mcnemar=mcnemar,
    )


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


def verdicts(found: Sequence[tuple[Paired, bool]]) -> list[tuple[Verdict, float]]:
    """(verdict, adjusted p) of each leaf task and metric of a comparison. `found`: with "is higher better?".

    Benjamini-Hochberg: of the verdicts "better" and "worse" at most ALPHA are false, on average.
    """
    from scipy import stats  # noqa: PLC0415

    if not found:
        return []
    adjusted = stats.false_discovery_control([one.p for one, _ in found])
    said: list[tuple[Verdict, float]] = []
    for (one, higher), p in zip(found, map(float, adjusted), strict=True):
        better: Verdict = "better" if (one.difference > 0) == higher else "worse"
        said.append((better if p < ALPHA and one.difference else "no evidence", p))
    return said
