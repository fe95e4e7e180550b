"""Documents of a screened task: the order in which they are asked, and what those answered say. Pure.

Rule: everything follows from the suite, the reference's documents, and the documents scored so far, so it can be recomputed at any
time. Called from `coordinator.runtime.screens`, which reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from coordinator.decide.evaluation.records import ScreenScore
from coordinator.decide.verdicts.screening import asking_order, judge_screening, likely_share
from coordinator.errors import OperatorError
from evaljobs.contract.columns import CLUSTER, DOCUMENT, HASH
from evaljobs.contract.specs import Blocks, ScreenOptions, TaskEntry

if TYPE_CHECKING:
    from coordinator.decide.verdicts.paired import Values
    from evaljobs.contract.columns import Columns

MAX_LOOKS = 20  # at the documents of a task
WHOLE_SHARE = 0.75  # likely share of a task's documents above which all are asked, for one look


class ReferenceDocuments(NamedTuple):
    """The reference's documents of one task, and the score to compare."""

    leaves: Mapping[str, Columns]  # leaf task -> columns of its documents
    metric: str  # the first of its scores, as their column
    higher_is_better: bool

    @property
    def documents(self) -> int:
        return sum(len(columns[DOCUMENT]) for columns in self.leaves.values())


def asking_blocks(
    reference: ReferenceDocuments, task: TaskEntry, options: ScreenOptions
) -> dict[str, Blocks]:
    """Return the documents of each leaf task, block by block: one block from each look to the next."""
    rows: list[tuple[str, int]] = []
    strata: list[tuple[str, int]] = []
    for leaf, columns in sorted(reference.leaves.items()):
        rows += [(leaf, int(document)) for document in columns[DOCUMENT]]
        clusters = columns.get(CLUSTER)
        strata += [(leaf, int(c)) for c in (0 * columns[DOCUMENT] if clusters is None else clusters)]
    order, size = asking_order(strata, options.seed), block_size(reference.documents, task, options)
    found: dict[str, list[tuple[int, ...]]] = {leaf: [] for leaf in reference.leaves}
    for begin in range(0, len(rows), size):
        block = defaultdict[str, list[int]](list)
        for number in order[begin : begin + size]:
            leaf, document = rows[number]
            block[leaf].append(document)
        for leaf, blocks in found.items():
            blocks.append(tuple(block[leaf]))
    return {leaf: tuple(blocks) for leaf, blocks in found.items()}


def block_size(count: int, task: TaskEntry, options: ScreenOptions) -> int:
    """Return the documents from one look to the next: all of them if a screen would hardly ask fewer."""
    is_whole = task.judge or likely_share(count, options) > WHOLE_SHARE
    return count if is_whole else ceil(count / MAX_LOOKS)


def judge_documents(
    scored: Mapping[str, Columns], reference: ReferenceDocuments, task: TaskEntry, options: ScreenOptions
) -> tuple[ScreenScore, bool]:
    """Return the estimate and verdict of a task's scored documents, by leaf task, and whether its question is settled.

    Raise OperatorError if they are not documents of the reference.
    """
    import numpy as np  # noqa: PLC0415

    asked = {leaf: columns for leaf, columns in scored.items() if len(columns[DOCUMENT])}
    pairs = [
        _paired_values(f"{task.name}: {leaf}", asked[leaf], theirs, reference.metric)
        for leaf, theirs in reference.leaves.items()
        if leaf in asked
    ]
    if not any(len(pair[0]) for pair in pairs):
        raise OperatorError(f"{task.name}: no document that was asked has a value")
    ours, theirs, clusters = (np.concatenate(values) for values in zip(*pairs, strict=True))
    values = np.concatenate([columns[reference.metric] for columns in reference.leaves.values()])
    known = values[~np.isnan(values)]
    sign, score = 1.0 if reference.higher_is_better else -1.0, float(known.mean())
    answer = judge_screening(
        sign * (ours - theirs),
        max(len(known), len(ours)),
        options,
        apart=block_size(reference.documents, task, options),
        span=max(1.0, float(np.ptp([ours, theirs]))),
        clusters=clusters if task.cluster else None,
    )
    low, high = sorted(score + sign * end for end in (answer.low, answer.high))
    estimate = ScreenScore(
        task=task.name,
        verdict=answer.verdict,
        metric=reference.metric,
        higher_is_better=reference.higher_is_better,
        asked=answer.asked,
        documents=len(known),
        reference=score,
        # of a whole set: the full score to the last digit
        estimate=round(score + sign * answer.difference, 12),
        low=low,
        high=high,
    )
    is_whole = sum(len(columns[DOCUMENT]) for columns in asked.values()) == reference.documents
    return estimate, answer.is_settled or is_whole


def _paired_values(name: str, ours: Columns, theirs: Columns, metric: str) -> tuple[Values, Values, Values]:
    """Return our values and theirs of the documents in `ours` that have both, and the documents' clusters."""
    import numpy as np  # noqa: PLC0415

    _, a, b = np.intersect1d(ours[DOCUMENT], theirs[DOCUMENT], return_indices=True)
    if len(a) < len(ours[DOCUMENT]) or (ours[HASH][a] != theirs[HASH][b]).any():
        raise OperatorError(f"documents of {name} are not those of the reference")
    if metric not in ours:
        raise OperatorError(f"{name} has no {metric} of any document")
    mine, its, clusters = ours[metric][a], theirs[metric][b], theirs.get(CLUSTER, theirs[DOCUMENT])[b]
    whole = ~np.isnan(mine) & ~np.isnan(its)
    return mine[whole], its[whole], clusters[whole]
