"""Exports scores to TensorBoard, Weights & Biases, MLflow and lm-eval's own files.

Rule: a tracker's package is imported only to write to that tracker; where it is missing, an
OperatorError names the package to install. A second export adds only new points. Called by
`evalspan export` and, in a process of its own, by the daemon (`live`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import OperatorError
from coordinator.report.learning_curves import Point, in_order


class Tracker(Protocol):
    """One run of one suite, written to a folder."""

    def __call__(self, points: Sequence[Point], out: Path, run: str, project: str) -> Path:
        """Write the points of one suite as run `run`; the path that the user opens."""


TRACKERS: Mapping[str, str] = {
    "tensorboard": "coordinator.trackers.tensorboard",
    "wandb": "coordinator.trackers.wandb",
    "mlflow": "coordinator.trackers.mlflow",
}

# usual names of a folder of checkpoints: no name for a run
COMMON = frozenset({"checkpoint", "checkpoints", "ckpt", "ckpts", "snapshots"})


def export_points(
    module: str, points: Iterable[Point], out: Path, *, run: str | None = None, project: str = "evalspan"
) -> list[Path]:
    """Write a tracker run per training and suite; their paths. OperatorError without the package."""
    write: Tracker = importlib.import_module(module).write
    return [write(group, out.absolute(), name, project) for name, group in runs_of(points, run).items()]


def runs_of(points: Iterable[Point], run: str | None = None) -> dict[str, list[Point]]:
    """Points in training order by tracker run: `run` (or the checkpoints' folder) and the suite."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(f"{run or _training(point)}-{point.suite}", []).append(point)
    return {name: in_order(group) for name, group in groups.items()}


def _training(point: Point) -> str:
    """Name of the checkpoints' folder; of its parent where the folder has a usual name."""
    folder = Path(point.checkpoint).parent
    if folder.name.lower() in COMMON and folder.parent.name:
        folder = folder.parent
    return folder.name or "checkpoints"


def values_of(point: Point) -> dict[str, float]:
    """Every number of a point, by its name in all trackers.

    `_differs` is 1 where the point is not comparable with the one before it.
    """
    values = {}
    # modes give other digits: a curve for each
    fast = point.mode == "fast" and not point.suite.endswith("-fast")
    suite = f"{point.suite}-fast" if fast else point.suite
    for score in point.scores:
        values[f"{suite}/{score.name}"] = score.value
        if score.stderr is not None:
            values[f"{suite}/{score.name}_stderr"] = score.stderr
        if score.differs:
            values[f"{suite}/{score.name}_differs"] = 1.0
    for name in ("makespan_seconds", "gpu_seconds", "cost"):
        value = getattr(point, name)
        if value is not None:
            values[f"evalspan/{name}"] = float(value)
    return values


def steps_of(points: Sequence[Point]) -> list[tuple[int, Point]]:
    """(step, point) in order. Step: the training step, else the unix second of acceptance."""
    return sorted(
        ((p.step if p.step is not None else int(p.accepted_at), p) for p in points), key=lambda pair: pair[0]
    )


def need(module: str, package: str, extra: str) -> Any:
    """Import `module`; OperatorError with the pip command where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OperatorError(
            f"{package} is not installed ({error}): pip install 'evalspan[{extra}]' (or pip install {package})"
        ) from error
