"""What a person removes below a running evaluation is made again, or named: no traceback, no endless lines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import wait_until
from support import sites

pytestmark = pytest.mark.model


@pytest.fixture
def site(tmp_path: Path, toy_model: Path) -> Iterator[sites.Site]:
    made = sites.local(tmp_path, toy_model, "--slots", "2", entries=sites.WATCHED)
    yield made
    made.end_workers()


def paused(site: sites.Site) -> subprocess.Popen[str]:
    """An evaluation one of whose trials stands still after its first shard."""
    site.pause_a_trial(after=1)
    process = site.start(site.evaluate("--shards-per-task", "3"))
    wait_until(lambda: site.paused() is not None or process.poll() is not None)
    return process


def go_on(site: sites.Site) -> None:
    pid = site.paused()
    assert pid is not None
    os.kill(pid, signal.SIGCONT)


def remove_while_written(folder: Path) -> None:
    """Files that the running evaluation writes meanwhile go with it."""

    def removed() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    wait_until(removed)


def test_request_sets_removed_below_an_open_evaluation_are_built_again(
    site: sites.Site, expected: dict[str, Any]
) -> None:
    process = paused(site)
    shutil.rmtree(site.work / "request_sets")
    go_on(site)
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert site.results()["results"] == {task: expected[task] for task in sites.WATCHED}


def test_request_sets_removed_before_a_retry_are_built_again(
    site: sites.Site, expected: dict[str, Any]
) -> None:
    process = paused(site)
    process.send_signal(signal.SIGINT)
    go_on(site)
    process.communicate(timeout=120)
    shutil.rmtree(site.work / "request_sets")
    done = site.run(site.command("retry", site.root().name))
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert site.results()["results"] == {task: expected[task] for task in sites.WATCHED}


def test_a_work_folder_removed_below_an_evaluation_ends_it_in_one_line(site: sites.Site) -> None:
    """Exit code 3; nothing of it lives on, and the same command evaluates in a new folder."""
    process = paused(site)
    trial = site.paused()
    remove_while_written(site.work)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert said.splitlines()[-1].startswith(f"evalspan: the work folder {site.work} was removed")
    assert "Traceback" not in said
    wait_until(lambda: not Path(f"/proc/{trial}").exists())
    again = site.run(site.evaluate("--limit", "2"))
    assert again.returncode == 0, again.stderr
