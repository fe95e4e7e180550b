"""Laws of another user's work folder, whose scores can be read and in which nothing can be changed; and of one without file locks."""

import errno
import os
import shutil
import subprocess
import sys
import time

import pytest
from support.commands import typed
from support.trainings import leave
from support.with_root import GROUP, as_user

from coordinator.decide.allocation import cordons
from coordinator.errors import OperatorError
from coordinator.intake import hub, suites, work_folder
from coordinator.intake.checkpoint import inspect_checkpoint, is_hugging_face
from coordinator.operations.doctor import collect
from coordinator.runtime.known_evaluations import find_folder
from coordinator.runtime.work_lock import DAEMON, WorkLock
from coordinator.site.config import loading
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")

READING = (["status", "--json"], ["report", "--series", "/runs/a"], ["priors", "show"])


@pytest.fixture
def work(open_folder, monkeypatch):
    """A work folder that a group shares."""
    monkeypatch.chdir(open_folder)
    monkeypatch.setenv("HOME", str(open_folder))
    monkeypatch.setenv("EVALSPAN_SHARED_GROUP", GROUP)
    paths = WorkPaths(open_folder / "work")
    work_folder.load_settings(None, paths.root)
    leave(paths.root, 10, 0.2)
    os.close(make_file(paths.lock))
    return paths


def _said(work, arguments):
    return typed(*arguments, "--work-dir", work.root).stdout


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_member_of_the_group_may_look(work, arguments):
    """What the owner reads, members read, too."""
    lock = WorkLock(work.lock)
    lock.acquire(DAEMON)  # a daemon that runs is one for them, as well
    own = _said(work, arguments)  # imports, too: the user may not enter this folder

    def look():
        assert _said(work, arguments) == own
        assert WorkLock(work.lock).holder().startswith(DAEMON)

    as_user(look, member=True)
    lock.release()


def test_another_user_may_not_run_a_daemon_nor_command_one(work):
    """Nor check it up: refused in one line that says whose the folder is; no bug report."""
    settings = Config.model_validate({"work_dir": work.root, "trial": {"python": "python3"}})

    def act():
        for refused in (lambda: WorkLock(work.lock).acquire(DAEMON), lambda: collect.check_up(settings)):
            with pytest.raises(OperatorError, match="another user's work folder"):
                refused()

    as_user(act, member=True)


def test_a_private_folder_is_refused_in_one_line(work, monkeypatch):
    """Whatever names it: the work folder, a checkpoint, a suite, or the settings."""
    monkeypatch.setattr(
        suites, "suite_names", lambda: ["core"]
    )  # what reads them may be imported from a closed folder
    private = work.root.parent / "private"
    (private / "m").mkdir(parents=True)
    private.chmod(0o700)
    here = work.root.parent
    calls = [
        lambda: work_folder.load_settings(None, {"work_dir": private / "w"}),
        lambda: inspect_checkpoint(hub.local_folder("private/m", print)),
        lambda: suites.load_suite(private / "s.toml"),
        lambda: loading.find_config_file(private / "evalspan.toml", {}),
        lambda: inspect_checkpoint(private / "m"),
    ]

    def act():
        os.chdir(here)
        assert not is_hugging_face(private / "m")
        for call in calls:
            with pytest.raises(OperatorError) as refused:
                call()
            assert "\n" not in str(refused.value)

    as_user(act, member=True)


def test_evaluations_that_their_owner_keeps_private_are_counted(work):
    """Of a folder whose evaluations none can be read, nothing says that there are none."""
    leave(work.root, 20, 0.2)
    for folder in work.root.glob("step-*"):
        (folder / "journal.jsonl").touch()
        folder.chmod(0o700)

    def act():
        said = typed("status", "--work-dir", work.root).stdout
        assert "2 evaluations here belong to another user and cannot be read" in said
        assert "no evaluations here" not in said
        for name in ("step-20", "step-20-mini-00000020"):
            with pytest.raises(OperatorError, match="2 evaluations here belong to another user"):
                find_folder(Config.model_validate({"work_dir": work.root}), name)

    typed("status", "--work-dir", work.root)  # imports what the user may not
    as_user(act, member=True)


def test_a_cordon_ends_without_a_daemon(work):
    """In the file that the next daemon reads; a node without one is refused."""
    release = ["release", "n1", "--minutes", "0", "--work-dir", str(work.root)]
    cordons.cordon_nodes(work.nodes, ["n1", "n2"], time.time() + 600, time.time())
    assert typed(*release).stdout == "n1 may be used again\n"
    assert list(cordons.read_cordons(work.nodes, time.time())) == ["n2"]
    typed(*release, code=1)


# --- a file system without file locks, as Lustre mounted without `-o flock` --------------------------------------------


REFUSES = """
#include <errno.h>
#include <stdlib.h>
int flock(int fd, int kind) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""


@pytest.fixture(scope="module")
def refuses(tmp_path_factory):
    """A library that stands before the C library's `flock`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("preload")
    (folder / "flock.c").write_text(REFUSES)
    library = folder / "flock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "flock.c"], check=True)
    return library


def test_file_locks_that_are_refused_are_one_line_with_the_mount_option(refuses, toy_model, tmp_path):
    """By either error that file systems give; `doctor` says so in its table."""
    work = tmp_path / "work"
    env = {**os.environ, "EVALSPAN_CLUSTER_KIND": "local", "LD_PRELOAD": str(refuses), "COLUMNS": "400"}

    def said(code, *words):
        argv = [sys.executable, "-m", "coordinator", *words, "--work-dir", str(work)]
        own = {**env, "FLOCK_ERRNO": str(code)}
        return subprocess.run(argv, env=own, capture_output=True, text=True, timeout=120, check=False)

    for code, words in (
        (errno.ENOSYS, ("eval", str(toy_model), "--suite", "quickstart", "--cluster", "local")),
        (errno.ENOSYS, ("daemon", "--wait")),
        (errno.EOPNOTSUPP, ("status",)),
    ):
        done = said(code, *words)
        assert done.returncode == 3, done.stderr
        assert done.stderr.splitlines()[-1].startswith(f"evalspan: the file system of {work} (")
        assert "`-o flock`" in done.stderr
        assert "Traceback" not in done.stderr
    checked = said(errno.ENOSYS, "doctor", "--cluster", "local")
    assert (checked.returncode, checked.stderr) == (1, "")
    assert "has no file locks" in checked.stdout
