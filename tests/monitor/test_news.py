"""News of evaluations, by a command and by a webhook, those of an end outlive the daemon that saw it; and Prometheus metrics."""

import json
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from dev_cluster.testing import wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from support.endpoint import serving
from support.node_memory import make_checkpoint
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave, two_trainings

from coordinator.errors import OperatorError
from coordinator.operations.monitor import notify
from coordinator.operations.monitor.daemon_services import Monitor
from coordinator.operations.monitor.metrics import SILENT_SECONDS, Metrics
from coordinator.operations.monitor.notify import MOST_WAITING, Notifier
from coordinator.runtime.make_summary import summary_of
from coordinator.runtime.summary import Summary, Task, fields_of_record, summary_of_record, with_document
from coordinator.site.config.schema import Config, NotifyConfig
from evaljobs.contract.paths import EvaluationPaths, WorkPaths

SECONDS = 120.0  # most that a busy machine takes


@pytest.fixture
def hook():
    """A web server that takes news."""
    with serving() as made:
        yield made


def _answers(hook, *codes):
    """Those of the next requests; 200 after them."""
    left = list(codes)
    hook.handle = lambda request: request.error(left.pop(0)) if left else request.answer()


def _news(number=0):
    return notify.parked_news(_summary(), f"reason {number}", 1.0)


def _summary(**more):
    return Summary(written_at=0.0, **fields_of_record(record()), **more)


def _into(file):
    """A command that adds its news to a file, a line each."""
    return ["sh", "-c", f"cat >> {file}; echo >> {file}"]


def _no_pause(_seconds):
    return False


def test_a_command_and_a_webhook_get_the_same_json(hook, tmp_path):
    out = tmp_path / "news"
    notifier = Notifier(_into(out), hook.url)
    notifier.tell(
        lambda: [
            notify.ended_news(
                _summary(ended_at=2.0, tasks=[{"name": "add", "state": "failed", "error": "no data"}])
            )
        ]
    )
    notifier.tell(list)
    notifier.finish(SECONDS)
    (got,) = (request.body for request in hook.requests)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [got]
    assert (got["event"], got["errors"]) == ("failed", {"add": "no data"})
    assert "add: no data" in str(got["text"])


def test_news_that_are_refused_are_sent_again_in_order(hook):
    _answers(hook, *(refused := [503, 429, 408, 500, 502]))
    notifier = Notifier(webhook=hook.url, pause=_no_pause)
    notifier.tell(lambda: [_news(0)])
    notifier.tell(lambda: [_news(1)])
    notifier.finish(SECONDS)
    told = [request.body["reason"] for request in hook.requests]
    assert told == ["reason 0"] * len(refused) + ["reason 0", "reason 1"]


@pytest.mark.parametrize("place", ["http://127.0.0.1:1", "http://me:hunter22@127.0.0.1:1", "http://[nowhere"])
def test_no_part_of_a_webhooks_address_but_its_host_is_logged_where_no_server_answers(
    place, caplog, tmp_path
):
    """A receiver that never answers costs its news alone: the command gets them all."""
    notifier = Notifier(
        _into(tmp_path / "news"), f"{place}/services/T000/B000/XXXX?key=YYYY", pause=_no_pause
    )
    for number in range(3):
        notifier.tell(lambda number=number: [_news(number)])
    notifier.finish(SECONDS)
    assert "giving up on" in caplog.text
    assert not any(part in caplog.text for part in ("services", "T000", "XXXX", "YYYY", "hunter22"))
    assert len((tmp_path / "news").read_text().splitlines()) == 3


def test_the_text_of_news_makes_no_link_and_calls_no_channel_of_a_chat():
    news = notify.parked_news(_summary(), "<!channel> <http://evil|click> a&b\n@here me@host", 1.0)
    assert "&lt;!channel&gt; &lt;http://evil|click&gt; a&amp;b @\u200bhere me@host" in news.text
    assert news.reason.startswith("<!channel>")


def test_the_queue_is_bounded_and_telling_never_waits(hook):
    gate = threading.Event()
    notifier = Notifier(webhook=hook.url, pause=_no_pause)

    def wait():
        gate.wait(SECONDS)
        return []

    notifier.tell(wait)
    for number in range(MOST_WAITING + 50):
        notifier.tell(lambda number=number: [_news(number)])
    gate.set()
    notifier.finish(SECONDS)
    assert MOST_WAITING - 1 <= len(hook.requests) <= MOST_WAITING
    assert hook.requests[-1].body["reason"] == f"reason {MOST_WAITING + 49}"


def _told(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_an_end_is_told_after_a_restart_where_the_daemon_died_before_its_news_were_sent(tmp_path):
    """The command of the first daemon kills it, between the evaluation's end and the delivery."""
    work, told, killer = tmp_path / "work", tmp_path / "told", tmp_path / "killer"
    tell = tmp_path / "tell.sh"
    tell.write_text(
        f"[ ! -e {killer} ] || {{ rm {killer}; kill -9 $PPID; exit 1; }}\ncat >> {told}; echo >> {told}\n"
    )
    config = tmp_path / "evalspan.toml"
    config.write_text(
        f'work_dir = "{work}"\n[cluster]\nkind = "local"\nslots = 1\n[trial]\ndevice = "cpu"\n'
        f'[watch]\nroots = ["{tmp_path}"]\n[notify]\ncommand = ["sh", "{tell}"]\n'
    )
    checkpoint = make_checkpoint(tmp_path / "step-7", shards=1, size=100, seed=0)

    def evalspan(*words):
        return [sys.executable, "-m", "coordinator", *words, "--config", config]

    killer.touch()
    subprocess.run(evalspan("submit", checkpoint, "--suite", "quickstart"), check=True, capture_output=True)
    first = subprocess.Popen(evalspan("daemon"), stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: first.poll() is not None or list(work.glob("step-7-*/journal.jsonl")))
        (found,) = work.glob("step-7-*/journal.jsonl")
        subprocess.run(evalspan("cancel", found.parent.name), check=True, capture_output=True)
        assert first.wait(SECONDS) == -9
    finally:
        first.kill()
    assert _told(told) == []
    assert not killer.exists()
    second = subprocess.run(
        evalspan("daemon", "--until-idle"), check=False, capture_output=True, timeout=SECONDS
    )
    assert second.returncode == 0, second.stderr
    assert [(n["event"], n["status"], n["evaluation_id"]) for n in _told(told)] == [
        ("ended", "cancelled", found.parent.name)
    ]
    assert json.loads(WorkPaths(work).news.read_text())["evaluations"] == []


def test_the_address_of_a_webhook_stands_in_no_log_where_its_server_refuses_the_news(tmp_path, hook, caplog):
    """Slack's form of address, whose path is the secret, in a file that others may not read. A 403 is final: one post."""
    secret, address = "T000/B000/XXXX", tmp_path / "webhook.url"
    _answers(hook, 403)
    address.write_text(hook.url.replace("/v1", f"/services/{secret}\n"))
    config = Config(work_dir=tmp_path, notify=NotifyConfig(webhook_file=address))
    tmp_path.chmod(0o700)
    address.chmod(0o644)
    with pytest.raises(OperatorError, match=f"chmod 600 {address}") as refused:
        Monitor(config)
    address.chmod(0o600)
    world, monitor = World(0, Faults()), Monitor(config)
    world.run()
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    wait_until(lambda: "giving up on" in caplog.text)
    monitor.close()
    assert "the webhook at 127.0.0.1 answered 403" in caplog.text
    said = caplog.text + str(refused.value)
    assert not any(part in said for part in (secret, "T000", "XXXX", "/services"))
    assert len(hook.requests) == 1


def _monitor(work, *command):
    return Monitor(Config(work_dir=work, notify=NotifyConfig(command=command)))


def _coordinator(*worlds):
    running = {w.state.evaluation_id: w for w in worlds}
    return SimpleNamespace(evaluations=SimpleNamespace(running=running, parked={}), turn_seconds=0.0)


def test_an_end_is_told_where_its_gate_cannot_be_made(tmp_path, caplog):
    """Documents that are no file: the gate is undecidable, says why in one line, and its traceback is in the log."""
    tmp_path.chmod(0o700)
    policy, told = tmp_path / "policy.toml", tmp_path / "told"
    policy.write_text('[[rule]]\ntask = "add"\nmax_drop = 0.05\n')
    for step in (10, 20):
        paths = leave(tmp_path, step, 0.5)
        paths.journal.touch()
    paths.documents.mkdir()
    end = summary_of_record(paths, "").model_copy(update={"ended_at": 1.0})
    monitor = Monitor(Config(work_dir=tmp_path, notify=NotifyConfig(command=tuple(_into(told)), gate=policy)))
    monitor.tick(_coordinator(), 0, [end])
    wait_until(lambda: _told(told))
    monitor.close()
    (news,) = _told(told)
    assert (news["event"], news["gate"]) == ("ended", "undecidable")
    assert "gate: undecidable: IsADirectoryError: " in news["text"]
    assert "Traceback" in caplog.text


def _owed(work):
    file = WorkPaths(work).news
    return json.loads(file.read_text())["evaluations"] if file.exists() else []


def test_an_evaluation_is_owed_from_its_first_turn_until_its_news_are_sent(tmp_path):
    tmp_path.chmod(0o700)
    world, told = World(0, Faults()), tmp_path / "told"
    monitor = _monitor(tmp_path, *_into(told))
    monitor.tick(_coordinator(world), 0, [])
    assert _owed(tmp_path) == [world.state.evaluation_id]
    world.run()
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    wait_until(lambda: _told(told))
    wait_until(lambda: (monitor.tick(_coordinator(), 0, []), not _owed(tmp_path))[1])
    monitor.close()
    assert [n["evaluation_id"] for n in _told(told)] == [world.state.evaluation_id]


@pytest.mark.parametrize(
    ("ends", "owed"), [(False, 0), (True, 1)], ids=["given up", "cut by the daemon's end"]
)
def test_news_that_were_given_up_are_no_longer_owed_and_those_cut_short_are(
    tmp_path, monkeypatch, ends, owed
):
    tmp_path.chmod(0o700)
    world = World(0, Faults())
    world.run()
    monitor = _monitor(tmp_path, "false")
    monkeypatch.setattr(monitor._notifier, "_pause", lambda _: ends)
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    assert len(_owed(tmp_path)) == 1
    if ends:
        monitor._notifier._thread.join(SECONDS)
    monitor._notifier.finish(0.0 if ends else SECONDS)
    monitor.tick(_coordinator(), 0, [])
    assert len(_owed(tmp_path)) == owed


def test_what_was_removed_since_is_owed_no_more_and_nothing_is_kept_where_no_news_are_wanted(tmp_path):
    tmp_path.chmod(0o700)
    WorkPaths(tmp_path).news.write_text('{"evaluations": ["gone-core-12345678"], "of_a_newer_version": 1}')
    monitor = _monitor(tmp_path, "true")
    wait_until(lambda: (monitor.tick(_coordinator(), 0, []), not _owed(tmp_path))[1])
    monitor.close()
    WorkPaths(tmp_path).news.unlink()
    silent = _monitor(tmp_path)
    silent.tick(_coordinator(World(0, Faults())), 0, [])
    silent.close()
    assert not WorkPaths(tmp_path).news.exists()


# --- metrics; the alert rules and the dashboard as Prometheus' own tool reads them -----------------------------------

FOLDER = Path(__file__).parents[2] / "scripts" / "monitoring"


@pytest.fixture
def metrics():
    made = Metrics("127.0.0.1:0", lambda: 4096.0)
    yield made
    made.close()


def _text(metrics):
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def _scraped(metrics):
    return {
        (one.name, ",".join(one.labels.values())): one.value
        for family in text_string_to_metric_families(_text(metrics))
        for one in family.samples
    }


def _loop(world):
    calls = SimpleNamespace(
        late=lambda: ("the listing of jobs", 7.0), take_counts=lambda: Counter({"a submission": 3})
    )
    summaries = [summary_of(world.state, world.now)]
    evaluations = SimpleNamespace(summaries=lambda: summaries, parked={"a": 1, "b": 2}, trouble="")
    return SimpleNamespace(evaluations=evaluations, calls=calls)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 1000), st.integers(1, 60))
def test_every_open_shard_is_counted_once(metrics, seed, turns):
    world = World(seed, Faults(kill=0.1), record())
    for _ in range(turns):
        world.work()
    metrics._noted_at = 0.0
    metrics.note(_loop(world), pending=1, now=world.state.record.accepted_at + 5.0)
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


def test_a_scrape_shows_what_the_loop_handed_over_and_nothing_as_running_where_it_hangs(metrics):
    """The thread of a scrape lives on beside a loop that makes no turn."""
    world = World(0, Faults(), record())
    metrics.note(_loop(world), pending=4, now=world.state.record.accepted_at + 60)
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


def test_every_ended_evaluation_counts_and_its_gpu_seconds_where_there_is_a_report(metrics, tmp_path):
    work = two_trainings(tmp_path / "work")
    ends = []
    for file in sorted(work.glob("*/report.json")):
        over = Summary(schema_version=3, evaluation_id=file.parent.name, written_at=0.0, ended_at=1.0)
        ends.append(with_document(over, EvaluationPaths(file.parent)))
    failed = (Task(name="t", state="failed", error="no data"),)
    metrics.ended([*ends, over.model_copy(update={"tasks": failed})])
    seen = _scraped(metrics)
    assert seen["evalspan_evaluations_ended_total", "failed"] == 1
    assert seen["evalspan_evaluations_ended_total", "done"] == len(ends)
    assert ("evalspan_gpu_seconds_total", "inference") in seen
    assert seen["evalspan_makespan_seconds_count", ""] == len(ends)


def test_a_checkpoint_counts_from_its_announcement_to_its_last_score(metrics):
    """Waits before its acceptance included; a cancelled evaluation has none to count."""
    over = Summary(schema_version=3, evaluation_id="e", written_at=0.0, accepted_at=500.0, ended_at=1000.0)
    metrics.ended(
        [over, over.model_copy(update={"evaluation_id": "c", "cancelled": "asked"})], {"e": 100.0, "c": 1.0}
    )
    seen = _scraped(metrics)
    assert (seen["evalspan_checkpoint_seconds_count", ""], seen["evalspan_checkpoint_seconds_sum", ""]) == (
        1,
        900,
    )


def test_each_alert_has_a_heading_that_says_what_to_do():
    """And each such heading an alert: the rule's `runbook` is the heading's address."""
    page = (FOLDER.parents[1] / "docs/operations/troubleshooting.md").read_text()
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    assert re.findall(r"^### (Evalspan\w+)$", page, re.MULTILINE) == [rule["alert"] for rule in rules]
    for rule in rules:
        anchor = f"operations/troubleshooting.md#{rule['alert'].lower()}"
        assert rule["annotations"]["runbook"] == anchor
        part = page.partition(f"### {rule['alert']}\n")[2].partition("###")[0]
        assert "You see:" in part
        assert re.search(r"[Tt]ype\s+`", part), rule["alert"]


def _scrape(metrics):
    """What Prometheus gets of a daemon that has done everything once."""
    metrics._show([summary_of(World(0, Faults(), record()).state, 0.0)], {}, 0.0)
    metrics._counters["cluster_calls"].labels("the listing of jobs").inc()
    metrics._counters["evaluations_ended"].labels("done").inc()
    return _text(metrics)


def _expressions():
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((FOLDER / "dashboard.json").read_text())["panels"]
    return [r["expr"] for r in rules] + [t["expr"] for p in panels for t in p["targets"]]


def test_rules_and_dashboard_name_metrics_that_there_are(metrics):
    shown = set(re.findall(r"^(evalspan_\w+)", _scrape(metrics), re.MULTILINE))
    used = {name for expr in _expressions() for name in re.findall(r"\b(evalspan_\w+)", expr)}
    assert used
    assert used <= shown


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's package prometheus")
def test_prometheus_takes_the_rules_and_scrapes_the_daemon(metrics, tmp_path):
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
