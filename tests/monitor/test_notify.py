"""News of evaluations, by a command and by a webhook."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support.hook import Hook
from support.simulated.parts import record
from support.trainings import leave

from coordinator.monitor import notify
from coordinator.monitor.notify import MOST_WAITING, News, Notifier
from coordinator.runtime.summary import Summary, known_by, of_record

SECONDS = 60.0  # most that a busy machine takes


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
