"""A retry after `prune`: what lacks its score is built, asked and scored again, and what has one keeps it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from support.toys import TASKS, config_text
from typer.testing import CliRunner

import evalspan
from coordinator.cli import app
from coordinator.config.schema import RetentionConfig
from coordinator.keeping.prune import prune_now
from coordinator.runtime.journal import read_events
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.model

FAILING = """
include: {base}
task: {name}
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


@pytest.mark.parametrize("base", ["choice.yaml", "programs.yaml"])
def test_a_retry_whose_responses_are_gone_runs_its_shards_once_and_scores(
    toy_model: Path, tmp_path: Path, base: str
) -> None:
    """Also its request sets are gone, and verdicts of its programs; a task that was scored is not run again."""
    tasks, mended = tmp_path / "tasks", tmp_path / "mended"
    tasks.mkdir()
    (tasks / "failing.yaml").write_text(FAILING.format(base=TASKS / base, name="failing"))
    (tasks / "metric.py").write_text(METRIC.format(mended=str(mended)))
    settings, suite = tmp_path / "evalspan.toml", tmp_path / "own.toml"
    settings.write_text(f'work_dir = "work"\n{config_text()}')
    suite.write_text(
        f'name = "own"\ninclude_path = ["{tasks}", "{TASKS}"]\nbatch_size = 8\n'
        '[[task]]\nname = "toy_choice"\nlimit = 6\n[[task]]\nname = "failing"\nlimit = 6\n'
    )
    first = evalspan.evaluate(toy_model, suite=suite, config=settings)
    assert first.failed.keys() == {"failing"}
    work = WorkPaths(first.folder.parent)
    prune_now(work, RetentionConfig(keep="scores", older_than="0h"), time.time(), code=None)
    assert not [*first.folder.glob("responses*"), *work.request_sets.iterdir()]
    mended.touch()
    before = len(list(read_events(first.folder / "journal.jsonl")))
    done = CliRunner().invoke(app, ["retry", first.evaluation_id, "--config", str(settings)])
    assert done.exit_code == 0, done.output
    again = evalspan.results(first.evaluation_id, config=settings)
    assert again.status == "done"
    assert [v for name, v in again.raw["results"]["failing"].items() if name.startswith("acc,")] == [1.0]
    assert again.raw["results"]["toy_choice"] == first.raw["results"]["toy_choice"]
    assert again.raw["evalspan"]["keys"].keys() == {"failing", "toy_choice"}
    events = list(read_events(first.folder / "journal.jsonl"))[before:]
    trials = [e for e in events if e.kind == "job-intended" and e.job.purpose == "trial"]
    assert len(trials) == 1, "the model was loaded again"
    dumped = [shard for e in events if e.kind == "shards-dumped" for shard, _ in e.shards]
    assert len(dumped) == len(set(dumped))
    assert {shard.partition("|")[0] for shard in dumped} == {"failing"}
    assert json.loads((first.folder / "results.json").read_text())["evalspan"]["failed_entries"] == []
