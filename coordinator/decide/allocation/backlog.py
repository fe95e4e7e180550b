"""Selects waiting checkpoints to drop as stale, for `backlog = "latest"`. Pure. Called by the service.

Rule: only evaluations without any started job are dropped, each with its reason. A series is the checkpoints of one folder
under one suite.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesMember:
    """An evaluation in a series. "over": ended or cancelled."""

    evaluation_id: str
    series: str
    order: tuple[float, float]  # (step, otherwise arrival; arrival)
    phase: Literal["waiting", "started", "over"]


def stale_evaluations(seen: Collection[SeriesMember]) -> dict[str, str]:
    """Return evaluation id -> why to drop it: of each series' waiting evaluations, only the newest open one is kept."""
    open_ones = [one for one in seen if one.phase != "over"]
    open_ones.sort(key=lambda one: (one.order, one.evaluation_id))
    newest = {one.series: one.evaluation_id for one in open_ones}
    return {
        one.evaluation_id: f"stale: {name} is newer, and this evaluation had not started"
        for one in open_ones
        if one.phase == "waiting" and (name := newest[one.series]) != one.evaluation_id
    }
