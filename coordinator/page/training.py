"""The data of a page over checkpoints: learning curves, tasks by checkpoints, costs. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.report.comparisons import fallen
from coordinator.report.learning_curves import Curve, Point, Series, labels, make_series
from coordinator.report.verdicts import ALONG

POINT_COLUMNS = (
    "evaluation_id", "label", "step", "status", "mode", "accepted_at", "makespan_seconds", "gpu_seconds", "cost",
)  # fmt: skip


Groups = Mapping[str, Sequence[str]]
"""Group of a suite -> names of the tasks and groups below it."""


def training_data(
    points: Sequence[Point],
    make: Callable[[list[Point]], Series] = make_series,
    groups: Callable[[Sequence[Point]], Groups] = lambda _: {},
) -> dict[str, Any]:
    """All points, by training (the checkpoints' folder) and suite. `make`, `groups`: of one of them."""
    found: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        found[str(PurePosixPath(point.checkpoint).parent), point.suite].append(point)
    names = short_names([folder for folder, _ in found])
    made = [
        _training(names[folder], folder, suite, make(each)) | {"groups": list(groups(each).items())}
        for (folder, suite), each in sorted(found.items())
    ]
    return {"kind": "training", "trainings": made}


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Folder -> the shortest end of its path, of two parts or more, that is unique among them."""
    folders = list(dict.fromkeys(folders))
    for length in range(2, max((len(PurePosixPath(f).parts) for f in folders), default=1) + 1):
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
    """Columns of a curve. `at`: places of its points in the training, None: all; `marks`: place on the curve -> "!" is worse,
    "~" not comparable; `worse`: (place on the curve, what is said); `documents`: one number where all are alike.
    """
    at, documents = [places[p.label] for p in curve.points], [p.documents for p in curve.points]
    marks = ["!" if p.worse else "~" if p.differs else "" for p in curve.points]
    return {
        "task": curve.task,
        "measure": curve.measure,
        "up": curve.higher_is_better,
        "at": None if at == list(range(len(places))) else at,
        "value": [_short(p.value, 6) for p in curve.points],
        "stderr": [_short(p.stderr) for p in curve.points],
        "marks": {i: mark for i, mark in enumerate(marks) if mark},
        "yardstick": [_short(p.yardstick) for p in curve.points],
        "mean": [_short(p.mean_before) for p in curve.points],
        "worse": [[i, fallen(p.worse, p)] for i, p in enumerate(curve.points) if p.worse],
        "best": curve.points.index(curve.best),
        "documents": documents[0] if len({*documents}) == 1 else documents,
    }


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
