"""Prometheus metrics of a daemon; the alert rules and the dashboard as Prometheus' own tool reads them (Debian's package)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import two_trainings

from coordinator.errors import OperatorError
from coordinator.monitor.metrics import SILENT_SECONDS, Metrics
from coordinator.runtime.summarise import summary_of
from coordinator.runtime.summary import Summary, Task, with_costs
from evaljobs.contract.paths import EvaluationPaths

FOLDER = Path(__file__).parents[2] / "scripts" / "monitoring"


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    made = Metrics("127.0.0.1:0", lambda: 4096.0)
    yield made
    made.close()


def _text(metrics: Metrics) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def _scraped(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (one.name, ",".join(one.labels.values())): one.value
        for family in text_string_to_metric_families(_text(metrics))
        for one in family.samples
    }


def _coordinator(world: World) -> Any:
    calls = SimpleNamespace(
        late=lambda: ("the listing of jobs", 7.0), take_counts=lambda: Counter({"a submission": 3})
    )
    summaries = [summary_of(world.state, world.now)]
    return SimpleNamespace(summaries=lambda: summaries, parked={"a": 1, "b": 2}, calls=calls, trouble="")


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1000), st.integers(1, 60))
def test_every_open_shard_is_counted_once(metrics: Metrics, seed: int, turns: int):
    world = World(seed, Faults(kill=0.1), record())
    for _ in range(turns):
        world.work()
    metrics._noted_at = 0.0
    metrics.note(_coordinator(world), pending=1, now=world.state.record.accepted_at + 5.0)
    seen = _scraped(metrics)
    open_ones = world.state.ended_at is None
    total = {
        name: sum(v for (of, _), v in seen.items() if of == f"evalspan_{name}")
        for name in ("shards", "evaluations")
    }
    assert total == {
        "shards": len(world.state.shards.by_name) if open_ones else 0,
        "evaluations": 3 + open_ones,
    }
    assert (seen["evalspan_evaluations", "parked"], seen["evalspan_evaluations", "pending"]) == (2, 1)
    assert seen["evalspan_oldest_evaluation_seconds", ""] == (5.0 if open_ones else 0.0)


def test_a_scrape_shows_what_the_loop_handed_over_and_nothing_as_running_where_it_hangs(metrics: Metrics):
    """The thread of a scrape lives on beside a loop that makes no turn."""
    world = World(0, Faults(), record())
    metrics.note(_coordinator(world), pending=4, now=world.state.record.accepted_at + 60)
    metrics.turn(0.02)
    seen = _scraped(metrics)
    phases = {"running": 1, "pending": 4, "stopped": 0}
    assert {phase: seen["evalspan_evaluations", phase] for phase in phases} == phases
    assert seen["evalspan_oldest_evaluation_seconds", ""] == 60
    assert seen["evalspan_cluster_call_late_seconds", ""] == 7
    assert seen["evalspan_cluster_calls_total", "a submission"] == 3
    assert seen["evalspan_loop_seconds_count", ""] == 1
    assert seen["evalspan_redis_memory_bytes", ""] == 4096
    metrics._noted_at -= SILENT_SECONDS + 1
    seen, phases = _scraped(metrics), {"running": 0, "pending": 4, "stopped": 1}
    assert {phase: seen["evalspan_evaluations", phase] for phase in phases} == phases


def test_every_ended_evaluation_counts_and_its_gpu_seconds_where_there_is_a_report(
    metrics: Metrics, tmp_path: Path
):
    work = two_trainings(tmp_path / "work")
    over = Summary(schema_version=2, evaluation_id="e", written_at=0.0, ended_at=1.0)
    ends = [with_costs(over, EvaluationPaths(file.parent)) for file in sorted(work.glob("*/report.json"))]
    failed = (Task(name="t", state="failed", error="no data"),)
    metrics.ended([*ends, over.model_copy(update={"tasks": failed})])
    seen = _scraped(metrics)
    assert seen["evalspan_evaluations_ended_total", "failed"] == 1
    assert seen["evalspan_evaluations_ended_total", "done"] == len(ends)
    assert ("evalspan_gpu_seconds_total", "inference") in seen
    assert seen["evalspan_makespan_seconds_count", ""] == len(ends)


def test_an_address_that_is_taken_is_an_error_of_one_line(metrics: Metrics):
    with pytest.raises(OperatorError, match=r"\[metrics\] listen = '127.0.0.1:\d+' cannot be listened on: "):
        Metrics(f"127.0.0.1:{metrics.port}", lambda: None)


def _scrape(metrics: Metrics) -> str:
    """What Prometheus gets of a daemon that has done everything once."""
    metrics._show([summary_of(World(0, Faults(), record()).state, 0.0)], {}, 0.0)
    metrics._counters["cluster_calls"].labels("the listing of jobs").inc()
    metrics._counters["evaluations_ended"].labels("done").inc()
    return _text(metrics)


def _expressions() -> list[str]:
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [r["expr"] for r in rules] + [t["expr"] for p in panels for t in p["targets"]]


def test_rules_and_dashboard_name_metrics_that_there_are(metrics: Metrics):
    shown = set(re.findall(r"^(evalspan_\w+)", _scrape(metrics), re.MULTILINE))
    used = {name for expr in _expressions() for name in re.findall(r"\b(evalspan_\w+)", expr)}
    assert used
    assert used <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_takes_the_rules_and_scrapes_the_daemon(metrics: Metrics, tmp_path: Path):
    """Prometheus' own parsers: of the alert rules, the dashboard's expressions, and what a scrape gets."""
    rules = [
        {"record": f"panel:{i}", "expr": expr.replace("$instance", ".*")}
        for i, expr in enumerate(_expressions())
    ]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    for file in (FOLDER / "alerts.yml", tmp_path / "panels.yml"):
        subprocess.run(["promtool", "check", "rules", file], check=True, capture_output=True)
    checked = subprocess.run(
        ["promtool", "check", "metrics"], check=False, input=_scrape(metrics).encode(), capture_output=True
    )
    assert b"error while" not in checked.stderr
