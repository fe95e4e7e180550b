"""Laws of the work folder's modes: its user's alone, or one group's; refused where others could replace what jobs run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from grp import getgrall
from pathlib import Path

import pytest
from support.with_root import GROUP as SHARING
from support.with_root import as_user

from coordinator.errors import OperatorError
from coordinator.intake import work_folder
from coordinator.intake.inbox import Inbox, Notice, leave, refusals, refuse
from coordinator.intake.work_folder import open_folder
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import write_atomic

GROUP = next(g.gr_name for g in getgrall() if g.gr_gid == os.getegid())
OWN = ("inbox/refused", "inbox/suites")  # to which members of the group may not write
need_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def load(work: Path, group: str | None = None) -> None:
    work_folder.load(None, work, {"shared_group": group})


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_work_folder_is_its_users_alone(tmp_path, open_umask):
    load(tmp_path / "a" / "work")
    assert mode(tmp_path / "a" / "work") == 0o700


def test_a_group_that_shares_it_reads_all_and_writes_to_the_inbox_alone(tmp_path, open_umask):
    work = tmp_path / "work"
    load(work, GROUP)
    assert mode(work) == 0o2750
    assert mode(work / "inbox") == 0o3770
    assert {name: mode(work / name) for name in OWN} == dict.fromkeys(OWN, 0o2750)
    assert {path.stat().st_gid for path in (work, work / "inbox")} == {os.getegid()}
    load(work, GROUP)  # nothing to do


def test_a_folder_with_other_files_keeps_its_modes(tmp_path):
    """As a project's folder that others read: the user narrows it, or names another."""
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(OperatorError, match=f"chmod 700 {tmp_path}"):
        load(tmp_path)
    assert mode(tmp_path) == 0o755


@pytest.mark.parametrize("group", [None, GROUP])
def test_a_folder_that_its_user_has_closed_is_refused_and_read_as_it_is(tmp_path, group):
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(0o555)
    with pytest.raises(OperatorError, match=rf"read-only \(0555\): `chmod u\+w {work}`"):
        load(work, group)
    work_folder.load(None, work, {"shared_group": group}, makes=False)
    assert mode(work) == 0o555


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o2770])
@pytest.mark.parametrize("group", [None, GROUP])
def test_a_folder_that_others_may_write_is_refused_with_what_to_type(tmp_path, bits, group):
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(bits)
    own, mixed = f"`chmod -R go-w {work}`", "give --work-dir a new folder"
    for entry, todo in (("", own), ("novel.txt", mixed), ("daemon.lock", own)):
        (work / entry).touch()
        with pytest.raises(OperatorError, match=f"may write to the work folder.*{todo}") as refused:
            load(work, group)
        assert "\n" not in str(refused.value)
    assert mode(work) == bits
    subprocess.run(["chmod", "-R", "go-w", str(work)], check=True)
    load(work, group)


def test_a_folder_that_others_may_read_is_narrowed_in_one_line(tmp_path, caplog):
    work = tmp_path / "work"
    work.mkdir()
    work.chmod(0o755)
    load(work)
    load(work)
    assert mode(work) == 0o700
    assert [r.getMessage() for r in caplog.records] == [
        f"{work} is now readable by you alone (it was 0755): shared_group names a group that may read it"
    ]


def test_a_folder_that_is_shared_no_more_is_private_again(tmp_path):
    load(tmp_path / "work", GROUP)
    load(tmp_path / "work")
    assert {mode(tmp_path / "work" / name) for name in (*OWN, "inbox", ".")} == {0o700}


def test_a_group_that_is_unknown_is_refused_before_it_could_read(tmp_path):
    with pytest.raises(OperatorError, match=r"shared_group = 'no-such-group'.*no such group"):
        load(tmp_path / "work", "no-such-group")
    assert mode(tmp_path / "work") == 0o700


def test_a_private_folder_is_shared_only_once_its_group_can_read_what_is_there(tmp_path, open_umask):
    work = tmp_path / "work"
    load(work)
    write_atomic(work / "run-1" / "journal", b"")
    with pytest.raises(OperatorError, match=r"cannot read run-1.*`chgrp -R") as refused:
        load(work, GROUP)
    typed = str(refused.value).split("`")[1]
    subprocess.run(["sh", "-c", typed], check=True)
    load(work, GROUP)
    write_atomic(work / "run-1" / "later", b"")
    assert {mode(path) for path in (work, work / "run-1")} == {0o2750}
    assert {mode(path) for path in (work / "run-1").iterdir()} == {0o640}


def test_redis_files_stay_closed_to_the_group(tmp_path):
    work = tmp_path / "work"
    load(work)
    (work / "redis").mkdir()
    (work / "redis").chmod(0o750)  # as a `chmod -R g+rX` leaves it
    load(work, GROUP)
    assert mode(work / "redis") == 0o700


@pytest.fixture
def shared() -> Iterator[WorkPaths]:
    """A work folder of root that the group of `nobody` shares."""
    folder = Path(tempfile.mkdtemp(prefix="shared-"))
    folder.chmod(0o755)
    try:
        load(folder / "work", SHARING)
        yield WorkPaths(folder / "work")
    finally:
        shutil.rmtree(folder)


@need_root
def test_a_member_leaves_checkpoints_reads_refusals_and_changes_nothing_else(shared):
    own = leave(shared, Notice(checkpoint="/runs/own"))
    leave(shared, Notice(checkpoint="/runs/refused"))
    refuse(Inbox(shared).look()[1], "no", 1e9)
    (shared.root / "journal").touch(0o640)

    def act() -> None:
        os.umask(0o077)
        load(shared.root, SHARING)  # before any daemon ran
        leave(shared, Notice(checkpoint="/runs/theirs"))
        leave(shared, Notice(command="cancel", evaluation_id="e"))
        assert [r.checkpoint for r in refusals(shared, 1e9)] == ["/runs/refused"]
        changes = [
            own.unlink,
            lambda: own.rename(own.with_suffix(".bad")),
            lambda: own.write_text("{}"),
            lambda: (shared.root / "journal").write_text(""),
            (shared.inbox / "refused" / "x").touch,
            (shared.root / "new").mkdir,
            shared.inbox.rmdir,
        ]
        for change in changes:
            with pytest.raises(PermissionError):
                change()

    as_user(act, member=True)
    files = Inbox(shared).look()
    assert [(f.notice.checkpoint, bool(f.member), bool(f.wrong)) for f in files] == [
        ("/runs/own", False, False),
        ("/runs/theirs", True, False),
        ("", True, True),
    ]


@need_root
def test_a_folder_that_many_may_write_is_no_work_folder_of_one_of_them():
    folder = Path(tempfile.mkdtemp(prefix="many-"))
    folder.chmod(0o1777)

    def act() -> None:
        with pytest.raises(OperatorError, match="more users than you may write to it: give --work-dir"):
            open_folder(folder, None)

    try:
        as_user(act)
    finally:
        shutil.rmtree(folder)


@need_root
def test_a_user_cannot_share_with_a_group_of_others():
    folder = Path(tempfile.mkdtemp(prefix="member-"))
    folder.chmod(0o777)

    def act() -> None:
        with pytest.raises(OperatorError, match="you are not a member"):
            open_folder(folder / "work", "root")

    try:
        as_user(act)
    finally:
        shutil.rmtree(folder)
