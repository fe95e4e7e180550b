"""Which waiting checkpoints are not worth evaluating any more. Pure.

Rule: only evaluations that nothing has been started for are dropped, and each drop is told with its reason; a series
is the checkpoints of one folder under one suite, and which of it are kept goes by all that were ever seen, so that
dropping one changes nothing for the others.
It does not know: how an evaluation is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An evaluation in a series. `order`: its step (when it came, where steps are unknown), then when it came. "over": ended or
    cancelled.
    """

    evaluation_id: str
    series: str
    order: tuple[float, float]
    phase: Literal["waiting", "started", "over"]


def stale(seen: Iterable[Seen], keep_every: int | None) -> dict[str, str]:
    """Evaluation ids to drop, with the reason: of each series those that wait but the newest and, with `keep_every` = k, every
    k-th from its first on.
    """
    series: dict[str, list[Seen]] = defaultdict(list)
    for item in seen:
        series[item.series].append(item)
    dropped: dict[str, str] = {}
    for items in series.values():
        items.sort(key=lambda s: (s.order, s.evaluation_id))
        newest = next((s for s in reversed(items) if s.phase != "over"), None)
        for number, item in enumerate(items):
            kept = keep_every is not None and number % keep_every == 0
            if newest is not None and item.phase == "waiting" and item is not newest and not kept:
                dropped[item.evaluation_id] = (
                    f"stale: {newest.evaluation_id} is newer, and nothing had been started for this one"
                )
    return dropped
