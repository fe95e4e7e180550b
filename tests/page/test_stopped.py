"""No page, screen, report or metric says "running" of an evaluation whose coordinator is dead."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.node_memory import make_checkpoint
from support.serving import serving

SECONDS = 120.0  # most that a busy machine takes
TYPE = "no process goes on with it: type the same `evalspan eval"


def _scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as answer:
        return str(answer.read().decode())


def test_an_evaluation_whose_daemon_was_killed_reads_stopped_everywhere(tmp_path: Path):
    """`status`, `report`, the page as a file and as served, the index; metrics end with their daemon."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    work, config = tmp_path / "work", tmp_path / "evalspan.toml"
    config.write_text(
        f'work_dir = "{work}"\n[cluster]\nkind = "local"\nslots = 1\n[trial]\ndevice = "cpu"\n'
        f'[watch]\nroots = ["{tmp_path}"]\n[metrics]\nlisten = "127.0.0.1:{free_port}"\n'
    )
    checkpoint = make_checkpoint(tmp_path / "step-7", shards=1, size=100, seed=0)

    def evalspan(*words: str | Path) -> str:
        command = [sys.executable, "-m", "coordinator", *words, "--config", str(config)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    evalspan("submit", checkpoint, "--suite", "quickstart")
    daemon = subprocess.Popen(
        [sys.executable, "-m", "coordinator", "daemon", "--config", config], stderr=subprocess.DEVNULL
    )
    with serving("--config", str(config)) as served:
        try:
            wait_until(lambda: list(work.glob("step-7-*/journal.jsonl")))
            (name,) = (p.parent.name for p in work.glob("step-7-*/journal.jsonl"))
            wait_until(lambda: served.data("/")["evaluations"])
            assert served.data("/")["running"] == 1
            assert served.data(f"/evaluation/{name}")["report"]["status"] == "running"
            wait_until(lambda: "evalspan_evaluations" in _scrape(free_port))
        finally:
            daemon.kill()
            daemon.wait(SECONDS)
        wait_until(lambda: served.data("/")["running"] == 0)
        index = served.data("/")
        wait_until(lambda: served.data(f"/evaluation/{name}")["report"]["status"] != "running")
        page = served.data(f"/evaluation/{name}")
    (row,) = json.loads(evalspan("status", "--json"))["evaluations"]
    assert row["stopped"]
    since = evalspan("status").partition("stopped since ")[2].split()[0]
    said = f"stopped since {since}: {TYPE}"
    assert index["evaluations"][0]["status"].startswith(said)
    assert page["report"]["status"] == "stopped"
    assert page["halted"].startswith(said)
    file = tmp_path / "p.html"
    evalspan("report", name, "--html", str(file))
    assert said in file.read_text()
    assert '"status":"running"' not in file.read_text()
    report = evalspan("report", name)
    assert "stopped since" in report
    assert "so far" not in report
    assert json.loads(evalspan("report", name, "--json"))["status"] == "stopped"
    with pytest.raises(urllib.error.URLError):
        _scrape(free_port)
