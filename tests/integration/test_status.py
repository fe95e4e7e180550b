"""What `status` and `watch` say of evaluations that real processes run: on a Slurm without room, in a pipe, at a terminal."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.terminal import Terminal
from dev_cluster.testing import wait_until
from support import sites

REASON = re.compile(r"pending for .*: .*\((Resources|Priority)\)")


@pytest.fixture
def small_site(tmp_path: Path, toy_model: Path) -> Iterator[sites.Site]:
    site = sites.local(tmp_path, toy_model, "--slots", "2", entries=sites.WATCHED)
    yield site
    site.end_workers()


@pytest.mark.slurm
@pytest.mark.model
def test_status_says_why_slurm_keeps_jobs_pending(slurm_site: Any) -> None:
    """Also where only the command line of `eval` named the cluster: stage, reason in words, Slurm's own word."""
    cluster = slurm_site.cluster
    for partition, nodes in (("gpu", 2), ("cpu", 1)):
        more = [f"--partition={partition}", f"--nodes={nodes}", "--exclusive", "--wrap=sleep 600"]
        cluster.run_as_user(["sbatch", "--output=/dev/null", *more])
    running = slurm_site.start(slurm_site.evaluate())
    try:

        def waits() -> bool:
            told = json.loads(slurm_site.run(slurm_site.command("status", "--json")).stdout)["evaluations"]
            return any(row["stage"] == "waits" and REASON.search(str(row["waits_for"])) for row in told)

        wait_until(waits, "a job is pending, with its reason")
        shown = slurm_site.run(slurm_site.command("status")).stdout
        assert REASON.search(" ".join(shown.split())), shown
        assert "daemon: not running; evalspan eval, pid" in shown
    finally:
        cluster.run_as_user(["scancel", "--user", cluster.user])
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)


@pytest.mark.model
def test_watch_stays_up_with_the_last_scores_and_ends_in_a_pipe(small_site: sites.Site) -> None:
    """In a pipe once nothing runs, with the scores in the last line but one; at a terminal until Ctrl-C."""
    daemon = small_site.start(small_site.command("daemon"))
    try:
        wait_until(
            lambda: json.loads(small_site.run(small_site.command("status", "--json")).stdout)["daemon"]
        )
        asked = ["submit", str(small_site.model), "--suite", str(small_site.suite)]
        name = small_site.run(small_site.command(*asked)).stdout.strip()
        wait_until((small_site.work / name / "journal.jsonl").exists)
        piped = small_site.run(small_site.command("watch"))
        assert piped.returncode == 0
        *_, ended, last = piped.stdout.splitlines()
        assert re.search(rf"{name}: ended, 2/2 scored: toy_\w+ \w+ \d", ended), piped.stdout
        assert last.startswith("nothing runs")
        watch = Terminal(small_site.folder, "watch")
        watch.until(lambda: "daemon: running" in watch.said, "the screen")
        watch.said = ""
        watch.type("\x03")
        assert watch.ends() == 0
        assert name in watch.said
        assert "toy_choice acc" in watch.said
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=120)
    stopped = small_site.run(small_site.command("watch"))
    assert "no process evaluates" in stopped.stdout
