"""The data of a page over checkpoints: learning curves, tasks by checkpoints, costs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from coordinator.report.learning_curves import Curve, Series, labels, top_groups
from coordinator.report.training import Training, clauses, drops_of
from coordinator.report.verdicts import ALONG

POINT = (
    "evaluation_id", "label", "step", "status", "mode", "accepted_at", "makespan_seconds", "gpu_seconds", "slot", "cost",
)  # fmt: skip


def training_data(found: Iterable[tuple[Training, Series]]) -> dict[str, Any]:
    """`found`: of each training how it stands, and its series with verdicts."""
    made = sorted(found, key=lambda one: (one[0].folder, one[0].suite, one[0].mode))
    names = short_names([training.folder for training, _ in made])
    return {"kind": "training", "trainings": [_training(names[t.folder], t, series) for t, series in made]}


def shown(training: Training) -> dict[str, Any]:
    """How it stands, for pages: clauses, and what fell."""
    drops = [{"name": d.name, "words": d.words, "evaluation": d.evaluation_id} for d in training.drops]
    return {
        "clauses": [clause._asdict() for clause in clauses(training)],
        "drops": drops,
        "judged": training.judged,
    }


def short_names(folders: Sequence[str]) -> dict[str, str]:
    """Folder -> the shortest end of its path, of two parts or more, that is unique among them."""
    folders = list(dict.fromkeys(folders))
    for length in range(2, max((len(PurePosixPath(f).parts) for f in folders), default=1) + 1):
        ends = {f: "/".join(PurePosixPath(f).parts[-length:]) for f in folders}
        if len(set(ends.values())) == len(folders):
            return ends
    return {f: f for f in folders}


def _training(name: str, training: Training, series: Series) -> dict[str, Any]:
    places = {label: i for i, label in enumerate(labels(series.points))}
    groups = max(series.points, key=lambda p: (bool(p.scores), p.accepted_at)).groups
    return {
        "name": name,
        "folder": training.folder,
        "suite": training.suite if training.mode == "exact" else f"{training.suite}, {training.mode} mode",
        **shown(training),
        "superseded": series.superseded,
        "along": ALONG.format(horizon=series.horizon),
        "points": [{name: getattr(point, name) for name in POINT} for point in series.points],
        "curves": [_columns(curve, places) for curve in (*series.means, *series.curves)],
        "groups": list(top_groups(groups).items()),
    }


def _columns(curve: Curve, places: Mapping[str, int]) -> dict[str, Any]:
    """Columns of a curve. `at`: places of its points in the training, None: all; `marks`: place on the curve -> "!" shows a drop,
    "~" is not comparable, "↓" begins a drop; `drops`: with places on the curve; `documents`: one number where all are alike.
    """
    at, documents = [places[p.label] for p in curve.points], [p.documents for p in curve.points]
    place = {p.label: i for i, p in enumerate(curve.points)}
    drops = [
        {
            "at": place[drop.label],
            "since": place[drop.worse.since],
            "before": _short(drop.worse.mean, 6),
            "after": _short(drop.after, 6),
            "words": drop.words,
        }
        for drop in drops_of(curve)
    ]
    begun = {drop["since"] for drop in drops}
    marks = [
        "!" if p.worse else "~" if p.differs else "↓" if i in begun else ""
        for i, p in enumerate(curve.points)
    ]
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
        "drops": drops,
        "best": curve.points.index(curve.best),
        "documents": documents[0] if len({*documents}) == 1 else documents,
    }


def _short(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")
