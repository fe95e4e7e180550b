"""The daemon's housekeeping: what an earlier daemon left is folded, and `[retention]` prunes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ended import leave_ended
from support.toys import config_text

from coordinator.keeping.folding import MOST_FILES, count_files
from coordinator.keeping.housekeeping import RETENTION_SECONDS, Job, keep_house
from coordinator.keeping.retention import Policy
from evaljobs.contract.paths import EvaluationPaths, WorkPaths


@pytest.fixture
def left(tmp_path: Path) -> EvaluationPaths:
    """An evaluation of many files that ended under a daemon that has died."""
    return leave_ended(tmp_path / "work", 2, 8, 8)[1]


@pytest.mark.parametrize("keep", [None, "responses"])
def test_a_daemon_folds_what_was_left_and_prunes_by_retention_before_it_is_idle(
    left: EvaluationPaths, tmp_path: Path, keep: str | None
) -> None:
    settings = tmp_path / "evalspan.toml"
    retention = f'[retention]\nkeep = "{keep}"\nolder_than = "1h"\n' if keep else ""
    settings.write_text(f'work_dir = "work"\n{config_text()}{retention}[watch]\nroots = ["{tmp_path}"]\n')
    assert count_files(left) > MOST_FILES
    done = subprocess.run(
        [sys.executable, "-m", "coordinator", "daemon", "--until-idle", "--config", str(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = (tmp_path / "work" / "cache" / "housekeeping.log").read_text()
    assert done.returncode == 0, done.stderr
    assert count_files(left) <= MOST_FILES, said
    assert "folded 1 evaluations" in said
    there = {name.removesuffix(".zip") for name in os.listdir(left.root)}  # noqa: PTH208
    assert {"responses", "samples", "scores", "verdicts"} <= there
    assert ("logs" in there) == (keep is None)


def test_retention_prunes_at_most_once_an_hour_whatever_starts_it(
    left: EvaluationPaths, tmp_path: Path
) -> None:
    """A daemon that starts anew each minute included."""
    work = WorkPaths(tmp_path / "work")
    work.cache.mkdir()
    policy = Policy(keep="responses", older_than_seconds=0)
    job = Job(work_dir=str(work.root), ended=(), retention=policy)
    began = work.root.stat().st_mtime
    keep_house(job, began)
    assert not left.specs.exists()
    left.specs.mkdir()
    keep_house(job, began + 60)
    assert left.specs.exists()
    keep_house(job, began + 2 * RETENTION_SECONDS)
    assert not left.specs.exists()
