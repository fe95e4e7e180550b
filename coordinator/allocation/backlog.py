"""Selects waiting checkpoints to drop as stale, for the setting `backlog`. Pure. Called by the service.

Rule: only evaluations without any started job are dropped, each with its reason. A series is the
checkpoints of one folder under one suite. All checkpoints ever seen count, so that a drop does not
change the choice among the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An evaluation in a series. `order`: (step, else arrival; arrival). "over": ended or cancelled."""

    evaluation_id: str
    series: str
    order: tuple[float, float]
    phase: Literal["waiting", "started", "over"]


def stale(seen: Iterable[Seen], keep_every: int | None) -> dict[str, str]:
    """Evaluation id -> why to drop it.

    Of each series' waiting evaluations the newest stays and, with `keep_every` = k, every k-th from
    the series' first on.
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
