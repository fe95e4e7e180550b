"""Evaluations of one training as they lie in a work folder, and their points."""

import json

from coordinator.decide.evaluation.records import EvaluationRecord, RunOptions
from coordinator.results.report import pairs
from coordinator.results.report.comparisons import comparison_rows
from coordinator.results.report.load_series import make_evaluation
from coordinator.results.report.measurements import UNMEASURED, Report
from coordinator.results.report.row_verdicts import add_verdicts
from coordinator.results.report.scores import Evaluation, scores_of
from evaljobs.contract.columns import Documents, pack_columns, unpack_columns
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import CheckpointSpec, ModelOptions, SuiteSpec, TaskEntry


def results(value, stderr=0.01, **more):
    """lm-eval's results of two tasks, one of them better when lower."""
    add = {"exact_match,none": value, "exact_match_stderr,none": stderr}
    pages = {"word_perplexity,none": 10 - value, "word_perplexity_stderr,none": "N/A"}
    return {
        "results": {"add": {"alias": "add", **add}, "pages": {"alias": "pages", **pages}},
        "higher_is_better": {"add": {"exact_match": True}, "pages": {"word_perplexity": False}},
        "n-samples": {"add": {"original": 100, "effective": 100}},
        "configs": {"add": {"task": "add"}, "pages": {"task": "pages"}},
        "config": {"model": "hf", "model_args": {}},
        **more,
    }


def point(step, value, stderr=0.01, **more):
    known = {
        "evaluation_id": f"step-{step}-mini-0000000{(step or 0) % 10}",
        "checkpoint": f"/runs/a/step-{step}",
        "accepted_at": 1_700_000_000.0 + (step or 0),
        "scores": scores_of(results(value, stderr)),
    }
    known |= {
        "suite": "mini",
        "step": step,
        "status": "done",
        "makespan_seconds": 60.0,
        "gpu_seconds": 1800.0,
    }
    return Evaluation(**{**known, **more})


def compared(*columns, documents, **more):
    """Rows with verdicts of these results; `documents`: (number of the results, leaf task) -> its columns, or None."""
    every = []
    for i, one in enumerate(columns):
        head = {"evaluation_id": f"e-{i}", "mode": one.get("evalspan", {}).get("mode", "exact")}
        made = make_evaluation(head, one, None)
        leaves = dict.fromkeys(score.task for score in made.scores if score.task not in made.groups)
        parts = {(0, task): found for task in leaves if (found := documents(i, task)) is not None}
        every.append(
            pairs.Evaluated(made, unpack_columns(pack_columns(parts), "") if parts else Documents({}, {}))
        )
    rows = comparison_rows([one.evaluation for one in every], dense=True)
    add_verdicts(rows, [pairs.compare_evaluated(every[0], one) for one in every[1:]], **more)
    return rows


def leave(work, step, value, parent="/runs/a", suite="mini", *, mode=None, at=0):
    """Write an evaluation's record, and its results and report unless `value` is None (it runs). `at`: accepted later."""
    record = EvaluationRecord(
        evaluation_id=f"step-{step}-{suite}-{at or step:08d}",
        checkpoint=CheckpointSpec(source=f"{parent}/step-{step}", digest="d", files=(), step=step),
        suite=SuiteSpec(name=suite, tasks=(TaskEntry(name="add"),), mode=mode),
        model=ModelOptions(),
        options=RunOptions(),
        accepted_at=1_700_000_000.0 + (at or step),
    )
    paths = EvaluationPaths(work / record.evaluation_id)
    for folder in paths.folders():
        folder.mkdir(parents=True)
    paths.evaluation.write_text(record.model_dump_json())
    if value is None:
        return paths
    known = {"evaluation_id": record.evaluation_id, "checkpoint": record.checkpoint.source, "step": step}
    known |= {"makespan_seconds": 90.0, "gpu_seconds": 3600.0, "gpu_busy_fraction": 0.5, "suite": suite}
    known |= {"status": "done", "accepted_at": record.accepted_at, "entries": (), "warnings": ()}
    report = Report(**UNMEASURED | known)
    paths.report.write_text(report.model_dump_json())
    sample = {"doc_id": 0, "doc_hash": "a", "prompt_hash": "b", "target_hash": "c", "resps": [["1"]]}
    (paths.samples / "samples_add_000.jsonl").write_text(json.dumps(sample) + "\n")
    paths.results.write_text(json.dumps(results(value)))
    return paths


def two_trainings(folder):
    """Three checkpoints of /runs/a (the last one still runs) and one of another training, in a work folder as evalspan makes it."""
    folder.mkdir(mode=0o700)
    (folder / "daemon.lock").touch()
    leave(folder, 10, 0.2)
    leave(folder, 20, 0.6)
    leave(folder, 30, None)
    leave(folder, 5, 0.9, parent="/runs/b")
    return folder
