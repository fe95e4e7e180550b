"""Laws of the work folder's modes: its user's alone, or one group's; refused where others could replace what jobs run."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from grp import getgrall
from pathlib import Path

import pytest
from support.with_root import GROUP as SHARING
from support.with_root import as_user

from coordinator.errors import OperatorError
from coordinator.intake import work_folder
from coordinator.intake.inbox import Inbox, Notice, leave, refusals, refuse
from coordinator.intake.work_folder import open_folder as open_folder_of
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


def test_modes_follow_the_settings_at_each_start(tmp_path, open_umask, caplog):
    """Its user's alone; a group reads all and writes to the inbox alone, and Redis' files stay closed to it; private again."""
    work = tmp_path / "a" / "work"
    load(work)
    assert mode(work) == 0o700
    work.chmod(0o755)
    load(work)
    load(work)
    assert mode(work) == 0o700
    assert [r.getMessage() for r in caplog.records] == [
        f"{work} is now readable by you alone (it was 0755): shared_group names a group that may read it"
    ]
    (work / "redis").mkdir()
    (work / "redis").chmod(0o750)  # as a `chmod -R g+rX` leaves it
    load(work, GROUP)
    load(work, GROUP)  # nothing to do
    shared = {".": 0o2750, "redis": 0o700, "inbox": 0o3770, **dict.fromkeys(OWN, 0o2750)}
    assert {name: mode(work / name) for name in shared} == shared
    assert {path.stat().st_gid for path in (work, work / "inbox")} == {os.getegid()}
    load(work)
    assert {mode(work / name) for name in shared} == {0o700}


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o2770, 0o555, 0o755])
@pytest.mark.parametrize("group", [None, GROUP])
def test_a_folder_that_is_refused_stays_as_it_is_and_is_taken_once_the_line_is_typed(tmp_path, bits, group):
    """Others may write to it, its user has closed it, or it is a project's that others read. One that reads takes it."""
    work = tmp_path / "work"
    work.mkdir()
    if bits == 0o755:
        (work / "train.py").touch()
    work.chmod(bits)
    if group is None or bits != 0o755:
        with pytest.raises(OperatorError) as refused:
            load(work, group)
        assert "\n" not in str(refused.value)
        assert mode(work) == bits
        subprocess.run(["sh", "-c", str(refused.value).split("`")[1]], check=True)
    work_folder.load(None, work, {"shared_group": group}, makes=False)
    load(work, group)


def test_a_folder_of_other_files_that_others_may_write_is_no_work_folder(tmp_path):
    """Its modes are not evalspan's to change, until it is one."""
    tmp_path.chmod(0o777)
    for entry, todo in (("novel.txt", "give --work-dir a new folder"), ("daemon.lock", "`chmod -R go-w")):
        (tmp_path / entry).touch()
        with pytest.raises(OperatorError, match=f"may write to the work folder.*{todo}"):
            load(tmp_path)


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


@pytest.fixture
def shared(open_folder: Path) -> WorkPaths:
    """A work folder of root that the group of `nobody` shares."""
    load(open_folder / "work", SHARING)
    return WorkPaths(open_folder / "work")


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
@pytest.mark.parametrize(
    ("place", "bits", "group", "says"),
    [
        (".", 0o1777, None, "more users than you may write to it"),
        ("work", 0o777, "root", "you are not a member"),
    ],
)
def test_a_user_takes_no_folder_of_many_and_shares_with_no_group_of_others(
    open_folder, place, bits, group, says
):
    open_folder.chmod(bits)

    def act() -> None:
        with pytest.raises(OperatorError, match=says):
            open_folder_of(open_folder / place, group)

    as_user(act)
