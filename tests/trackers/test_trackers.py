"""Laws of trackers: a tracker's own reader finds each score once, at the training step, also by the live export, whose failures never
disturb the daemon.

Each runs with the real package, and is skipped by name where that is not installed.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from support.trainings import leave, point, results, two_trainings

from coordinator.results.trackers import TRACKERS, export_points, live, lm_eval_files, runs_of
from coordinator.site.config.schema import Config, TrackersConfig
from evaljobs.contract.paths import EvaluationPaths

POINTS = [point(10, 0.2), point(20, 0.6)]


def test_a_point_of_other_requests_carries_a_mark_in_all_trackers():
    """`_differs` is 1 where a run's point is not comparable with the one before, whatever the order given."""

    def keyed(step, key):
        made = point(step, 0.5)
        return made.model_copy(update={"scores": (made.scores[0]._replace(keys=(key, "s")),)})

    (rows,) = runs_of([keyed(30, "b"), keyed(10, "a"), keyed(20, "b")]).values()
    assert [(r.step, r.values.get("mini/add/exact_match_differs")) for r in rows] == [
        (10, None),
        (20, 1.0),
        (30, None),
    ]


def test_tensorboard_reads_the_scores_back(tmp_path):
    """Each value once, at its training step. Exporting one step leaves the other files untouched; a changed point replaces
    its own.
    """
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def exported(*points):
        (folder,) = export_points(TRACKERS["tensorboard"], points, tmp_path)
        read = EventAccumulator(str(folder))
        read.Reload()
        scalars = read.Scalars("mini/add/exact_match")
        assert scalars[0].wall_time == 1_700_000_070.0, "when its evaluation ended"
        files = {f.name: f.stat().st_mtime_ns for f in folder.iterdir()}
        return [(e.step, round(e.value, 6)) for e in scalars], files

    exported(POINTS[0])
    shown, before = exported(*POINTS)
    assert shown == [(10, 0.2), (20, 0.6)]
    assert exported(*POINTS) == exported(POINTS[1]) == (shown, before), "nothing new, nothing written"
    shown, files = exported(point(30, 0.7))
    assert shown == [(10, 0.2), (20, 0.6), (30, 0.7)]
    assert before.items() <= files.items()
    assert sorted(exported(point(20, 0.5))[0]) == [(10, 0.2), (20, 0.5), (30, 0.7)]
    exported(point(None, float("nan")))
    shown, _ = exported(point(None, float("nan")))
    assert [step for step, _ in shown].count(1_700_000_000) == 1


def test_lm_evals_own_helpers_read_our_files(tmp_path):
    """Names, dates and hashes as lm_eval makes them; a second export writes the same files. An answer may hold any character."""
    utils = pytest.importorskip("lm_eval.utils")
    paths = leave(tmp_path / "work", 10, 0.25)
    for file in paths.samples.iterdir():
        file.write_text(file.read_text().replace('"1"', '"1\u2028\x852"'))
    written = lm_eval_files.write_lm_eval_files(paths.root, tmp_path / "out")
    assert lm_eval_files.write_lm_eval_files(paths.root, tmp_path / "out") == written
    names = [str(p) for p in (tmp_path / "out" / "__runs__a__step-10").iterdir()]
    (samples,) = utils.get_sample_results_filenames(names)
    (result,) = utils.get_results_filenames(names)
    assert utils.get_file_task_name(Path(samples).name) == "add"
    assert f"results_{utils.get_file_datetime(samples)}.json" == Path(result).name
    assert utils.get_latest_filename([result]) == result
    read = json.loads((written[-1]).read_text())
    assert read["results"]["add"]["exact_match,none"] == 0.25
    assert read["task_hashes"] == {"add": utils.hash_string("abc")}
    assert read["model_name_sanitized"] == utils.sanitize_model_name("/runs/a/step-10")


def test_a_checkpoints_tokenizer_is_described_as_by_lm_eval(tmp_path):
    """Tokens with their ids, the longest context, the chat template; empty where the checkpoint is
    gone.
    """
    assert lm_eval_files.tokenizer_facts(tmp_path) == {}
    assert lm_eval_files.chat_template(tmp_path) is None
    settings = {
        "eos_token": {"content": "<end>"},
        "bos_token": "<begin>",
        "pad_token": None,
        "chat_template": "{{a}}",
    }
    tokens = [{"id": 7, "content": "<end>"}, {"id": 3, "content": "<begin>"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    assert lm_eval_files.tokenizer_facts(tmp_path) == {
        "tokenizer_eos_token": ["<end>", "7"],
        "tokenizer_bos_token": ["<begin>", "3"],
        "eot_token_id": 7,
        "max_length": 512,
    }
    assert lm_eval_files.chat_template(tmp_path) == "{{a}}"
    (tmp_path / "chat_template.jinja").write_text("{{b}}")
    assert lm_eval_files.chat_template(tmp_path) == "{{b}}", "transformers prefers the file"


# A tracker of one function in a file: what was written to it can be read back.
ADAPTER = """
import json, os
def write_points(rows, out, run, project):
    mode = (out / "mode").read_text() if (out / "mode").exists() else ""
    if mode == "raise":
        raise RuntimeError("the server said no")
    if mode == "exit":
        raise SystemExit("the package left")
    if mode == "die":
        os._exit(11)
    names = ("evalspan/cost", "mini/add/exact_match", "mini/pages/word_perplexity")
    with (out / f"{run}.jsonl").open("a") as file:
        file.write(json.dumps([[r.step, *(r.values[name] for name in names)] for r in rows]) + "\\n")
    return out
"""


@pytest.fixture
def work(tmp_path):
    return two_trainings(tmp_path / "work")


@pytest.fixture
def config(work, tmp_path, monkeypatch):
    """The work folder of a training (two ended checkpoints, one that runs) and of another, with one tracker."""
    (tmp_path / "plain_tracker.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(live, "TRACKERS", {"plain": "plain_tracker"})
    monkeypatch.setattr(live, "targets_of", lambda _: [live.Target("plain", tmp_path / "out", "p", {})])
    return Config(work_dir=work, gpu_hour_price=2.0)


def written(tmp_path, run="a-mini"):
    file = tmp_path / "out" / f"{run}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def failures(work, step):
    return live.tracker_failures(EvaluationPaths(work / f"step-{step}-mini-{step:08d}"))


def test_an_ended_evaluation_is_written_at_its_step_once(config, work, tmp_path):
    """Scores and cost, by training; a second call writes none; a new end, or a retry that scored more, writes the run."""
    assert live.export_left(config) == []
    assert written(tmp_path) == [[[10, 2.0, 0.2, 9.8], [20, 2.0, 0.6, 9.4]]]
    assert [row[0][0] for row in written(tmp_path, "b-mini")] == [5]
    assert live.export_left(config) == []
    assert len(written(tmp_path)) == 1
    leave(work, 40, 0.7)
    live.export_left(config)
    assert [[p[0] for p in run] for run in written(tmp_path)] == [[10, 20], [10, 20, 40]]
    file = EvaluationPaths(work / "step-20-mini-00000020").results
    file.write_text(json.dumps(results(0.65)))
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    live.export_left(config)
    assert written(tmp_path)[-1][1][2] == 0.65
    assert len(written(tmp_path, "b-mini")) == 1, "the other training had everything"


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [("raise", 2, "the server said no"), ("exit", 2, "the package left"), ("die", 11, live.CUT_SHORT)],
)
def test_a_tracker_that_fails_is_reported_and_tried_again(config, tmp_path, how, status, reason):
    """Each missing evaluation has the reason, also where the tracker takes its process down, until a later export succeeds."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mode").write_text(how)
    pid = os.fork()
    if pid == 0:
        os._exit(len(live.export_left(config)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
    assert any(reason in failures(config.work_dir, step).get("plain", "") for step in (5, 10))
    assert not failures(config.work_dir, 30), "it still runs"
    (tmp_path / "out" / "mode").unlink()
    assert live.export_left(config) == []
    assert not failures(config.work_dir, 10)
    assert len(written(tmp_path)) == 1


def test_a_damaged_evaluation_does_not_keep_the_others_back(config, work, tmp_path):
    """Half a report is skipped."""
    EvaluationPaths(work / "step-10-mini-00000010").report.write_text("{")
    assert live.export_left(config) == []
    assert [p[0] for p in written(tmp_path)[-1]] == [20]


def test_the_daemons_side_begins_a_process_and_never_raises(work, tmp_path, monkeypatch, caplog):
    """At its start and when asked; a missing package or no process at all is a warning. None without trackers."""
    idle = live.Exporter(Config(work_dir=work))
    idle.ask()
    idle.tick()
    assert not idle.busy
    assert not (work / live.FOLDER).exists()
    (tmp_path / "mlflow.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    section = TrackersConfig(mlflow_uri=(tmp_path / "ml").as_uri())
    exporter = live.Exporter(Config(work_dir=work, trackers=section))
    assert exporter.busy
    exporter.finish(400)
    assert "pip install" in failures(work, 10)["mlflow"]
    assert "some results are missing from the trackers" in caplog.text
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    exporter.ask()
    exporter.tick()
    assert not exporter.busy
    assert "no-python" in caplog.text


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
        live.Exporter(config).finish(400)
    assert not failures(work, 10)
    assert not failures(work, 40)
    read = EventAccumulator(str(tmp_path / "tb" / "a-mini"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("evalspan/cost")] == [(10, 2.0), (20, 2.0), (40, 2.0)]
    client = MlflowClient(tracking_uri=section.mlflow_uri)
    experiment = client.get_experiment_by_name("evalspan")
    (run,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'a-mini'")
    history = client.get_metric_history(run.info.run_id, "mini/add/exact_match")
    assert [(m.step, m.value) for m in history] == [(10, 0.2), (20, 0.6), (40, 0.7)]
    assert run.info.status == "FINISHED"
    assert len(list((work / live.FOLDER / "wandb").glob("offline-run-*"))) == 3
