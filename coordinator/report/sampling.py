"""A training's series with verdicts, which need the variances of paired differences between its checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from coordinator.config.schema import Config
from coordinator.report.learning_curves import Point, Series, make_series
from coordinator.report.pairs import differences
from coordinator.report.verdicts import judged


def series_of(points: Iterable[Point], settings: Config) -> Series:
    """A training's series, with verdicts."""

    @cache
    def sampling(before: str, after: str) -> Mapping[str, float]:
        found = differences(settings.work_dir, before, after)
        return {name: 0.0 if one is None else one.variance for name, one in found.items()}

    made = make_series(points, settings.gpu_hour_price)
    curves = judged(made.curves, settings.horizon, sampling)
    return made.model_copy(update={"curves": tuple(curves), "horizon": settings.horizon})
