"""Laws of another user's work folder: its scores can be read, and nothing in it can be changed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trainings import leave
from support.with_root import GROUP, as_user
from typer.testing import CliRunner

from coordinator.allocation import cordons
from coordinator.cli import app
from coordinator.config import loading
from coordinator.config.schema import Config
from coordinator.doctor import collect
from coordinator.errors import OperatorError
from coordinator.intake import hub, suites, work_folder
from coordinator.intake.checkpoint import inspect, is_hugging_face
from coordinator.runtime.work_lock import DAEMON, WorkLock
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import make_file

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")

READING = (["status", "--json"], ["report", "--series", "/runs/a"], ["priors", "show"])


@pytest.fixture
def work(monkeypatch) -> Iterator[WorkPaths]:
    """A work folder that a group shares."""
    folder = Path(tempfile.mkdtemp(prefix="other-user-"))
    folder.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("EVALSPAN_SHARED_GROUP", GROUP)
    paths = WorkPaths(folder / "work")
    work_folder.load(None, paths.root)
    leave(paths.root, 10, 0.2)
    os.close(make_file(paths.lock))
    try:
        yield paths
    finally:
        shutil.rmtree(folder)


def _said(work: WorkPaths, arguments: list[str]) -> str:
    done = CliRunner().invoke(app, [*arguments, "--work-dir", str(work.root)])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


@pytest.mark.parametrize("arguments", READING, ids=" ".join)
def test_a_member_of_the_group_may_look(work, arguments):
    """What the owner reads, members read, too."""
    lock = WorkLock(work.lock)
    lock.acquire(DAEMON)  # a daemon that runs is one for them, as well
    own = _said(work, arguments)  # imports, too: the user may not enter this folder

    def look() -> None:
        assert _said(work, arguments) == own
        assert WorkLock(work.lock).holder().startswith(DAEMON)

    as_user(look, member=True)
    lock.release()


def test_another_user_may_not_run_a_daemon_nor_command_one(work):
    """Nor check it up: refused in one line that says whose the folder is; no bug report."""
    settings = Config.model_validate({"work_dir": work.root, "trial": {"python": "python3"}})

    def act() -> None:
        for refused in (lambda: WorkLock(work.lock).acquire(DAEMON), lambda: collect.check_up(settings)):
            with pytest.raises(OperatorError, match="another user's work folder"):
                refused()

    as_user(act, member=True)


def test_a_private_folder_is_refused_in_one_line(work, monkeypatch):
    """Whatever names it: the work folder, a checkpoint, a suite, or the settings."""
    monkeypatch.setattr(suites, "names", lambda: ["core"])  # the clone may be private, too
    private = work.root.parent / "private"
    (private / "m").mkdir(parents=True)
    private.chmod(0o700)
    here = work.root.parent
    calls = [
        lambda: work_folder.load(None, {"work_dir": private / "w"}),
        lambda: hub.local_folder("private/m", print),
        lambda: suites.load_suite(private / "s.toml"),
        lambda: loading.find(private / "evalspan.toml", {}),
        lambda: inspect(private / "m"),
    ]

    def act() -> None:
        os.chdir(here)
        assert not is_hugging_face(private / "m")
        for call in calls:
            with pytest.raises(OperatorError) as refused:
                call()
            assert "\n" not in str(refused.value)

    as_user(act, member=True)


def test_a_cordon_ends_without_a_daemon(work):
    """In the file that the next daemon reads; a node without one is refused."""
    release = ["release", "n1", "--minutes", "0", "--work-dir", str(work.root)]
    cordons.cordon(work.nodes, ["n1", "n2"], time.time() + 600, time.time())
    said = CliRunner().invoke(app, release)
    assert (said.exit_code, said.stdout) == (0, "n1 may be taken again\n")
    assert list(cordons.read(work.nodes, time.time())) == ["n2"]
    assert CliRunner().invoke(app, release).exit_code != 0
