"""`evalspan prune` on a work folder: what it says, what it removes, and what is left where it is killed."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.ended import leave_ended
from support.trainings import leave
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.schema import RetentionConfig
from coordinator.keeping.archive import count_files
from coordinator.keeping.inventory import read_work_folder
from coordinator.keeping.prune import carry_out
from coordinator.keeping.retention import going
from coordinator.report.load_series import point_of
from coordinator.runtime.journal import Journal, read_events
from coordinator.runtime.summary import read_evaluation
from evaljobs.contract import folded
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

SCORES = RetentionConfig(keep="scores", older_than="0h")


@pytest.fixture
def there(tmp_path: Path) -> tuple[WorkPaths, EvaluationPaths]:
    """A work folder with an evaluation that has ended."""
    return WorkPaths(tmp_path), leave_ended(tmp_path, 1, 2, 2)[1]


def lacks_nothing_that_stays(paths: EvaluationPaths) -> None:
    """Records, results and scores can be read, and each task's score file is there once."""
    assert list(read_events(paths.journal))
    assert read_evaluation(paths) is not None
    assert json.loads(paths.results.read_bytes())["results"]
    assert len(folded.files_in(paths.scores)) == 2


def test_an_evaluation_taken_up_again_since_the_plan_loses_nothing(
    there: tuple[WorkPaths, EvaluationPaths],
) -> None:
    """Between the plan and the removal a retry may have begun: its journal is open, or it has not ended."""
    work, paths = there
    files, now = count_files(paths), time.time()
    made = going(read_work_folder(work), SCORES, now, code=None)
    assert made.evaluations
    journal = Journal(paths.journal)
    assert [why for _, why in carry_out(work, made, SCORES, now)] == ["it is in use"]
    journal.close()
    paths.status.unlink()
    assert [why for _, why in carry_out(work, made, SCORES, now)] == ["a coordinator has resumed it"]
    assert count_files(paths) == files - 1  # without its status


def test_a_request_set_used_since_the_plan_stays(tmp_path: Path) -> None:
    work = WorkPaths(tmp_path)
    for name in ("old-1", "old-2"):
        (work.request_sets / name).mkdir(parents=True)
        (work.request_sets / name / "entry.json").write_text("{}")
        os.utime(work.request_sets / name, (1, 1))
    policy = RetentionConfig(keep="responses", older_than="1h")
    made = going(read_work_folder(work), policy, time.time(), code=None)
    os.utime(work.request_sets / "old-1")
    left = {Path(name).name: why for name, why in carry_out(work, made, policy, time.time())}
    assert left == {"old-1": "it is in use again", "old-2": ""}
    assert [f.name for f in work.request_sets.iterdir()] == ["old-1"]


def test_prune_changes_nothing_without_yes_and_keeps_baselines(
    there: tuple[WorkPaths, EvaluationPaths], tmp_path: Path
) -> None:
    work, paths = there
    leave(tmp_path, 30, None)
    files = count_files(paths)
    argv = ["prune", "--keep", "scores", "--older-than", "0d", "--work-dir", str(work.root)]
    said = CliRunner().invoke(app, argv).output
    assert paths.root.name in said
    assert "samples" in said
    assert "nothing was changed: add --yes" in said
    assert count_files(paths) == files
    settings = tmp_path.parent / f"{tmp_path.name}.toml"
    settings.write_text(f'work_dir = "{work.root}"\n[retention]\nbaselines = ["{paths.root.name[:4]}*"]\n')
    assert "nothing is to be" in CliRunner().invoke(app, [*argv, "--config", str(settings), "--yes"]).output
    assert count_files(paths) == files
    done = CliRunner().invoke(app, [*argv, "--yes"])
    assert done.exit_code == 0, done.output
    assert "removed: " in done.output
    assert not paths.samples.exists()
    lacks_nothing_that_stays(paths)
    record = read_evaluation(paths)
    assert record is not None
    paths.report.unlink()  # this one is no report
    assert point_of(paths, record).scores


def test_status_disk_counts_every_file_once(there: tuple[WorkPaths, EvaluationPaths], tmp_path: Path) -> None:
    """By kind, and by evaluation; and it says what `prune` would free."""
    work, paths = there
    work.inbox.mkdir()
    (work.inbox / "1.json").write_text("no notice")
    every = sum(len(names) for _, _, names in os.walk(tmp_path))
    argv = ["status", "--disk", "--work-dir", str(work.root)]
    shown = json.loads(CliRunner().invoke(app, [*argv, "--json"]).output)
    assert shown["files"] == sum(kind["files"] for kind in shown["kinds"].values()) == every
    assert shown["evaluations"][0] == shown["evaluations"][0] | {
        "evaluation_id": paths.root.name,
        "files": count_files(paths),
    }
    assert [e["evaluation_id"] for e in shown["prune"]["evaluations"]] == [paths.root.name]
    text = CliRunner().invoke(app, argv).output
    assert "evaluations: samples" in text
    assert "would free" in text
