"""The metrics, the alert rules and the dashboard with a real Prometheus (Debian's package)."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.simulated.parts import Faults, record
from support.simulated.world import World

from coordinator.monitor.metrics import Metrics
from coordinator.runtime.summarise import summary_of

FOLDER = Path(__file__).parents[2] / "scripts" / "monitoring"
SECONDS = 60.0  # most that a busy machine takes


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics("127.0.0.1:0", lambda: 1.0)
    world = World(0, Faults(), record())
    made._show([summary_of(world.state, 0.0)], {}, 0.0)
    made._counters["cluster_calls"].labels("the listing of jobs").inc()
    made._counters["evaluations_ended"].labels("done").inc()
    yield made
    made.close()


def _expressions() -> list[str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [r["expr"] for r in rules] + [t["expr"] for p in panels for t in p["targets"]]


def test_rules_and_dashboard_name_metrics_that_there_are(metrics: Metrics):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=SECONDS) as answer:
        shown = set(re.findall(r"^(evalspan_\w+)", answer.read().decode(), re.MULTILINE))
    used = {name for expr in _expressions() for name in re.findall(r"\b(evalspan_\w+)", expr)}
    assert used
    assert used <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_takes_the_rules_and_scrapes_the_daemon(metrics: Metrics, tmp_path: Path):
    subprocess.run(["promtool", "check", "rules", FOLDER / "alerts.yml"], check=True, capture_output=True)
    (tmp_path / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{FOLDER / 'alerts.yml'}]\n"
        f"scrape_configs: [{{job_name: evalspan, static_configs: [{{targets: ['127.0.0.1:{metrics.port}']}}]}}]\n"
    )
    with Prometheus(tmp_path) as ask:
        assert ask('up{job="evalspan"}')[0]["value"][1] == "1"
        assert ask('evalspan_evaluations{phase="running"}')[0]["value"][1] == "1"
        for expression in _expressions():
            ask(expression.replace("$instance", ".*"), empty=True)


class Prometheus:
    """A Prometheus that scrapes. Inside: a function that asks it, until there is an answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Any:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        with (self.folder / "log").open("wb") as log:
            command = ["prometheus", "--config.file", "prometheus.yml", "--web.listen-address", self.address]
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        return self.ask

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, expression: str, *, empty: bool = False) -> list[dict[str, Any]]:
        until = time.monotonic() + SECONDS
        place = f"http://{self.address}/api/v1/query?query={urllib.parse.quote(expression)}"
        while True:
            found: list[dict[str, Any]] | None = None
            with suppress(urllib.error.URLError), urllib.request.urlopen(place, timeout=SECONDS) as answer:
                found = json.load(answer)["data"]["result"]
            if found or (empty and found is not None):
                return found
            assert time.monotonic() < until, (self.folder / "log").read_text()
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.2)  # between two questions of a poll
