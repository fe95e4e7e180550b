"""Attacks of another user of the same node, or of one who may write to the spool folder: planted files, decoys, locks."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from pathlib import Path

import pytest
from dev_cluster.testing import wait_until
from support.daemons import SUITE, daemon, small, taken
from support.simulated.parts import record
from support.with_root import USER, as_user, needs_open_code

from coordinator.allocation import cordons
from coordinator.base import process_identity
from coordinator.config.schema import Config, WatchConfig
from coordinator.errors import EvalspanError
from coordinator.evaluation.events import Accepted
from coordinator.intake import pending
from coordinator.runtime.journal import Journal
from coordinator.runtime.operator_commands import obey_commands
from coordinator.runtime.service import Service
from coordinator.services import redis_server
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import read_record

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
STRANGER = USER + 1


@pytest.fixture
def ears(tmp_path: Path, every_tick: None) -> Service:
    made = daemon(tmp_path / "work", Config(watch=WatchConfig(roots=(tmp_path / "run",), suite=SUITE)))
    (made.paths.spool / "commands").mkdir(parents=True)
    return made


def command(ears: Service, name: str = "1.json", **fields: object) -> Path:
    file = ears.paths.spool / "commands" / name
    file.write_text(json.dumps(fields))
    return file


PATHS = ["../stranger", "/{stranger}", "x/../../stranger", "..", ".", "", "\0", "a" * 5000]


@pytest.mark.parametrize("what", ["retry", "cancel"])
@pytest.mark.parametrize("name", PATHS, ids=lambda name: name[:20] or "empty")
def test_a_command_resumes_no_journal_outside_of_the_work_folder(
    name: str, what: str, ears: Service, tmp_path: Path
) -> None:
    """A journal names programs and paths: who wrote it could run code as the daemon's user."""
    root = tmp_path / "stranger"
    root.mkdir()
    named = name.replace("/{stranger}", str(root))
    journal = Journal(root / "journal.jsonl")
    base = record().model_copy(update={"evaluation_id": root.name})
    journal.append([Accepted(at=1.0, record=base)])
    journal.close()
    before = (root / "journal.jsonl").read_bytes()
    command(ears, command=what, evaluation_id=named)
    obey_commands(ears.coordinator)
    assert ears.coordinator.running == {}
    assert ears.coordinator._parked.by_id == {}
    assert (root / "journal.jsonl").read_bytes() == before
    assert sorted(p.name for p in root.iterdir()) == ["journal.jsonl"]
    assert list((ears.paths.spool / "commands").glob("*.json")) == []


@as_root
@pytest.mark.parametrize("what", ["cancel", "retry", "release"])
def test_a_command_of_another_user_is_not_obeyed(
    what: str, ears: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """The file system vouches for who left it: the file's owner, or the owner of a link."""
    for number, plant in enumerate(("file", "link")):
        file = command(ears, f"{number}.json", command=what, evaluation_id="x", nodes=["n1"], seconds=60.0)
        if plant == "link":
            file.rename(file.with_suffix(".txt"))
            file.symlink_to(file.with_suffix(".txt"))
        os.lchown(file, STRANGER, STRANGER)
    obey_commands(ears.coordinator)
    assert cordons.read(ears.paths.nodes, time.time()) == {}
    assert sum("is passed over: " in r.getMessage() for r in caplog.records) == 2
    assert list((ears.paths.spool / "commands").glob("*.json")) == []


@pytest.mark.parametrize("seconds", [1e308, -1e308, 0.5])
def test_no_command_leaves_cordons_that_cannot_be_read(seconds: float, ears: Service) -> None:
    """An unending cordon of a node, or of what is no node: the others, and the next daemon, go on."""
    cordons.cordon(ears.paths.nodes, ["n1"], time.time() + 600, time.time())
    file = ears.paths.spool / "commands" / "1.json"
    text = json.dumps({"command": "release", "nodes": ["n2", "\x1b[2J", "a b"], "seconds": seconds})
    file.write_text(text.replace("1e+308", "1e999"))
    obey_commands(ears.coordinator)
    assert "n1" in cordons.read(ears.paths.nodes, time.time())
    json.loads(ears.paths.nodes.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("place", ["spool", "spool/commands", "submissions"])
@pytest.mark.parametrize("kind", ["folder", "full folder", "pipe", "link", "socket"])
def test_what_is_planted_among_notices_is_said_once_and_is_gone(
    place: str, kind: str, ears: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a file of its `*.bad` name is there: the daemon's log does not grow by it for months."""
    folder = ears.paths.root / place
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("1-x.json", "1-x.bad"):
        match kind:
            case "folder":
                (folder / name).mkdir()
            case "full folder":
                (folder / name).mkdir()
                (folder / name / "x").touch()
            case "pipe":
                os.mkfifo(folder / name)
            case "link":
                (folder / name).symlink_to("/etc/passwd")
            case _:
                with socket.socket(socket.AF_UNIX) as made:
                    os.chdir(folder)
                    made.bind(name)
    for _ in range(5):
        ears.tick()
    said = [r for r in caplog.records if "1-x" in r.getMessage()]
    assert len(said) <= 1
    assert not list(folder.glob("*.json"))


def test_a_files_name_writes_to_no_terminal_and_no_second_line(
    ears: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evil = "1-\x1b[2J\nINFO all is well"
    (ears.paths.spool / f"{evil}.json").write_text("{")
    (ears.paths.spool / f"{evil}2.json").mkdir()
    command(ears, f"{evil}.json", command="cancel", evaluation_id=evil)
    command(ears, f"{evil}3.json", command=evil)
    (tmp_path / "run").mkdir()
    (ears.paths.spool / f"{evil}4.json").write_text(
        json.dumps({"checkpoint": f"{tmp_path}/run", "suite": SUITE})
    )
    ears.tick()
    told = read_record(ears.paths.pending, pending.PendingFile)
    shown = [t for w in (*told.waiting, *told.refused) for t in (w.checkpoint, w.suite, w.why)]
    shown += [w.evaluation_id for w in told.waiting]
    assert len(told.waiting) + len(told.refused) == 3
    assert all(text.isprintable() for text in shown)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) >= 4
    assert all(line.isprintable() for line in lines)


@needs_open_code
@as_root
def test_a_decoy_of_the_server_is_left_alone_and_keeps_no_server_from_starting(shared: Path) -> None:
    """A stranger's process with the server's command line, which names the work folder's configuration."""
    work = WorkPaths(shared / "home" / "work")
    process_identity.boot_id()  # codecs are imported before a process becomes another user
    decoy = shared / "stranger" / redis_server.binary().name
    config = work.redis.absolute() / "valkey.conf"
    pid = os.fork()
    if pid == 0:
        become(STRANGER)
        os.execv(  # noqa: S606
            "/bin/bash",
            [str(decoy), "-c", "sleep 60; true", str(config)],
        )
    try:
        wait_until(lambda: str(config).encode() in Path(f"/proc/{pid}/cmdline").read_bytes())

        def act() -> None:
            started = time.monotonic()
            RedisServer(work)._end_unrecorded()
            assert time.monotonic() - started < redis_server.STOP_SECONDS

        as_user(act)
        found = process_identity.identify(pid)
        assert found is not None
        RedisServer(work)._end_unrecorded()  # by root, who could end it
        assert process_identity.identify(pid) == found
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@as_root
@pytest.mark.parametrize("plant", ["a link to a folder of the user's", "a folder", "a file"])
def test_a_squatter_of_the_sockets_folder_gets_no_socket(plant: str, shared: Path) -> None:
    """Work folders with long paths have their socket in /tmp, under a name that all can foresee."""
    work = WorkPaths(shared / "home" / ("w" * 120))

    def foreseen() -> Path:
        path = os.fsencode((work.redis / "redis.sock").absolute())
        return Path(f"/tmp/evalspan-{USER}-{hashlib.sha256(path).hexdigest()[:16]}")

    place = foreseen()
    (shared / "home" / "own").mkdir()
    os.chown(shared / "home" / "own", USER, USER)
    match plant:
        case "a folder":
            place.mkdir(mode=0o777)
        case "a file":
            place.touch()
        case _:
            place.symlink_to(shared / "home" / "own")
    os.lchown(place, STRANGER, STRANGER)

    def act() -> None:
        with pytest.raises((EvalspanError, OSError)):
            RedisServer(work, "unix")._socket_path()

    try:
        as_user(act)
        assert list((shared / "home" / "own").iterdir()) == []
    finally:
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


def test_a_notice_among_a_hundred_that_are_never_whole_is_taken(ears: Service, tmp_path: Path) -> None:
    for number in range(100):
        text = json.dumps({"checkpoint": f"{tmp_path}/run/none-{number}", "suite": SUITE})
        (ears.paths.spool / f"{number:04}-x.json").write_text(text)
    small(tmp_path / "run" / "step-1")
    text = json.dumps({"checkpoint": f"{tmp_path}/run/step-1", "suite": SUITE})
    (ears.paths.spool / "9999-x.json").write_text(text)
    ears.tick()
    assert taken(ears) == ["step-1"]
    told = read_record(ears.paths.pending, pending.PendingFile)
    assert len(told.refused) <= pending.MOST_REFUSED
