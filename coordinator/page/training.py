"""The data of a page over checkpoints: learning curves, tasks by checkpoints, costs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.report.comparisons import since
from coordinator.report.learning_curves import Curve, Point, Series, labels, make_series
from coordinator.report.verdicts import ALONG

POINT_COLUMNS = (
    "evaluation_id", "label", "step", "status", "mode", "accepted_at", "makespan_seconds", "gpu_seconds", "cost",
)  # fmt: skip


def training_data(
    points: Sequence[Point], make: Callable[[list[Point]], Series] = make_series
) -> dict[str, Any]:
    """All points, by training (the checkpoints' folder) and suite. `make`: the series of one of them."""
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        groups[str(PurePosixPath(point.checkpoint).parent), point.suite].append(point)
    names = short_names([folder for folder, _ in groups])
    made = [
        _training(names[folder], folder, suite, make(each))
        for (folder, suite), each in sorted(groups.items())
    ]
    return {"kind": "training", "trainings": made}


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Folder -> the shortest end of its path that is unique among them."""
    folders = list(dict.fromkeys(folders))
    for length in range(1, max((len(PurePosixPath(f).parts) for f in folders), default=1) + 1):
        ends = {f: "/".join(PurePosixPath(f).parts[-length:]) for f in folders}
        if len(set(ends.values())) == len(folders):
            return ends
    return {f: f for f in folders}


def _training(name: str, folder: str, suite: str, series: Series) -> dict[str, Any]:
    places = {label: i for i, label in enumerate(labels(series.points))}
    return {
        "name": name,
        "folder": folder,
        "suite": suite,
        "superseded": series.superseded,
        "along": ALONG.format(horizon=series.horizon),
        "points": [[getattr(point, column) for column in POINT_COLUMNS] for point in series.points],
        "curves": [_columns(curve, places) for curve in series.curves],
    }


def _columns(curve: Curve, places: Mapping[str, int]) -> dict[str, Any]:
    """Columns of a curve. `at`: places of its points in the training; `marks`: "!" is worse, "~" not comparable. `worse`:
    (place on the curve, what is said).
    """
    return {
        "task": curve.task,
        "measure": curve.measure,
        "up": curve.higher_is_better,
        "at": [places[p.label] for p in curve.points],
        "value": [_short(p.value) for p in curve.points],
        "stderr": [None if p.stderr is None else _short(p.stderr) for p in curve.points],
        "marks": ["!" if p.worse else "~" if p.differs else "" for p in curve.points],
        "yardstick": [None if p.yardstick is None else _short(p.yardstick) for p in curve.points],
        "mean": [None if p.mean_before is None else _short(p.mean_before) for p in curve.points],
        "worse": [[i, since(p.worse)] for i, p in enumerate(curve.points) if p.worse],
        "best": curve.points.index(curve.best),
        "documents": [p.documents for p in curve.points],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")
