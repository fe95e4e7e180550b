"""Scores into the trackers that a team looks at: TensorBoard, Weights & Biases, MLflow, and lm-eval's own files.

Rule: a tracker's package is imported when it is written to and never before; without it the operator is told what to
install. An export is a function of the points: doing it again adds what is new and doubles nothing.
It does not know: evaluations, journals.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from coordinator.errors import OperatorError
from coordinator.report.learning_curves import Point


class Tracker(Protocol):
    """One run of one suite, written to a folder."""

    def __call__(self, points: Sequence[Point], out: Path, run: str, project: str) -> Path:
        """Write the points of one suite as run `run`; what was written, for the user to open."""


TRACKERS: Mapping[str, str] = {
    "tensorboard": "coordinator.trackers.tensorboard",
    "wandb": "coordinator.trackers.wandb",
    "mlflow": "coordinator.trackers.mlflow",
}

# what trainings call the folder of their checkpoints: no name for a run
COMMON = frozenset({"checkpoint", "checkpoints", "ckpt", "ckpts"})


def export_points(
    module: str, points: Iterable[Point], out: Path, *, run: str | None = None, project: str = "evalspan"
) -> list[Path]:
    """A tracker run per folder of checkpoints and suite; what was written. OperatorError where the package is missing."""
    write: Tracker = importlib.import_module(module).write
    return [write(group, out.absolute(), name, project) for name, group in runs_of(points, run).items()]


def runs_of(points: Iterable[Point], run: str | None = None) -> dict[str, list[Point]]:
    """Points by the tracker's run that shows them: `run` or the folder of the checkpoints, and the suite."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(f"{run or _training(point)}-{point.suite}", []).append(point)
    return groups


def _training(point: Point) -> str:
    """The checkpoints' folder; the one above it where every training calls it alike."""
    folder = Path(point.checkpoint).parent
    if folder.name.lower() in COMMON and folder.parent.name:
        folder = folder.parent
    return folder.name or "checkpoints"


def values_of(point: Point) -> dict[str, float]:
    """Every number of a point under the name that all trackers show it by."""
    values = {}
    for score in point.scores:
        values[f"{point.suite}/{score.name}"] = score.value
        if score.stderr is not None:
            values[f"{point.suite}/{score.name}_stderr"] = score.stderr
    for name in ("makespan_seconds", "gpu_seconds", "cost"):
        value = getattr(point, name)
        if value is not None:
            values[f"evalspan/{name}"] = float(value)
    return values


def steps_of(points: Sequence[Point]) -> list[tuple[int, Point]]:
    """Points in order, with the step to show each at: its training step; where none is known, the unix second of its
    acceptance, which is the same in every export.
    """
    return sorted(
        ((p.step if p.step is not None else int(p.accepted_at), p) for p in points), key=lambda pair: pair[0]
    )


def need(module: str, package: str, extra: str) -> Any:
    """The imported module, or an operator's error that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OperatorError(
            f"{package} is not installed ({error}): pip install 'evalspan[{extra}]' (or pip install {package})"
        ) from error
