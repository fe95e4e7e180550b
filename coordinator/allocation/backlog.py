"""Selects waiting checkpoints to drop as stale, for the setting `backlog`. Pure. Called by the service.

Rule: only evaluations without any started job are dropped, each with its reason. A series is the
checkpoints of one folder under one suite. All checkpoints ever seen count, so that a drop does not
change the choice among the others; of those that are over, their places in the series are all that is kept.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Order = tuple[float, float]  # (step, else arrival; arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An evaluation in a series. "over": ended or cancelled."""

    evaluation_id: str
    series: str
    order: Order
    phase: Literal["waiting", "started", "over"]


class Past:
    """Places of evaluations that are over, by series: two numbers for each."""

    def __init__(self) -> None:
        self.orders: dict[str, list[Order]] = defaultdict(list)

    def add(self, one: Seen) -> None:
        """Take in an evaluation that is over; a second time it changes nothing."""
        orders = self.orders[one.series]
        if not _holds(orders, one.order):
            insort(orders, one.order)


def stale(
    seen: Iterable[Seen], keep_every: int | None, past: Mapping[str, Sequence[Order]] | None = None
) -> dict[str, str]:
    """Evaluation id -> why to drop it. `past`: `Past.orders` of evaluations that `seen` need not name.

    Of each series' waiting evaluations the newest stays and, with `keep_every` = k, every k-th from
    the series' first on.
    """
    series: dict[str, list[Seen]] = defaultdict(list)
    for item in seen:
        series[item.series].append(item)
    dropped: dict[str, str] = {}
    for name, items in series.items():
        items.sort(key=lambda s: (s.order, s.evaluation_id))
        newest = next((s for s in reversed(items) if s.phase != "over"), None)
        over = (past or {}).get(name, ())
        before = 0  # of `items`, those that `over` lacks
        for item in items:
            kept = keep_every is not None and (before + bisect_left(over, item.order)) % keep_every == 0
            before += not _holds(over, item.order)
            if newest is not None and item.phase == "waiting" and item is not newest and not kept:
                dropped[item.evaluation_id] = (
                    f"stale: {newest.evaluation_id} is newer, and nothing had been started for this one"
                )
    return dropped


def _holds(orders: Sequence[Order], order: Order) -> bool:
    place = bisect_left(orders, order)
    return place < len(orders) and orders[place] == order
