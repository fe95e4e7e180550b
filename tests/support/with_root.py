"""What only root can give a test: an ordinary user, small disks to fill, and little memory."""

import ctypes
import os
import subprocess
import traceback
from contextlib import contextmanager
from grp import getgrall, getgrnam
from pathlib import Path
from pwd import getpwall

import pytest
from dev_cluster.api import is_open
from dev_cluster.conf import view_lines
from dev_cluster.site_view import Exposure, plan_view

USER = 64321  # no user has this uid
CLONE_NEWNS = 0x20000  # of Linux' unshare(2)


GROUP = "nogroup"  # that a member of it, by `as_user`, shares a work folder of root's with


MEMBERS = sorted(
    (u.pw_uid, u.pw_name)
    for u in getpwall()
    if u.pw_uid and u.pw_gid in [g.gr_gid for g in getgrall() if g.gr_name == GROUP]
)
"""Users of this machine whose group is GROUP: (uid, name)."""


ROOT = Path(__file__).resolve().parents[2]


def _let_in():
    """Show evalspan's folder to every user in a mount namespace of this process, where it lies below a closed one."""
    plan = plan_view([Exposure(source=ROOT, target=ROOT)], is_open)
    if plan.binds:
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        lines = ["mount --make-rprivate /", *view_lines(plan)]
        subprocess.run(["sh", "-euc", "\n".join(lines)], cwd="/", check=True)


def as_user(act, *, member=False, uid=USER):
    """Do it in a process of the user's, forked from this one: his interpreter need not be readable to him.

    `member`: he is one of GROUP.
    """
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _let_in()
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
def small_disk(folder, size):
    """A tmpfs of this size with 400 names, mounted by root on a new or empty folder; elsewhere the test is skipped."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=400,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def storage_away(folder):
    """A mount over a folder whose server has ended: each look at what is below is an error (ENOTCONN). `umount(folder)` ends it."""
    server = os.open("/dev/fuse", os.O_RDWR) if os.geteuid() == 0 and Path("/dev/fuse").exists() else None
    how = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    mount = ["mount", "-i", "-t", "fuse", "-o", how, "none", str(folder)]
    if server is None or subprocess.run(mount, pass_fds=[server], check=False).returncode != 0:
        pytest.skip("no file system of FUSE can be mounted here (needs root)")
    os.close(server)
    try:
        yield
    finally:
        umount(folder)


def umount(folder):
    """Show again what lies below a mount; does nothing twice."""
    if os.path.ismount(folder) or str(folder) in Path("/proc/mounts").read_text():
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


CONTROL_GROUPS = Path("/sys/fs/cgroup/memory")  # version 1


@contextmanager
def memory_group(megabytes):
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


def fill(disk):
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


def no_room_for_an_event(journal):
    """Fill a journal's last page with blanks: on a full disk it has no room for an event then."""
    with journal.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b" " * (-journal.stat().st_size % 4096) + b"\n")
