"""Scores as an MLflow run.

Rule: writes to a file store in the output folder (`mlflow ui --backend-store-uri OUT`), or to the
server of $MLFLOW_TRACKING_URI. A later export finds the run by its tag and logs no value twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.results.trackers import Row, import_package

TAG = "evalspan.run"


def write_points(rows: Sequence[Row], out: Path, run: str, project: str) -> Path:
    """Write one run of experiment `project`, and return the store's folder."""
    # MLflow 3 requires this for a file store, the only store without a database.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client_module = import_package("mlflow.tracking", "mlflow-skinny", "mlflow")
    entities = import_package("mlflow.entities", "mlflow-skinny", "mlflow")
    client = client_module.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or out.as_uri())
    experiment = client.get_experiment_by_name(project)
    experiment_id = experiment.experiment_id if experiment is not None else client.create_experiment(project)
    run_id = _run(client, experiment_id, run)
    there: dict[str, set[int]] = {}
    for row in rows:
        fresh = []
        for name, value in row.values.items():
            key = re.sub(r"[^A-Za-z0-9_\-. /]", "-", name)
            if key not in there:
                there[key] = {m.step for m in client.get_metric_history(run_id, key)}
            if row.step not in there[key]:
                fresh.append(entities.Metric(key, value, int(row.ended_at * 1000), row.step))
        client.log_batch(run_id, metrics=fresh)
    client.set_terminated(run_id)
    return out


def _run(client: Any, experiment_id: str, run: str) -> str:
    """Return the id of the run of this name, creating it if necessary."""
    quoted = run.replace("'", "")
    found = client.search_runs([experiment_id], f"tags.`{TAG}` = '{quoted}'", max_results=1)
    if found:
        return str(found[0].info.run_id)
    return str(client.create_run(experiment_id, tags={TAG: quoted}, run_name=run).info.run_id)
