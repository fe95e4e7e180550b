"""Points as a Weights & Biases run.

Rule: offline unless $WANDB_MODE says otherwise, since compute and login nodes often have no internet: `wandb sync`
sends the run later. The run's id is a function of project and run name, so a later export or sync continues it; each
value carries its own x axis, `training_step`, because W&B's step counts calls and must not go back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from coordinator.report.learning_curves import Point
from coordinator.trackers import need, steps_of, values_of

STEP = "training_step"


def run_id(project: str, run: str) -> str:
    """The same for the same project and run."""
    return hashlib.sha256(f"{project}\0{run}".encode()).hexdigest()[:16]


def _mark(point: Point) -> str:
    """Changes where the point does: an evaluation whose failed tasks were tried again has more scores."""
    digest = hashlib.sha256(repr(sorted(values_of(point).items())).encode()).hexdigest()[:8]
    return f"{point.evaluation_id}/{digest}"


def write(points: Sequence[Point], out: Path, run: str, project: str) -> Path:
    """An offline run below `out/wandb`, or one on the server with WANDB_MODE=online; its folder."""
    wandb = need("wandb", "wandb", "wandb")
    started = wandb.init(
        project=project,
        name=run,
        id=run_id(project, run),
        resume="allow",
        dir=str(out),
        mode=os.environ.get("WANDB_MODE", "offline"),
        # its service may take long to answer on a busy node
        settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, x_service_wait=180.0),
    )
    started.define_metric(STEP)
    started.define_metric("*", step_metric=STEP)
    for step, point in steps_of(points):
        told = f"evaluations/{step}"
        if started.summary.get(told) == _mark(point):
            continue  # the server has it: a run that goes on online is not told it twice
        started.log({STEP: step, **values_of(point)})
        started.summary[told] = _mark(point)
    folder = Path(started.dir).parent
    started.finish()
    wandb.teardown()  # its service writes an offline run's last records when it ends
    return folder
