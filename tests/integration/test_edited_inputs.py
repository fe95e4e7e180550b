"""`evalspan eval` after edits of a suite: scores of what is on disk, and GPUs only where requests changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.model

TASK = """# a task
task: mine
custom_dataset: !function load.rows
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: ["no", "yes"]
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
LOAD = """import datasets


def rows(**_):
    return {"test": datasets.Dataset.from_list([{"q": f"the river {i} breaks", "a": i % 2} for i in range(8)])}
"""


def told(site: Any, *options: str) -> tuple[float, str, set[str], str]:
    """Accuracy, id, kinds of jobs that ran in its folder, and what was said."""
    done = site.run(site.evaluate(*options))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    name = results["evalspan"]["evaluation_id"]
    logs = {p.name.split("-")[2] for p in (site.work / name / "logs").iterdir()}
    return results["results"]["mine"]["acc,none"], name, logs, done.stderr


@pytest.mark.timeout(900)  # six evaluations
def test_scores_are_of_what_is_on_disk_and_gpus_run_for_new_requests_alone(local_site: Any) -> None:
    site = local_site
    tasks = Path(site.folder) / "mine"
    tasks.mkdir()
    (tasks / "mine.yaml").write_text(TASK)
    (tasks / "load.py").write_text(LOAD)
    site.suite.write_text('name = "mine"\ninclude_path = ["mine"]\nbatch_size = 4\n[[task]]\nname = "mine"\n')
    first, name, jobs, _ = told(site)
    assert "trial" in jobs

    os.utime(tasks / "mine.yaml")
    again, same, _, said = told(site)
    assert (again, same) == (first, name)
    assert "from the same inputs; nothing was run" in said

    (tasks / "mine.yaml").write_text(TASK.replace("# a task", "# the task"))
    value, commented, jobs, _ = told(site)
    assert (value, commented != name) == (first, True)
    assert "build" in jobs
    assert not jobs & {"trial", "metric"}

    shutil.rmtree(site.work / name)  # its responses and scores have been linked
    (tasks / "load.py").write_text(LOAD.replace("i % 2", "1 - i % 2"))
    value, rotated, jobs, _ = told(site)
    assert value == 1 - first
    assert "metric" in jobs
    assert "trial" not in jobs
    report = site.run(site.command("report", rotated))
    assert f"responses of {commented} were used again" in " ".join(report.stdout.split())
    compared = site.run(site.command("compare", commented, rotated))
    assert "scored in another way" in " ".join(compared.stdout.split())

    (tasks / "mine.yaml").write_text(TASK.replace("{{q}}", "Well, {{q}}"))
    value, name, jobs, _ = told(site)
    assert {"build", "trial", "metric"} <= jobs

    again, fresh, jobs, _ = told(site, "--fresh")
    assert (again, fresh != name) == (value, True)
    assert {"build", "trial", "metric"} <= jobs, "nothing of earlier evaluations is used"
