"""News of evaluations, by a command and by a webhook; those of an end outlive the daemon that saw it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dev_cluster.testing import wait_until
from support.hook import Hook
from support.node_memory import make_checkpoint
from support.simulated.parts import Faults, record
from support.simulated.world import World
from support.trainings import leave

from coordinator.config.schema import Config, NotifyConfig
from coordinator.errors import OperatorError
from coordinator.monitor import notify
from coordinator.monitor.notify import MOST_WAITING, News, Notifier
from coordinator.monitor.watch import Monitor
from coordinator.runtime.summarise import summary_of
from coordinator.runtime.summary import Summary, known_by, of_record
from evaljobs.contract.paths import WorkPaths

SECONDS = 120.0  # most that a busy machine takes


@pytest.fixture
def hook() -> Iterator[Hook]:
    """A web server that takes news."""
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def _news(number: int = 0) -> News:
    return notify.parked(_summary(), f"reason {number}", 1.0)


def _summary(**more: object) -> Summary:
    return Summary(written_at=0.0, **known_by(record()), **more)


def _into(file: Path) -> list[str]:
    """A command that adds its news to a file, a line each."""
    return ["sh", "-c", f"cat >> {file}; echo >> {file}"]


def _no_pause(_seconds: float) -> bool:
    return False


def test_a_command_and_a_webhook_get_the_same_json(hook: Hook, tmp_path: Path):
    out = tmp_path / "news"
    notifier = Notifier(_into(out), hook.url)
    notifier.tell(
        lambda: [
            notify.ended(
                _summary(ended_at=2.0, tasks=[{"name": "add", "state": "failed", "error": "no data"}])
            )
        ]
    )
    notifier.tell(list)
    notifier.finish(SECONDS)
    assert [json.loads(line) for line in out.read_text().splitlines()] == hook.got
    assert hook.got[0]["event"] == "failed"
    assert hook.got[0]["errors"] == {"add": "no data"}
    assert "add: no data" in str(hook.got[0]["text"])


def test_news_that_are_refused_are_sent_again_in_order(hook: Hook):
    hook.answers = [503, 429, 408, 500, 502]
    notifier = Notifier(webhook=hook.url, pause=_no_pause)
    notifier.tell(lambda: [_news(0)])
    notifier.tell(lambda: [_news(1)])
    notifier.finish(SECONDS)
    assert [n["reason"] for n in hook.got] == ["reason 0", "reason 1"]


@pytest.mark.parametrize("place", ["http://127.0.0.1:1", "http://me:hunter22@127.0.0.1:1", "http://[nowhere"])
def test_no_part_of_a_webhooks_address_but_its_host_is_logged_where_no_server_answers(
    place: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    """A receiver that never answers costs its news alone: the command gets them all."""
    notifier = Notifier(
        _into(tmp_path / "news"), f"{place}/services/T000/B000/XXXX?key=YYYY", pause=_no_pause
    )
    for number in range(3):
        notifier.tell(lambda number=number: [_news(number)])
    notifier.finish(SECONDS)
    assert "given up" in caplog.text
    assert not any(part in caplog.text for part in ("services", "T000", "XXXX", "YYYY", "hunter22"))
    assert len((tmp_path / "news").read_text().splitlines()) == 3


def test_the_text_of_news_makes_no_link_and_calls_no_channel_of_a_chat():
    news = notify.parked(_summary(), "<!channel> <http://evil|click> a&b\n@here me@host", 1.0)
    assert "&lt;!channel&gt; &lt;http://evil|click&gt; a&amp;b @\u200bhere me@host" in news.text
    assert news.reason.startswith("<!channel>")


def test_the_queue_is_bounded_and_telling_never_waits(hook: Hook):
    gate = threading.Event()
    notifier = Notifier(webhook=hook.url, pause=_no_pause)

    def wait() -> list[News]:
        gate.wait(SECONDS)
        return []

    notifier.tell(wait)
    for number in range(MOST_WAITING + 50):
        notifier.tell(lambda number=number: [_news(number)])
    gate.set()
    notifier.finish(SECONDS)
    assert MOST_WAITING - 1 <= len(hook.got) <= MOST_WAITING
    assert hook.got[-1]["reason"] == f"reason {MOST_WAITING + 49}"


def test_a_score_that_fell_beyond_its_error_is_news_and_one_within_is_none(tmp_path: Path):
    paths = [leave(tmp_path, step, value) for step, value in ((1, 0.5), (2, 0.3), (3, 0.295))]
    fell = [[(f.task, f.measure) for f in notify.fallen(tmp_path, of_record(p, ""))] for p in paths]
    assert fell == [[], [("add", "exact_match")], []]


def test_nothing_is_started_where_nobody_wants_news():
    before = threading.active_count()
    notifier = Notifier()
    notifier.tell(lambda: [_news()])
    assert threading.active_count() == before


def _told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_an_end_is_told_after_a_restart_where_the_daemon_died_before_its_news_were_sent(tmp_path: Path):
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

    def evalspan(*words: str | Path) -> list[str | Path]:
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


def test_the_address_of_a_webhook_stands_in_no_log_where_its_server_refuses_the_news(
    tmp_path: Path, hook: Hook, caplog: pytest.LogCaptureFixture
):
    """Slack's form of address, whose path is the secret, in a file that others may not read. A 403 is final: one post."""
    secret, address = "T000/B000/XXXX", tmp_path / "webhook.url"
    hook.answers = [403]
    address.write_text(hook.url.replace("/hook", f"/services/{secret}\n"))
    config = Config(work_dir=tmp_path, notify=NotifyConfig(webhook_file=address))
    tmp_path.chmod(0o700)
    address.chmod(0o644)
    with pytest.raises(OperatorError, match=f"chmod 600 {address}") as refused:
        Monitor(config)
    address.chmod(0o600)
    world, monitor = World(0, Faults()), Monitor(config)
    world.run()
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    wait_until(lambda: "is given up" in caplog.text)
    monitor.close()
    assert "the webhook at 127.0.0.1 answered 403" in caplog.text
    said = caplog.text + str(refused.value)
    assert not any(part in said for part in (secret, "T000", "XXXX", "/services"))
    assert len(hook.paths) == 1


def _monitor(work: Path, *command: str) -> Monitor:
    return Monitor(Config(work_dir=work, notify=NotifyConfig(command=command)))


def _coordinator(*worlds: World) -> Any:
    running = {w.state.evaluation_id: w for w in worlds}
    return SimpleNamespace(running=running, parked={}, turn_seconds=0.0)


def _owed(work: Path) -> list[str]:
    file = WorkPaths(work).news
    return json.loads(file.read_text())["evaluations"] if file.exists() else []


def test_an_evaluation_is_owed_from_its_first_turn_until_its_news_are_sent(tmp_path: Path):
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, owed: int
):
    tmp_path.chmod(0o700)
    world = World(0, Faults())
    world.run()
    monitor = _monitor(tmp_path, "false")
    monkeypatch.setattr(monitor._notifier, "_pause", lambda _: ends)
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    assert len(_owed(tmp_path)) == 1
    assert monitor._notifier._thread is not None
    if ends:
        monitor._notifier._thread.join(SECONDS)
    monitor._notifier.finish(0.0 if ends else SECONDS)
    monitor.tick(_coordinator(), 0, [])
    assert len(_owed(tmp_path)) == owed


def test_what_was_removed_since_is_owed_no_more_and_nothing_is_kept_where_no_news_are_wanted(tmp_path: Path):
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
