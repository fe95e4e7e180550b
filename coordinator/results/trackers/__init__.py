"""Exports scores to TensorBoard, Weights & Biases, MLflow and lm-eval's own files.

Rule: a tracker's package is only imported to write to that tracker; if it is missing, an OperatorError names the package to
install. A second export only adds new points. Called by `evalspan export` and, in a separate process, by the daemon (`live`).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from coordinator.errors import OperatorError
from coordinator.results.report.learning_curves import in_order
from coordinator.results.report.scores import Evaluation
from evaljobs.contract.columns import DENSE


class Row(NamedTuple):
    """Values of one evaluation for every tracker."""

    evaluation_id: str
    step: int  # of training; otherwise the unix second of acceptance
    ended_at: float  # unix seconds
    values: dict[str, float]  # every number, by its name in all trackers


class Tracker(Protocol):
    """One run of one suite, written to a folder."""

    def __call__(self, rows: Sequence[Row], out: Path, run: str, project: str) -> Path:
        """Write the rows of one suite, in step order, as run `run`, and return the path to open."""


TRACKERS: Mapping[str, str] = {
    "tensorboard": "coordinator.results.trackers.tensorboard",
    "wandb": "coordinator.results.trackers.wandb",
    "mlflow": "coordinator.results.trackers.mlflow",
}

# usual names of a checkpoint folder, unsuitable as names of runs
COMMON_FOLDER_NAMES = frozenset({"checkpoint", "checkpoints", "ckpt", "ckpts", "snapshots"})


def export_points(
    module: str, points: Iterable[Evaluation], out: Path, *, run: str | None = None, project: str = "evalspan"
) -> list[Path]:
    """Write a tracker run per training and suite, and return their paths. Raise OperatorError without the package."""
    write: Tracker = importlib.import_module(module).write_points
    return [write(rows, out.absolute(), name, project) for name, rows in runs_of(points, run).items()]


def runs_of(points: Iterable[Evaluation], run: str | None = None) -> dict[str, list[Row]]:
    """Return rows by tracker run: `run` (or the checkpoints' folder) and the suite."""
    groups: dict[str, list[Evaluation]] = {}
    for point in points:
        groups.setdefault(run_of(point, run), []).append(point)
    return {
        name: sorted(map(_row, in_order(group)), key=lambda row: row.step) for name, group in groups.items()
    }


def _row(point: Evaluation) -> Row:
    step = point.step if point.step is not None else int(point.accepted_at)
    return Row(point.evaluation_id, step, point.ended_at, values_of(point))


def run_of(point: Evaluation, run: str | None = None) -> str:
    """Return `run` and the suite; by default the checkpoints' folder, or its parent if the folder has a usual name."""
    folder = Path(point.checkpoint).parent
    if folder.name.lower() in COMMON_FOLDER_NAMES and folder.parent.name:
        folder = folder.parent
    return f"{run or folder.name or 'checkpoints'}-{point.suite}"


def values_of(point: Evaluation) -> dict[str, float]:
    """Return every number of a point, by its name in all trackers.

    `_differs` is 1 if the point is not comparable with the previous one.
    """
    values = {}
    # modes give different digits: one curve for each
    fast = point.mode == "fast" and not point.suite.endswith("-fast")
    suite = f"{point.suite}-fast" if fast else point.suite
    for score in point.scores:
        # in a separate section, so that trackers show the other curves first
        name = (
            f"dense/{suite}/{score.task}/{score.metric}" if score.filter == DENSE else f"{suite}/{score.name}"
        )
        values[name] = score.value
        if score.stderr is not None:
            values[f"{name}_stderr"] = score.stderr
        if score.differs:
            values[f"{name}_differs"] = 1.0
    for name in ("makespan_seconds", "gpu_seconds", "cost"):
        value = getattr(point, name)
        if value is not None:
            values[f"evalspan/{name}"] = float(value)
    return values


def import_package(module: str, package: str, extra: str) -> Any:
    """Import `module`. Raise OperatorError with the pip command if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise OperatorError(
            f"{package} is not installed ({error}): pip install 'evalspan[{extra}]' (or pip install {package})"
        ) from error
