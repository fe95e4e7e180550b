"""Commands, later evaluations and a retry on one whose files are archived or pruned: they find what they found before."""

import json
import time

import pytest
from support.commands import typed
from support.toys import TASKS, config_text

import evalspan
from coordinator.operations.keeping.archive import FOLDERS, archive_ended
from coordinator.operations.keeping.prune import prune_now, read_work_folder
from coordinator.runtime.journal import read_events
from coordinator.site.config.schema import RetentionConfig
from evaljobs.contract.archived_files import files_in
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

pytestmark = pytest.mark.model

FAILING = """
include: {base}
task: failing_{name}
process_results: !function metric.scored
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
METRIC = """
from pathlib import Path


def scored(doc, results):
    assert Path({mended!r}).exists(), "the metric is broken"
    return {{"acc": 1.0}}
"""
FAILS = {"failing_choice", "failing_programs"}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "evalspan.toml").write_text(f'work_dir = "work"\n{config_text()}')
    return tmp_path / "evalspan.toml"


def prune(work):
    prune_now(work, RetentionConfig(keep="scores", older_than="0h"), time.time(), code=None)


def test_what_reads_an_evaluation_finds_the_same_once_it_is_archived(toy_model, tmp_path, settings, caplog):
    """Results, report, logs and lm-eval's files; and an evaluation of more tasks uses its responses and scores again.
    Pruned to its scores, it has the same results and report.
    """
    more = {"include_path": TASKS, "batch_size": 8, "limit": 8, "config": settings}
    first = evalspan.evaluate(toy_model, tasks="toy_choice,toy_programs", **more)
    name, paths = first.evaluation_id, EvaluationPaths(first.folder)

    def shown(*arguments):
        return typed(*arguments, "--config", settings).output

    def views():
        found = evalspan.results(name, config=settings)
        return [found.raw, found.rows(), found.report, json.loads(shown("report", name, "--json"))]

    def files(out):
        shown("export", name, "--to", "lm-eval", "--out", str(out))
        found = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*.json*")}
        return found, shown("logs", name)

    before = views(), files(tmp_path / "before")
    assert any("samples_toy_choice" in file for file in before[1][0])
    assert archive_ended(paths, most=0)
    assert not any((paths.root / each).exists() for each in FOLDERS)
    assert (views(), files(tmp_path / "after")) == before
    log = next(line.partition(":")[0] for line in before[1][1].splitlines() if "trial" in line)
    assert f"/{log}" in shown("logs", name, log.removesuffix(".log"))
    second = evalspan.evaluate(toy_model, tasks="toy_choice,toy_programs,toy_pages", **more)
    assert second.complete
    used = second.raw["evalspan"]["responses_from"]
    assert used == {"toy_choice": name, "toy_programs": name}
    assert {k: v for k, v in second.raw["results"].items() if k in used} == first.raw["results"]
    (found,) = [e for e in read_events(second.folder / "journal.jsonl") if e.kind == "responses-found"]
    assert len(found.scores) == 2, "neither is scored again"
    samples = next((second.folder / "samples").glob("samples_toy_choice*")).read_text()
    assert json.loads(samples.splitlines()[0])
    work = WorkPaths(first.folder.parent)
    sets = {evaluation.evaluation_id: evaluation.sets for evaluation in read_work_folder(work).evaluations}
    assert sets[name] < sets[second.evaluation_id] == {folder.name for folder in work.request_sets.iterdir()}
    prune(work)
    assert not [*files_in(paths.responses), *files_in(paths.samples), *work.request_sets.iterdir()]
    assert views() == before[0]
    assert "no longer has logs" in str(typed("logs", name, "--config", settings, code=1).exception)
    assert not [record for record in caplog.records if "lacks the times" in record.message]


def test_a_retry_whose_responses_are_gone_runs_its_shards_once_and_scores(toy_model, tmp_path, settings):
    """What lacks its score is built, asked and scored again: also its request sets are gone, and verdicts of its programs. A task
    that was scored keeps its score and is not run again.
    """
    tasks, mended, suite = tmp_path / "tasks", tmp_path / "mended", tmp_path / "own.toml"
    tasks.mkdir()
    rows = ["toy_choice", *sorted(FAILS)]
    for name in ("choice", "programs"):
        yaml = FAILING.format(base=TASKS / f"{name}.yaml", name=name)
        (tasks / f"failing_{name}.yaml").write_text(yaml)
    (tasks / "metric.py").write_text(METRIC.format(mended=str(mended)))
    suite.write_text(
        f'name = "own"\ninclude_path = ["{tasks}", "{TASKS}"]\nbatch_size = 8\n'
        + "".join(f'[[task]]\nname = "{name}"\nlimit = 6\n' for name in rows)
    )
    first = evalspan.evaluate(toy_model, suite=suite, config=settings)
    assert first.failed.keys() == FAILS
    work, journal = WorkPaths(first.folder.parent), first.folder / "journal.jsonl"
    prune(work)
    assert not [*first.folder.glob("responses*"), *work.request_sets.iterdir()]
    mended.touch()
    before = len(list(read_events(journal)))
    typed("retry", first.evaluation_id, "--config", settings)
    again = evalspan.results(first.evaluation_id, config=settings)
    assert again.status == "done"
    results = again.raw["results"]
    for name in FAILS:
        assert [value for key, value in results[name].items() if key.startswith("acc,")] == [1.0]
    assert results["toy_choice"] == first.raw["results"]["toy_choice"]
    assert again.raw["evalspan"]["keys"].keys() == {*rows}
    assert again.raw["evalspan"]["failed_entries"] == []
    events = list(read_events(journal))[before:]
    trials = [e for e in events if e.kind == "job-intended" and e.job.purpose == "trial"]
    assert len(trials) == 1, "the model was loaded again"
    dumped = [shard for e in events if e.kind == "shards-dumped" for shard, _ in e.shards]
    assert len(dumped) == len(set(dumped))
    assert {shard.partition("|")[0] for shard in dumped} == FAILS
