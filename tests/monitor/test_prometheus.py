"""The metrics, the alert rules and the dashboard as Prometheus' own tool reads them (Debian's package)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.monitor.metrics import Metrics
from coordinator.runtime.summarise import summary_of

FOLDER = Path(__file__).parents[2] / "scripts" / "monitoring"
SECONDS = 60.0  # most that a busy machine takes


@pytest.fixture
def scrape() -> Iterator[bytes]:
    """What Prometheus gets of a daemon."""
    made = Metrics("127.0.0.1:0", lambda: 1.0)
    world = World(0, Faults(), record())
    made._show([summary_of(world.state, 0.0)], {}, 0.0)
    made._counters["cluster_calls"].labels("the listing of jobs").inc()
    made._counters["evaluations_ended"].labels("done").inc()
    with urllib.request.urlopen(f"http://127.0.0.1:{made.port}/metrics", timeout=SECONDS) as answer:
        yield answer.read()
    made.close()


def _expressions() -> list[str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [r["expr"] for r in rules] + [t["expr"] for p in panels for t in p["targets"]]


def test_rules_and_dashboard_name_metrics_that_there_are(scrape: bytes):
    shown = set(re.findall(r"^(evalspan_\w+)", scrape.decode(), re.MULTILINE))
    used = {name for expr in _expressions() for name in re.findall(r"\b(evalspan_\w+)", expr)}
    assert used
    assert used <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_takes_the_rules_and_scrapes_the_daemon(scrape: bytes, tmp_path: Path):
    """Prometheus' own parsers: of the alert rules, the dashboard's expressions, and what a scrape gets."""
    rules = [
        {"record": f"panel:{i}", "expr": expr.replace("$instance", ".*")}
        for i, expr in enumerate(_expressions())
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    for file in (FOLDER / "alerts.yml", tmp_path / "panels.yml"):
        subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    checked = subprocess.run(["promtool", "check", "metrics"], check=False, input=scrape, capture_output=True)
    assert b"error while" not in checked.stderr
