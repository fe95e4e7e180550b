"""The data of a page over checkpoints: learning curves, tasks by checkpoints, costs; and of a comparison. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.report.learning_curves import Point, Series, make_series


def training_data(points: Sequence[Point], price: float | None = None) -> dict[str, Any]:
    """All points, by training (the checkpoints' folder) and suite. `price`: of a GPU hour, any currency."""
    groups: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        groups[str(PurePosixPath(point.checkpoint).parent), point.suite].append(point)
    names = short_names([folder for folder, _ in groups])
    made = [
        _training(names[folder], folder, suite, make_series(each, price))
        for (folder, suite), each in sorted(groups.items())
    ]
    return {"kind": "training", "trainings": made, "price": price}


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Folder -> the shortest end of its path that is unique among them."""
    folders = list(dict.fromkeys(folders))
    for length in range(1, max((len(PurePosixPath(f).parts) for f in folders), default=1) + 1):
        ends = {f: "/".join(PurePosixPath(f).parts[-length:]) for f in folders}
        if len(set(ends.values())) == len(folders):
            return ends
    return {f: f for f in folders}


def _training(name: str, folder: str, suite: str, series: Series) -> dict[str, Any]:
    places = {p.evaluation_id: i for i, p in enumerate(series.points)}
    return {
        "name": name,
        "folder": folder,
        "suite": suite,
        "superseded": series.superseded,
        "points": [
            [
                p.evaluation_id,
                p.label,
                p.step,
                p.status,
                p.mode,
                p.accepted_at,
                p.makespan_seconds,
                p.gpu_seconds,
                p.cost,
            ]
            for p in series.points
        ],
        "curves": [
            {
                "task": curve[0].task,
                "measure": curve[0].measure,
                "up": curve[-1].higher_is_better,
                **_columns(at, curve),
            }
            for at, curve in _by_score(series, places)
        ],
    }


def _by_score(series: Series, places: Mapping[str, int]) -> list[tuple[list[int], list[Any]]]:
    found: dict[str, tuple[list[int], list[Any]]] = {}
    for point in series.points:
        for score in point.scores:
            at, row = found.setdefault(score.name, ([], []))
            at.append(places[point.evaluation_id])
            row.append(score)
    return list(found.values())


def _columns(at: list[int], row: Sequence[Any]) -> dict[str, list[Any]]:
    """Columns of a curve; `at`: places of its points in the training. `marks`: "!" a regression, "~" not comparable."""
    return {
        "at": at,
        "value": [_short(s.value) for s in row],
        "stderr": [None if s.stderr is None else _short(s.stderr) for s in row],
        "marks": ["!" if s.regressed else "~" if s.differs else "" for s in row],
        "documents": [s.documents for s in row],
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def comparison_data(
    heads: Sequence[str], ids: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """`heads`, `ids`: of the evaluations compared; `rows`: of `comparisons.comparison`."""
    return {"kind": "comparison", "heads": list(heads), "ids": list(ids), "rows": [dict(row) for row in rows]}
