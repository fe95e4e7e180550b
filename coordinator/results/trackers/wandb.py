"""Scores as a Weights & Biases run.

Rule: offline unless $WANDB_MODE is set, since nodes often have no internet; `wandb sync` sends the
run later. The run's id is a function of project and run name, so a later export or sync continues
it. Each value carries its own x axis, `training_step`, because W&B's step counts calls and must not
go back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from coordinator.results.trackers import Row, import_package

STEP = "training_step"


def run_id(project: str, run: str) -> str:
    """Return the run's id, a function of project and run name."""
    return hashlib.sha256(f"{project}\0{run}".encode()).hexdigest()[:16]


def _mark(row: Row) -> str:
    """Return a digest that changes with the scores: a retry of failed tasks adds some."""
    digest = hashlib.sha256(repr(sorted(row.values.items())).encode()).hexdigest()[:8]
    return f"{row.evaluation_id}/{digest}"


def write_points(rows: Sequence[Row], out: Path, run: str, project: str) -> Path:
    """Write an offline run below `out/wandb`, or one on the server with WANDB_MODE=online, and return its folder."""
    wandb = import_package("wandb", "wandb", "wandb")
    started = wandb.init(
        project=project,
        name=run,
        id=run_id(project, run),
        resume="allow",
        dir=str(out),
        mode=os.environ.get("WANDB_MODE", "offline"),
        # W&B's service may answer slowly on a busy node
        settings=wandb.Settings(silent=True, console="off", x_disable_meta=True, x_service_wait=180.0),
    )
    started.define_metric(STEP)
    started.define_metric("*", step_metric=STEP)
    for row in rows:
        key = f"evaluations/{row.step}"
        if started.summary.get(key) != _mark(row):  # the server does not have them yet
            started.log({STEP: row.step, **row.values})
            started.summary[key] = _mark(row)
    folder = Path(started.dir).parent
    started.finish()
    wandb.teardown()  # W&B's service writes an offline run's last records at its end
    return folder
