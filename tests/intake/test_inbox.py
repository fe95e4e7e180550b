"""Laws of the inbox: what lies in it comes until it is dealt with, and what is no notice asks for nothing and stops nothing."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest
from support.daemons import SUITE, announce, daemon, put, small, taken
from support.simulated.parts import record
from support.with_root import USER

from coordinator.allocation import cordons
from coordinator.config.schema import Config, WatchConfig
from coordinator.evaluation.events import Accepted
from coordinator.intake import inbox, pending
from coordinator.intake.inbox import Inbox, Notice, done, leave, refuse
from coordinator.intake.work_folder import DROP
from coordinator.runtime import service
from coordinator.runtime.journal import Journal
from coordinator.runtime.service import Service
from evaljobs.contract.paths import WorkPaths

pytestmark = pytest.mark.usefixtures("every_tick")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nINFO all is well"


@pytest.fixture
def ears(tmp_path: Path) -> Service:
    made = daemon(tmp_path / "work", Config(watch=WatchConfig(suite=SUITE)))
    made.paths.inbox.mkdir()
    return made


@pytest.fixture
def work(ears: Service) -> WorkPaths:
    return ears.paths


def announced(inbox: Inbox) -> list[str]:
    return [file.notice.checkpoint for file in inbox.look() if not file.wrong]


def shown(ears: Service) -> pending.Checkpoints:
    return pending.read(ears.paths, time.time())


def test_a_notice_comes_until_it_is_dealt_with(work: WorkPaths) -> None:
    """Oldest first; to deal with it twice is fine; what is still being written is not there, and goes after an hour."""
    for name in ("/a", "/b"):
        leave(work, Notice(checkpoint=name))
    for number in range(2):
        (work.inbox / f"{number}.json.tmp").write_text('{"check')
    os.utime(work.inbox / "0.json.tmp", (1, 1))
    assert len(inbox.waiting_files(work)) == len([*work.inbox.glob("*.tmp")]) == 2, (
        "a command removes nothing"
    )
    reader = Inbox(work)
    for _ in range(2):
        assert announced(reader) == announced(Inbox(work)) == ["/a", "/b"]
    first = reader.look()[0]
    for _ in range(2):
        done(first)
    assert announced(reader) == ["/b"]
    assert [file.name for file in work.inbox.glob("*.tmp")] == ["1.json.tmp"]


BAD = {
    "half of a notice": "{",
    "a step that is none": '{"checkpoint": "/c", "step": "soon"}',
    "a field of another version": '{"checkpoint": "/c", "colour": 1}',
    "nested without end": "[" * 10_000,
    "half a character": '{"checkpoint": "\\ud800", "suite": "a\\nb"}',
    "too long": f'{{"checkpoint": "{"c" * (2 << 20)}"}}',
    "a long path": f'{{"checkpoint": "{"c" * 70_000}"}}',
    "no checkpoint": "{}",
    "commands of a terminal": json.dumps({"checkpoint": EVIL, "suite": EVIL, EVIL: EVIL}),
    "a command of no name": json.dumps({"command": EVIL}),
}


def test_what_is_no_notice_is_refused_by_name_and_hides_no_other(
    tmp_path: Path, ears: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """With its file and its reason in `refused/`, and what it claims to be of; in lines that any file and terminal takes."""
    for number, text in enumerate(BAD.values()):
        put(ears, text, f"{number}-{EVIL.replace('/', '')}.json")
    announce(ears, small(tmp_path / "good"))
    ears.tick()
    assert taken(ears) == ["good"]
    refused = shown(ears).refused
    assert [r.checkpoint for r in refused].count("/c") == 1, "two, of which the last is shown"
    texts = [text for r in refused for text in (r.checkpoint, r.suite, r.why)]
    lines = [entry.getMessage() for entry in caplog.records]
    assert len([line for line in lines if "is not evaluated" in line]) == len(BAD)
    assert all(text.isprintable() and len(text) < 5000 for text in (*texts, *lines))
    folder = ears.paths.inbox / "refused"
    assert len(list(folder.glob("*.json"))) == len(list(folder.glob("*.reason"))) == len(BAD)
    assert [entry.name for entry in ears.paths.inbox.iterdir()] == ["refused"]


def test_what_is_no_plain_file_asks_for_nothing(
    tmp_path: Path, ears: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe without a writer is not waited for, and the log does not grow."""
    monkeypatch.chdir(ears.paths.inbox)
    Path("folder.json").mkdir()
    os.mkfifo("pipe.json")
    Path("link.json").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket.json")
    announce(ears, small(tmp_path / "good"))
    for _ in range(3):
        ears.tick()
    assert taken(ears) == ["good"]
    assert ".json" not in caplog.text


@pytest.mark.parametrize("what", ["read_with_status", "os.scandir"])
def test_storage_that_errs_for_a_moment_costs_no_notice(
    work: WorkPaths, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A file is read later; a folder that cannot be listed has what it had."""
    leave(work, Notice(checkpoint="/a"))
    reader = Inbox(work)
    known = announced(reader) if what == "os.scandir" else []

    def away(*_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(f"coordinator.intake.inbox.{what}", away)
        assert announced(reader) == known
    assert announced(reader) == ["/a"]


def test_many_notices_hide_none(tmp_path: Path, ears: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads and examines a bounded number; a checkpoint that is never whole keeps no other one waiting."""
    ears._inbox.most = 20
    monkeypatch.setattr(service, "MOST_LOOKS", 10)
    monkeypatch.setattr(pending, "MOST_WAITING", 30)
    for number in range(50):
        (tmp_path / f"never-{number}").mkdir()
        announce(ears, tmp_path / f"never-{number}")
    announce(ears, small(tmp_path / "good"))
    for _ in range(8):
        ears.tick()
    assert taken(ears) == ["good"]
    assert len(shown(ears).waiting) == pending.MOST_WAITING
    assert len(list(ears.paths.inbox.glob("*.json"))) == 50


def test_a_hundred_notices_of_a_checkpoint_are_one_pending_checkpoint(tmp_path: Path, ears: Service) -> None:
    """Of the highest priority; all of them go once it is accepted."""
    place = small(tmp_path / "step-1")
    for number in range(100):
        announce(ears, place, priority=number % 7)
    ears.tick()
    (running,) = ears.coordinator.running.values()
    assert running.state.record.priority == 6
    assert not list(ears.paths.inbox.glob("*.json"))


def test_refused_files_are_bounded_and_go_after_a_week(
    work: WorkPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest are kept; of one checkpoint the last refusal is shown."""
    monkeypatch.setattr(inbox, "MOST_REFUSED", 5)
    now = 1e9
    for number in range(8):
        leave(work, Notice(checkpoint=f"/{number // 2}"))
        refuse(Inbox(work).look()[0], "no", now + number)
    assert [(r.checkpoint, r.at - now) for r in inbox.refusals(work, now + 9)] == [
        ("/1", 3),
        ("/2", 5),
        ("/3", 7),
    ]
    assert len(list((work.inbox / "refused").iterdir())) == 10
    later = now + inbox.REFUSED_SECONDS + 6
    assert [r.checkpoint for r in inbox.refusals(work, later)] == ["/3"]
    leave(work, Notice(checkpoint="/new"))
    refuse(Inbox(work).look()[0], "no", later)
    assert len(list((work.inbox / "refused").iterdir())) == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", 10**400), ("priority", -(10**30)), ("step", 10**400), ("noticed_at", 1e308)],
    ids=lambda value: str(value)[:9],
)
def test_no_number_of_a_notice_ends_an_evaluation_or_hides_another(
    field: str, value: object, ears: Service, tmp_path: Path
) -> None:
    put(ears, json.dumps({"checkpoint": str(small(tmp_path / "step-4")), field: value}))
    announce(ears, small(tmp_path / "step-5", seed=1))
    for _ in range(3):
        ears.tick()
        ears.coordinator.tick()
    assert "step-5" in taken(ears)
    assert ears.coordinator.parked == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give a file away")
def test_the_name_of_a_members_file_commands_no_terminal(
    ears: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal names the file, in `status` and in the log."""
    ears.paths.inbox.chmod(DROP)
    notice = json.dumps({"checkpoint": "/c", "suite": "none"})
    os.chown(put(ears, notice, f"1-{EVIL.replace('/', '')}.json"), USER, -1)
    ears.tick()
    (refused,) = shown(ears).refused
    assert "no suite named 'none'" in refused.why
    assert all(text.isprintable() for text in (refused.why, *(r.getMessage() for r in caplog.records)))


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["retry", "cancel"])
@pytest.mark.parametrize(
    "name", ["../stranger", "/{stranger}", "x/../../stranger", "..", ".", "", "\0", "a" * 5000]
)
def test_a_command_resumes_no_journal_outside_of_the_work_folder(
    name: str, what: str, ears: Service, tmp_path: Path
) -> None:
    """A journal names programs and paths: who wrote it could run code as the daemon's user."""
    root = tmp_path / "stranger"
    root.mkdir()
    journal = Journal(root / "journal.jsonl")
    journal.append([Accepted(at=1.0, record=record().model_copy(update={"evaluation_id": root.name}))])
    journal.close()
    before = (root / "journal.jsonl").read_bytes()
    put(ears, json.dumps({"command": what, "evaluation_id": name.replace("/{stranger}", str(root))}))
    ears.tick()
    assert ears.coordinator.running == {}
    assert ears.coordinator.parked == {}
    assert (root / "journal.jsonl").read_bytes() == before
    assert [entry.name for entry in root.iterdir()] == ["journal.jsonl"]
    assert not list(ears.paths.inbox.glob("*.json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot give a file away")
@pytest.mark.parametrize("what", ["evaluate", "cancel", "retry", "release"])
def test_what_another_user_left_is_refused(what: str, ears: Service, tmp_path: Path) -> None:
    """The file's owner decides; the folder is not shared here."""
    fields = {"checkpoint": str(small(tmp_path / "c")), "command": what, "nodes": ["n1"], "seconds": 60.0}
    os.chown(put(ears, json.dumps(fields)), USER, -1)
    ears.tick()
    assert taken(ears) == []
    assert cordons.read(ears.paths.nodes, time.time()) == {}
    assert len(list((ears.paths.inbox / "refused").glob("*.reason"))) == 1


@pytest.mark.parametrize("seconds", [1e308, -1e308, 0.5])
def test_no_command_leaves_cordons_that_cannot_be_read(seconds: float, ears: Service) -> None:
    """An unending cordon of a node, or of what is no node: the others, and the next daemon, go on."""
    cordons.cordon(ears.paths.nodes, ["n1"], time.time() + 600, time.time())
    text = json.dumps({"command": "release", "nodes": ["n2", "\x1b[2J", "a b"], "seconds": seconds})
    put(ears, text.replace("1e+308", "1e999"))
    ears.tick()
    assert "n1" in cordons.read(ears.paths.nodes, time.time())
    json.loads(ears.paths.nodes.read_text(), parse_constant=pytest.fail)


def test_commands_that_cannot_be_obeyed_yet_hide_no_other(
    ears: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        leave(ears.paths, Notice(command="cancel", evaluation_id=f"e{number}"))
    asked: list[str] = []

    def away(evaluation_id: str, _reason: str) -> None:
        asked.append(evaluation_id)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(ears.coordinator, "cancel", away)
    for _ in range(2):
        ears.tick()
    assert asked == ["e0", "e1", "e2"] * 2
    assert len(list(ears.paths.inbox.glob("*.json"))) == 3
