"""Which waiting checkpoints are not worth evaluating any more. Pure.

Rule: only evaluations that nothing has been started for are dropped, and each drop is told with its reason; a series
is the checkpoints of one folder under one suite.
It does not know: how an evaluation is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An evaluation in a series. `order`: its step, or its age where steps are unknown."""

    evaluation_id: str
    series: str
    order: float
    started: bool


def stale(waiting: Iterable[Waiting], policy: Literal["all", "latest"] | int) -> dict[str, str]:
    """Evaluation ids to drop, with the reason. policy k > 0: keep every k-th of a series, and always the newest."""
    if policy == "all":
        return {}
    series: dict[str, list[Waiting]] = defaultdict(list)
    for item in waiting:
        series[item.series].append(item)
    dropped: dict[str, str] = {}
    for items in series.values():
        items.sort(key=lambda w: (w.order, w.evaluation_id))
        newest = items[-1]
        for number, item in enumerate(items):
            kept = isinstance(policy, int) and number % policy == 0
            if not item.started and item is not newest and not kept:
                dropped[item.evaluation_id] = (
                    f"stale: {newest.evaluation_id} is newer, and nothing had been started for this one"
                )
    return dropped
