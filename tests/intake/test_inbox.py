"""Laws of the inbox: each file is taken, waits, is refused by name or asks for nothing, and hides no other; it stays until it
is dealt with. What a member of the group leaves names shipped or listed suites, and places below the roots."""

import errno
import json
import os
import socket
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.commands import typed
from support.daemons import SUITE, announce, daemon, notices, small
from support.simulated.parts import record
from support.with_root import USER

from coordinator.decide.allocation import cordons
from coordinator.decide.evaluation.events import Accepted
from coordinator.intake import inbox, pending, suites
from coordinator.intake.admission import (
    NotAdmittedError,
    admitted_suite,
    loaded_suites,
    missing_places,
    suite_files,
)
from coordinator.intake.inbox import Inbox, InboxFile, Notice, leave_notice, refuse_notice, remove_notice
from coordinator.intake.suites import suite_names
from coordinator.intake.work_folder import SHARED_INBOX_MODE
from coordinator.runtime import service
from coordinator.runtime.journal import Journal
from coordinator.site.config.loading import load_config
from coordinator.site.config.schema import Config, WatchConfig

pytestmark = pytest.mark.usefixtures("every_tick")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nINFO all is well"
MINE = 'name = "{}"\n[[task]]\nname = "toy"\n'
ITS = "RUN/ITS"  # a checkpoint of the row's own
DAMAGED = "e9-suite-00000009"


def _socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


# What a file holds, or how else it is made, and what becomes of it: "taken: SUITE", "waits: WHY", "refused: WHY", "obeyed", "left".
NO_NAMES = ("../stranger", "WORK/../stranger", "x/../../stranger", "..", ".", "", "\0", "a" * 5000, "nothing")
# fmt: off
OWN = {
    "half of a notice": ("{", "refused: not a notice of this version"),
    "a step that is none": ({"checkpoint": "/c", "step": "soon"}, "refused: not a notice of this version (step"),
    "a field of another version": ({"checkpoint": "/c", "colour": 1}, "refused: not a notice of this version (colour"),
    "nested without end": ("[" * 10_000, "refused: not a notice of this version"),
    "half a character": ('{"checkpoint": "\\ud800", "suite": "a\\nb"}', "refused: not a notice of this version"),
    "too long": ({"checkpoint": "c" * (2 << 20)}, "refused: "),
    "a long path": ({"checkpoint": "c" * 70_000}, "refused: not a notice of this version (checkpoint"),
    "no checkpoint": ("{}", "refused: it names no checkpoint"),
    "commands of a terminal": ({"checkpoint": EVIL, "suite": EVIL, EVIL: EVIL}, "refused: not a notice of this version"),
    "letters that turn a line around": ({"checkpoint": "RUN/a\u202eb"}, "refused: not a notice of this version (checkpoint"),
    "a command of no name": ({"command": EVIL}, "refused: not a notice of this version (command"),
    "a step of 400 digits": ({"checkpoint": ITS, "step": 10**400}, "refused: not a notice of this version (step"),
    "a priority of 400 digits": ({"checkpoint": ITS, "priority": 10**400}, f"taken: {SUITE}"),
    "a priority far below all": ({"checkpoint": ITS, "priority": -(10**30)}, f"taken: {SUITE}"),
    "a time without end": ({"checkpoint": ITS, "noticed_at": 1e308}, f"taken: {SUITE}"),
    "a folder": (Path.mkdir, "left"),
    "a pipe without a writer": (os.mkfifo, "left"),
    "a link": (lambda path: path.symlink_to("/dev/zero"), "left"),
    "a socket": (_socket, "left"),
    "a checkpoint": ({"checkpoint": ITS}, f"taken: {SUITE}"),
    "the default suite": ({"checkpoint": ITS, "suite": "default"}, f"taken: {SUITE}"),
    "a suite of the settings": ({"checkpoint": ITS, "suite": "mine"}, "taken: mine"),
    "a suite of the settings by its file": ({"checkpoint": ITS, "suite": "RUN/mine.toml"}, "taken: mine"),
    "any suite file": ({"checkpoint": ITS, "suite": "RUN/other.toml"}, "taken: other"),
    "any place": ({"checkpoint": "RUN/../else/ITS"}, f"taken: {SUITE}"),
    "a name of no file": ({"checkpoint": "RUN/" + "x" * 300}, "refused: "),
    "links in a circle": ({"checkpoint": "RUN/circle"}, "refused: "),
    "no folder": ({"checkpoint": "RUN/nowhere"}, "refused: RUN/nowhere: no such folder"),
    "a config of another kind": ({"checkpoint": "RUN/odd"}, "waits: architectures must be a list of names"),
    "a suite mistyped": ({"checkpoint": ITS, "suite": "quickstrat"}, "refused: no suite named 'quickstrat'"),
    "a suite of a long name": ({"checkpoint": ITS, "suite": "s" * 300}, "refused: no suite named"),
    **{f"{what} of {name[:20]!r}": ({"command": what, "evaluation_id": name}, "refused: ") for what in ("retry", "cancel") for name in NO_NAMES},
    "retry of a damaged journal": ({"command": "retry", "evaluation_id": DAMAGED}, "refused: "),
    "a cordon without end": ('{"command": "release", "nodes": ["n2", "\\u001b[2J", "a b"], "seconds": 1e999}', "refused: "),
    "a cordon that never began": ({"command": "release", "nodes": ["n2", "\x1b[2J", "a b"], "seconds": -1e308}, "obeyed"),
    "a rescore without a record": ({"command": "rescore", "nodes": ["n1"]}, "refused: it contains no record of an evaluation"),
    "a release with a record": ({"command": "release", "record": record().model_dump(mode="json")}, "obeyed"),
    "a cordon of what is no node": ({"command": "release", "nodes": ["n2", "\x1b[2J", "a b"], "seconds": 0.5}, "obeyed"),
}
MEMBERS = {
    "a checkpoint": ({"checkpoint": ITS}, f"taken: {SUITE}"),
    "a listed suite": ({"checkpoint": ITS, "suite": "mine"}, "taken: mine"),
    "a suite file": ({"checkpoint": ITS, "suite": "RUN/other.toml"}, "refused: a notice names a suite, not a file: list the file in [watch] suites and announce 'other'"),
    "a link out of the roots": ({"checkpoint": "RUN/link"}, "refused: TOP/else is not below any of [watch] roots"),
    "dots that lead out of the roots": ({"checkpoint": "RUN/../else/ITS"}, "refused: TOP/else/ITS is not below any of [watch] roots"),
    "a field of another version": ({"checkpoint": ITS, "allow_bin": True}, "refused: not a notice of this version (allow_bin"),
    "a suite mistyped": ({"checkpoint": ITS, "suite": "mien"}, "refused: no suite named 'mien': [watch] suites has: mine"),
    **{what: ({"command": what, "evaluation_id": "e1", "nodes": ["n1"], "seconds": 60.0}, "refused: USER left it: ask ") for what in ("cancel", "retry", "release")},
}
# fmt: on


def site(top):
    """A daemon with roots and a listed suite; an evaluation beside the work folder, and one whose journal is damaged in it."""
    for folder in ("run/odd", "else", "stranger", f"work/{DAMAGED}"):
        (top / folder).mkdir(parents=True)
    (top / "work").chmod(0o700)
    for name in ("mine", "other"):
        (top / "run" / f"{name}.toml").write_text(MINE.format(name))
    (top / "run" / "odd" / "config.json").write_text('{"architectures": 5}')
    (top / "run" / "circle").symlink_to("circle")
    (top / "run" / "link").symlink_to(top / "else")
    journal = Journal(top / "stranger" / "journal.jsonl")
    journal.append([Accepted(at=1.0, record=record().model_copy(update={"evaluation_id": "stranger"}))])
    journal.close()
    (top / "work" / DAMAGED / "journal.jsonl").write_text("{}\n{}\n")
    made = daemon(
        top / "work",
        Config(watch=WatchConfig(roots=(top / "r[u]n",), suites=(top / "run/mine.toml",), suite=SUITE)),
    )
    made.paths.inbox.mkdir()
    return made


def became(ears, path, notice):
    """What became of a file, as in the rows."""
    reason = ears.paths.inbox / "refused" / f"{path.stem}.reason"
    if reason.exists():
        why = json.loads(reason.read_text())["why"]
        assert why.isprintable()
        return f"refused: {why}"
    for running in ears.coordinator.evaluations.running.values():
        if os.path.realpath(running.state.record.checkpoint.source) == os.path.realpath(
            str(notice.get("checkpoint"))
        ):
            return f"taken: {running.state.record.suite.name}"
    if not os.path.lexists(path):
        return "obeyed"
    waiting = [
        w.why
        for w in pending.read_pending(ears.paths, 0.0).waiting
        if w.checkpoint == notice.get("checkpoint")
    ]
    return f"waits: {waiting[0]}" if waiting else "left"


@pytest.mark.parametrize(
    "shared", [False, pytest.param(True, marks=pytest.mark.skipif(os.geteuid() != 0, reason="not root"))]
)
def test_each_file_is_taken_waits_is_refused_or_left_as_its_row_says(tmp_path, shared, monkeypatch, caplog):
    """All rows lie in one inbox, so none hides another. What is no plain file is not waited for, and no log names it. What is
    shown fits any file and terminal. A journal names programs: none outside of the work folder is resumed. Of a member, where
    the folder is not shared, nothing is taken."""
    ears = site(tmp_path)
    monkeypatch.chdir(tmp_path)
    ears.paths.inbox.chmod(SHARED_INBOX_MODE if shared else 0o700)
    cordons.cordon_nodes(ears.paths.nodes, ["n1"], time.time() + 600, time.time())
    before = (tmp_path / "stranger" / "journal.jsonl").read_bytes()

    def meant(text, number):
        words = {
            "ITS": f"step-{number}",
            "RUN": "TOP/run",
            "WORK": "TOP/work",
            "TOP": str(tmp_path),
            "USER": str(USER),
        }
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    files = {}
    rows = [(f"own: {name}", row, 0) for name, row in OWN.items()]
    rows += [(f"member's: {name}", row, USER) for name, row in MEMBERS.items() if os.geteuid() == 0]
    for number, (name, (holds, becomes), owner) in enumerate(rows):
        path, notice = ears.paths.inbox / f"{number:03}-{EVIL.replace('/', '')}.json", {}
        if callable(holds):
            holds(path)
        else:
            text = holds if isinstance(holds, str) else json.dumps(holds)
            path.write_text(text := meant(text, number))
            path.chmod(0o600)
            os.chown(path, owner or -1, -1)
            notice = json.loads(text) if isinstance(holds, dict) else {}
            if "ITS" in str(holds):
                small(Path(notice["checkpoint"]), seed=number)
        files[name] = (
            path,
            notice,
            meant(becomes, number) if shared or not owner else f"refused: {USER} left it: ask ",
        )
    for _ in range(3):
        ears.tick()
        ears.coordinator.tick()
    found = {name: became(ears, path, notice) for name, (path, notice, _) in files.items()}
    for name, (path, _, becomes) in files.items():
        kind, _, words = becomes.partition(": ")
        assert found[name].startswith(kind), (name, found[name])
        assert words in found[name], (name, found[name])
        assert kind != "left" or not any(path.name[:4] in entry.getMessage() for entry in caplog.records)
    assert (tmp_path / "stranger" / "journal.jsonl").read_bytes() == before
    assert [entry.name for entry in (tmp_path / "stranger").iterdir()] == ["journal.jsonl"]
    assert "n1" in cordons.read_cordons(ears.paths.nodes, time.time())
    assert record().evaluation_id not in ears.coordinator.evaluations.running
    json.loads(ears.paths.nodes.read_text(), parse_constant=pytest.fail)
    lines = [entry.getMessage() for entry in caplog.records]
    refused = [name for name, what in found.items() if what.startswith("refused")]
    assert len([line for line in lines if "is not evaluated" in line or "is skipped" in line]) == len(refused)
    assert all(line.isprintable() and len(line) < 6000 for line in lines)
    shown = json.loads(typed("status", "--json", "--work-dir", ears.paths.root).stdout)
    known = pending.read_pending(ears.paths, time.time())
    assert shown["waiting"] == [w.model_dump() for w in known.waiting]
    assert shown["refused"] == [r.model_dump(exclude={"command"}) for r in known.refused]
    assert all(
        t.isprintable() and len(t) < 5000 for r in known.refused for t in (r.checkpoint, r.suite, r.why)
    )


@pytest.fixture
def ears(tmp_path):
    made = daemon(tmp_path / "work", Config(watch=WatchConfig(suite=SUITE)))
    made.paths.inbox.mkdir()
    return made


@pytest.fixture
def work(ears):
    return ears.paths


def announced(reader):
    return [file.notice.checkpoint for file in reader.look() if not file.wrong]


def test_a_notice_comes_until_it_is_dealt_with(work):
    """Oldest first; to deal with it twice is fine; what is still being written is not there, and goes after an hour. A command
    that looks removes nothing."""
    for name in ("/a", "/b"):
        leave_notice(work, Notice(checkpoint=name))
    for number in range(2):
        (work.inbox / f"{number}.json.tmp").write_text('{"check')
    os.utime(work.inbox / "0.json.tmp", (1, 1))
    assert len(inbox.waiting_files(work)) == len([*work.inbox.glob("*.tmp")]) == 2
    reader = Inbox(work)
    for _ in range(2):
        assert announced(reader) == announced(Inbox(work)) == ["/a", "/b"]
    first = reader.look()[0]
    for _ in range(2):
        remove_notice(first)
    assert announced(reader) == ["/b"]
    assert [file.name for file in work.inbox.glob("*.tmp")] == ["1.json.tmp"]


@pytest.mark.parametrize("what", ["read_with_status", "os.scandir"])
def test_storage_that_errs_for_a_moment_costs_no_notice(work, monkeypatch, what):
    """A file is read later; a folder that cannot be listed has what it had."""
    leave_notice(work, Notice(checkpoint="/a"))
    reader = Inbox(work)
    known = announced(reader) if what == "os.scandir" else []

    def away(*_):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr(f"coordinator.intake.inbox.{what}", away)
        assert announced(reader) == known
    assert announced(reader) == ["/a"]


def test_many_notices_hide_none(tmp_path, ears, monkeypatch):
    """A look reads and examines a bounded number; a checkpoint that is never whole keeps no other one waiting. Many of one
    checkpoint are one pending checkpoint, of the highest priority; all of them go once it is accepted."""
    ears._inbox.most = 20
    monkeypatch.setattr(service, "MOST_LOOKS", 10)
    monkeypatch.setattr(pending, "MOST_WAITING", 30)
    for number in range(50):
        (tmp_path / f"never-{number}").mkdir()
        announce(ears, tmp_path / f"never-{number}")
    small(tmp_path / "good")
    for number in range(100):
        announce(ears, tmp_path / "good", priority=number % 7)
    for _ in range(16):
        ears.tick()
    (running,) = ears.coordinator.evaluations.running.values()
    assert (running.state.record.checkpoint.source, running.state.record.priority) == (
        str(tmp_path / "good"),
        6,
    )
    assert len(pending.read_pending(work := ears.paths, time.time()).waiting) == pending.MOST_WAITING
    assert len(list(work.inbox.glob("*.json"))) == 50


def test_refused_files_are_bounded_and_go_after_a_week(work, monkeypatch):
    """The newest are kept; of one checkpoint the last refusal is shown."""
    monkeypatch.setattr(inbox, "MOST_REFUSED", 5)
    now, folder = 1e9, work.inbox / "refused"

    def refuse_one(name, at):
        leave_notice(work, Notice(checkpoint=name))
        refuse_notice(Inbox(work).look()[0], "no", at)
        return len(list(folder.iterdir()))

    assert [refuse_one(f"/{number // 2}", now + number) for number in range(8)][-1] == 10
    shown = [(r.checkpoint, r.at - now) for r in inbox.read_refusals(work, now + 9)]
    assert shown == [("/1", 3), ("/2", 5), ("/3", 7)]
    later = now + inbox.REFUSED_SECONDS + 6
    assert [r.checkpoint for r in inbox.read_refusals(work, later)] == ["/3"]
    assert refuse_one("/new", later) == 4


def test_commands_that_cannot_be_obeyed_yet_hide_no_other(ears, monkeypatch):
    for number in range(3):
        leave_notice(ears.paths, Notice(command="cancel", evaluation_id=f"e{number}"))
    asked = []

    def away(evaluation_id, _reason):
        asked.append(evaluation_id)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(ears.coordinator.evaluations, "cancel", away)
    for _ in range(2):
        ears.tick()
    assert asked == ["e0", "e1", "e2"] * 2
    assert notices(ears) == 3


# --- what a member's notice may name ----------------------------------------------------------------------------------


@given(st.text())
def test_a_notice_reaches_no_suite_file_that_is_not_listed(name):
    """Whatever it writes: a listed file, the operator's own default, or a name, which only a shipped suite has. A suite in the
    notice itself is the work folder's user's alone.
    """
    watch = WatchConfig(suite="/etc/own.toml", suites=(Path("/suites/mine.toml"),))
    files, spec = suite_files(watch), suites.load_suite("core")
    with pytest.raises(NotAdmittedError, match="holds none"):
        admitted_suite(Notice(suite="core", spec=spec), watch, files)
    assert admitted_suite(Notice(suite="core", spec=spec), watch, files, own=True) == spec
    try:
        found = admitted_suite(Notice.model_construct(suite=name), watch, files)
    except NotAdmittedError:
        assert name not in (*suite_names(), "default", "own", "mine")
    else:
        plain = found == name and "/" not in found and not found.endswith(".toml")
        assert plain or found in ("/etc/own.toml", "/suites/mine.toml")


def test_places_and_suites_of_the_settings_are_those_that_a_notice_names(tmp_path):
    """`suite = "mine"` means the file that a notice names "mine"; relative ones are beside the settings. A misspelt folder is
    named, since it would refuse every checkpoint; a glob may match later."""
    (tmp_path / "mine.toml").write_text(MINE.format("mine"))
    own = tmp_path / "evalspan.toml"
    own.write_text(
        '[watch]\nroots = ["no", "."]\nfolders = ["run*", "nor"]\nsuites = ["mine.toml"]\nsuite = "mine"\n'
    )
    watch = load_config(own, {}).watch
    assert watch.suite == str(tmp_path / "mine.toml")
    assert [s.name for s in loaded_suites(watch)] == ["mine", "mine"]
    missing = {"roots": "no", "folders": "nor"}
    assert missing_places(watch) == [
        f"[watch] {k}: {tmp_path}/{v} does not exist" for k, v in missing.items()
    ]


# --- trained values ---------------------------------------------------------------------------------------------------


def values(work, rank, at, key="ab" * 8):
    place = work.inbox / f"trained-{key}-{rank}.values"
    place.write_text(json.dumps({"at": at, "groups": [rank]}))
    return place


def test_the_values_of_all_ranks_of_one_save_come_to_the_evaluation_as_its_lines(ears, work):
    """Not those that an earlier run, another checkpoint or another user left. A notice that comes again changes nothing; one
    without rank 0's values leaves an empty file, so that a trial says it."""
    leave_notice(work, Notice(checkpoint="/c", trained_values="ab" * 8))
    (file,) = Inbox(work).look()
    evaluation = work.evaluation("id")
    own = [values(work, rank, at) for rank, at in ((0, 100.0), (1, 101.0), (2, 5000.0), (3, 99.0))]
    if os.geteuid() == 0:
        os.chown(own[3], USER, USER)
    else:
        own[3].unlink()
    for rank, malformed in enumerate(("[", "[" * 10_000, f'{{"at": 1{"0" * 400}}}'), start=4):
        (work.inbox / f"trained-{'ab' * 8}-{rank}.values").write_text(malformed)
    other = values(work, 1, 100.0, "cd" * 8)
    for _ in range(2):
        inbox.gather_values([file, file], evaluation)
        lines = evaluation.trained_values.read_text().splitlines()
        assert [json.loads(line)["groups"] for line in lines] == [[0], [1]]
    assert not any(place.exists() for place in own[:3])
    assert other.exists()
    empty = work.evaluation("empty")
    inbox.gather_values([file], empty)
    assert empty.trained_values.read_text() == ""
    plain = work.evaluation("plain")
    inbox.gather_values([InboxFile(file.path, Notice(checkpoint="/c"))], plain)
    assert not plain.trained_values.exists()


def test_values_without_a_notice_go_after_a_week(ears, work):
    new, old = values(work, 0, 1.0), values(work, 1, 1.0)
    os.utime(old, (0, time.time() - inbox.REFUSED_SECONDS - 1))
    os.utime(new, (0, time.time() - inbox.UNFINISHED_SECONDS - 1))
    Inbox(work).look()
    assert (new.exists(), old.exists()) == (True, False)
