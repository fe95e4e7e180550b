"""News of an evaluation's end outlive the daemon that saw it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hook import Hook
from support.node_memory import make_checkpoint
from support.simulated.parts import Faults
from support.simulated.world import World

from coordinator.config.schema import Config, NotifyConfig
from coordinator.errors import OperatorError
from coordinator.monitor.watch import Monitor
from coordinator.runtime.summarise import summary_of
from evaljobs.contract.paths import WorkPaths

SECONDS = 120.0  # most that a busy machine takes


def _until(law: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    end = time.monotonic() + SECONDS
    while not law():
        assert time.monotonic() < end
        assert process is None or process.poll() is None
        time.sleep(0.05)  # between two looks of a poll


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
        _until(lambda: list(work.glob("step-7-*/journal.jsonl")), first)
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
    _until(lambda: "is given up" in caplog.text)
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
    monitor = _monitor(tmp_path, "sh", "-c", f"cat >> {told}; echo >> {told}")
    monitor.tick(_coordinator(world), 0, [])
    assert _owed(tmp_path) == [world.state.evaluation_id]
    world.run()
    monitor.tick(_coordinator(world), 0, [summary_of(world.state, world.now)])
    _until(lambda: _told(told))
    _until(lambda: (monitor.tick(_coordinator(), 0, []), not _owed(tmp_path))[1])
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
    _until(lambda: (monitor.tick(_coordinator(), 0, []), not _owed(tmp_path))[1])
    monitor.close()
    WorkPaths(tmp_path).news.unlink()
    silent = _monitor(tmp_path)
    silent.tick(_coordinator(World(0, Faults())), 0, [])
    silent.close()
    assert not WorkPaths(tmp_path).news.exists()
