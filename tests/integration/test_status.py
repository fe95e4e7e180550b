"""What `status` and `watch` say of evaluations that real processes run: on a Slurm without room, in a pipe, at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support import sites

REASON = re.compile(r"pending for .*: .*\((Resources|Priority)\)")


def until(law: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := law()):
        assert time.monotonic() < end
        time.sleep(0.5)
    return found


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

        def waits() -> Any:
            (row,) = json.loads(slurm_site.run(slurm_site.command("status", "--json")).stdout)[
                "evaluations"
            ] or [{"waits_for": []}]
            return row if any(map(REASON.search, row["waits_for"])) else None

        assert until(waits)["stage"] == "waits"
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
        until(lambda: json.loads(small_site.run(small_site.command("status", "--json")).stdout)["daemon"])
        asked = ["submit", str(small_site.model), "--suite", str(small_site.suite)]
        name = small_site.run(small_site.command(*asked)).stdout.strip()
        until((small_site.work / name / "journal.jsonl").exists)
        piped = small_site.run(small_site.command("watch"))
        assert piped.returncode == 0
        *_, ended, last = piped.stdout.splitlines()
        assert re.search(rf"{name}: ended, 2/2 scored: toy_\w+ \w+ \d", ended), piped.stdout
        assert last.startswith("nothing runs")
        text = at_a_terminal(
            small_site.command("watch"), small_site.env, 100, lambda t: "daemon: running" in t
        )
        assert name in text
        assert "toy_choice acc" in text
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.communicate(timeout=120)
    stopped = small_site.run(small_site.command("watch"))
    assert "no process evaluates" in stopped.stdout


def at_a_terminal(command: list[str], env: dict[str, str], width: int, seen: Callable[[str], bool]) -> str:
    """What a command draws at a terminal until `seen`, and what it leaves there after Ctrl-C, without colours."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, width))
    shown = subprocess.Popen(
        command, env={**env, "TERM": "xterm"}, stdin=slave, stdout=slave, start_new_session=True
    )
    os.close(slave)
    text, asked = "", False
    with suppress(OSError):  # the terminal is closed
        while data := os.read(master, 65536):
            text += data.decode(errors="replace")
            if not asked and seen(text):
                assert shown.poll() is None
                shown.send_signal(signal.SIGINT)
                text, asked = "", True
    os.close(master)
    assert shown.wait(timeout=60) == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
