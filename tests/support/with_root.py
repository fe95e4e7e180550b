"""What only root can give a test: an ordinary user, small disks to fill, and little memory."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from grp import getgrall, getgrnam
from pathlib import Path
from pwd import getpwall

import pytest

USER = 64321  # no user has this uid


GROUP = "nogroup"  # that a member of it, by `as_user`, shares a work folder of root's with


MEMBERS = sorted(
    (u.pw_uid, u.pw_name)
    for u in getpwall()
    if u.pw_uid and u.pw_gid in [g.gr_gid for g in getgrall() if g.gr_name == GROUP]
)
"""Users of this machine whose group is GROUP: (uid, name)."""


needs_open_code = pytest.mark.skipif(
    not all(folder.stat().st_mode & 0o001 for folder in Path(__file__).parents),
    reason="evalspan lies in a folder that no other user may enter",
)
"""Of a test whose other user reads evalspan's files, beyond the modules that this process has imported."""


def as_user(act: Callable[[], None], *, member: bool = False, uid: int = USER) -> None:
    """Do it in a process of the user's, forked from this one: his interpreter need not be readable to him.

    `member`: he is one of GROUP.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([getgrnam(GROUP).gr_gid] if member else [])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
        except BaseException:  # noqa: BLE001 (an assertion, too, is told to the parent)
            os.write(tell, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0, said


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size with 400 names, mounted by root on a new or empty folder; elsewhere the test is skipped."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=400,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1


@contextmanager
def memory_group(megabytes: int) -> Iterator[Path]:
    """A control group with this limit: a process joins by its pid in `cgroup.procs`. All that are left go to this process's group at the end."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), "/")
    made = CONTROL_GROUPS / f"evalspan-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    except OSError as error:
        pytest.skip(f"no control group of version 1 can be made: {error}")
    try:
        yield made
    finally:
        for pid in (made / "cgroup.procs").read_text().split():
            (CONTROL_GROUPS / own.strip("/") / "cgroup.procs").write_text(pid)
        made.rmdir()


def fill(disk: Path) -> Path:
    """A file that leaves not a byte."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def no_room_for_an_event(journal: Path) -> None:
    """Fill a journal's last page with blanks: on a full disk it has no room for an event then."""
    with journal.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b" " * (-journal.stat().st_size % 4096) + b"\n")
