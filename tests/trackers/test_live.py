"""Laws of the live export: each ended evaluation reaches its trackers once, and a failure never
disturbs the daemon.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.trainings import leave, results

from coordinator.config.schema import Config, TrackersConfig
from coordinator.trackers import TRACKERS, live, runs_of
from evaljobs.contract.paths import EvaluationPaths

# A tracker of three functions in a file: what was written to it can be read back.
ADAPTER = """
import json, os
def write(points, out, run, project):
    mode = (out / "mode").read_text() if (out / "mode").exists() else ""
    if mode == "raise":
        raise RuntimeError("the server said no")
    if mode == "exit":
        raise SystemExit("the package left")
    if mode == "die":
        os._exit(11)
    with (out / f"{run}.jsonl").open("a") as file:
        file.write(json.dumps([[p.step, p.cost, [s.value for s in p.scores]] for p in points]) + "\\n")
    return out
"""


@pytest.fixture
def job(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> live.Job:
    """The work folder of a training (two ended checkpoints, one that runs) and of another."""
    (tmp_path / "plain_tracker.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(live, "TRACKERS", {"plain": "plain_tracker"})
    out = tmp_path / "out"
    out.mkdir()
    target = live.Target(tracker="plain", out=str(out), project="p")
    return live.Job(work_dir=str(work), targets=(target,), gpu_hour_price=2.0)


def written(job: live.Job, run: str = "a-mini") -> list[Any]:
    file = Path(job.targets[0].out) / f"{run}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def mode(job: live.Job, text: str) -> None:
    (Path(job.targets[0].out) / "mode").write_text(text)


def failures(work: Path, step: int) -> dict[str, str]:
    return live.failures(EvaluationPaths(work / f"step-{step}-mini-{step:08d}"))


def test_an_ended_evaluation_is_written_at_its_step_once(job, work):
    """Scores and cost, by training; a second call writes none; a new end writes the run."""
    assert live.export_left(job) == []
    assert written(job) == [[[10, 2.0, [0.2, 9.8]], [20, 2.0, [0.6, 9.4]]]]
    assert [row[0][0] for row in written(job, "b-mini")] == [5]
    assert live.export_left(job) == []
    assert len(written(job)) == 1
    leave(work, 40, 0.7)
    live.export_left(job)
    assert [[p[0] for p in run] for run in written(job)] == [[10, 20], [10, 20, 40]]
    assert len(written(job, "b-mini")) == 1, "the other training had everything"


def test_results_that_changed_are_written_again(job, work):
    """A retry that scored a failed task is exported."""
    live.export_left(job)
    file = EvaluationPaths(work / "step-20-mini-00000020").results
    file.write_text(json.dumps(results(0.65)))
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    live.export_left(job)
    assert written(job)[-1][1][2][0] == 0.65


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_tracker_that_fails_is_reported_and_tried_again(job, work, how):
    """Each missing evaluation has the reason, until a later export succeeds."""
    mode(job, how)
    assert len(live.export_left(job)) == 2
    assert "the server said no" in failures(work, 10)["plain"] or how == "exit"
    assert failures(work, 10)
    assert not failures(work, 30), "it still runs"
    mode(job, "")
    assert live.export_left(job) == []
    assert not failures(work, 10)
    assert len(written(job)) == 1


def test_a_tracker_that_takes_its_process_down_is_reported(job, work):
    """The attempt is noted before the tracker runs, so the next export reports and repeats it."""
    mode(job, "die")
    pid = os.fork()
    if pid == 0:
        try:
            live.export_left(job)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 11
    assert any(failures(work, step) == {"plain": live.CUT_SHORT} for step in (5, 10))
    mode(job, "")
    assert live.export_left(job) == []
    assert written(job)
    assert not failures(work, 10)


def test_a_damaged_evaluation_does_not_keep_the_others_back(job, work):
    """Half a report is skipped."""
    EvaluationPaths(work / "step-10-mini-00000010").report.write_text("{")
    assert live.export_left(job) == []
    assert [p[0] for p in written(job)[-1]] == [20]


def test_the_daemons_side_begins_a_process_and_never_raises(work, tmp_path, monkeypatch, caplog):
    """At its start and when asked; a missing package or no process at all is a warning."""
    section = TrackersConfig(mlflow_uri=(tmp_path / "ml").as_uri())
    exporter = live.Exporter(Config(work_dir=work, trackers=section))
    exporter.job = exporter.job.model_copy(
        update={"targets": (live.Target(tracker="unknown", out=str(tmp_path / "o"), project="p"),)}
    )
    assert exporter.busy
    end = time.monotonic() + 120
    while exporter.busy:
        exporter.tick()
        assert time.monotonic() < end
        time.sleep(0.02)
    assert "unknown" in failures(work, 10)
    assert "not everything is in the trackers" in caplog.text
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    exporter.ask()
    exporter.tick()
    assert not exporter.busy
    assert "no-python" in caplog.text


def test_without_trackers_there_is_no_process(work):
    """Nothing in [trackers]: never busy, no folder made."""
    exporter = live.Exporter(Config(work_dir=work))
    exporter.ask()
    exporter.tick()
    assert not exporter.busy
    assert not (work / live.FOLDER).exists()


def test_settings_name_their_trackers(tmp_path):
    """Each with its target and its package's settings."""
    section = TrackersConfig(
        tensorboard_dir=tmp_path / "tb", wandb_project="w", wandb_mode="online", mlflow_uri="http://h:1"
    )
    job = live.job_of(Config(work_dir=tmp_path, trackers=section))
    assert {t.tracker: (t.project, t.env) for t in job.targets} == {
        "tensorboard": ("", {}),
        "wandb": ("w", {"WANDB_MODE": "online"}),
        "mlflow": ("evalspan", {"MLFLOW_TRACKING_URI": "http://h:1"}),
    }
    assert {t.tracker for t in job.targets} == set(TRACKERS)


def test_a_common_folder_name_is_no_name_of_a_run():
    """Trainings whose folder is `checkpoints` are named by the folder above."""
    from support.trainings import point

    names = runs_of([point(1, 0.1, checkpoint=f"/runs/{t}/checkpoints/step-1") for t in ("a", "b")])
    assert list(names) == ["a-mini", "b-mini"]


def test_real_trackers_get_each_evaluation_once(work, tmp_path, monkeypatch):
    """TensorBoard's, W&B's and MLflow's own files, from the process that the daemon starts."""
    for package in ("tensorboard", "wandb", "mlflow"):
        pytest.importorskip(package)
    from mlflow.tracking import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    section = TrackersConfig(
        tensorboard_dir=tmp_path / "tb", wandb_project="w", mlflow_uri=(tmp_path / "ml").as_uri()
    )
    config = Config(work_dir=work, trackers=section, gpu_hour_price=2.0)
    for value in (None, 0.7):  # a second daemon, after one more evaluation has ended
        if value is not None:
            leave(work, 40, value)
        live.Exporter(config).finish(120)
    assert not failures(work, 10)
    assert not failures(work, 40)
    read = EventAccumulator(str(tmp_path / "tb" / "a-mini"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("evalspan/cost")] == [(10, 2.0), (20, 2.0), (40, 2.0)]
    client = MlflowClient(tracking_uri=section.mlflow_uri)
    experiment = client.get_experiment_by_name("evalspan")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'a-mini'")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "mini/add/exact_match")] == [
        10,
        20,
        40,
    ]
    assert len(list((work / live.FOLDER / "wandb").glob("offline-run-*"))) == 3
