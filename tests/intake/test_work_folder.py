"""Laws of the work folder: it is its user's alone, or one group's, refused where others could replace what jobs run; and of the copy
of node-side code in it, for an interpreter or container without evalspan.
"""

import os
import shutil
import stat
import subprocess
import sys
from grp import getgrall
from pathlib import Path

import pytest
from support.with_root import GROUP as SHARING
from support.with_root import as_user

import evaljobs
from coordinator.errors import OperatorError
from coordinator.intake import work_folder
from coordinator.intake.from_settings import site_of
from coordinator.intake.inbox import Inbox, Notice, leave_notice, read_refusals, refuse_notice
from coordinator.intake.work_folder import open_folder as open_folder_of
from coordinator.site.config.schema import Config, TrialConfig
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.storage import hold_lock, write_atomic

GROUP = next(g.gr_name for g in getgrall() if g.gr_gid == os.getegid())
OWN = ("inbox/refused",)  # to which members of the group may not write
need_root = pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def load(work, group=None):
    work_folder.load_settings(None, work, {"shared_group": group})


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
    work_folder.load_settings(None, work, {"shared_group": group}, makes=False)
    load(work, group)


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
def shared(open_folder):
    """A work folder of root that the group of `nobody` shares."""
    load(open_folder / "work", SHARING)
    return WorkPaths(open_folder / "work")


@need_root
def test_a_member_leaves_checkpoints_reads_refusals_and_changes_nothing_else(shared):
    own = leave_notice(shared, Notice(checkpoint="/runs/own"))
    leave_notice(shared, Notice(checkpoint="/runs/refused"))
    refuse_notice(Inbox(shared).look()[1], "no", 1e9)
    (shared.root / "journal").touch(0o640)

    def act():
        os.umask(0o077)
        load(shared.root, SHARING)  # before any daemon ran
        leave_notice(shared, Notice(checkpoint="/runs/theirs"))
        leave_notice(shared, Notice(command="cancel", evaluation_id="e"))
        assert [r.checkpoint for r in read_refusals(shared, 1e9)] == ["/runs/refused"]
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
def test_a_member_holds_no_lock_that_a_job_waits_for(shared):
    """Any process that can open a file can hold its lock, and a conversion would wait for ever."""
    lock = shared.converted / "d1.lock"
    lock.parent.mkdir(0o750)
    with hold_lock(lock) as held:
        assert held

    def act():
        assert lock.parent.is_dir()
        with pytest.raises(PermissionError):
            lock.open("rb")

    as_user(act, member=True)


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

    def act():
        with pytest.raises(OperatorError, match=says):
            open_folder_of(open_folder / place, group)

    as_user(act)


# --- the copy of the code ----------------------------------------------------------------------------------------------


SHELL = {"PATH": "/usr/bin:/bin"}


def runs(command, env, *words, cwd="/"):
    """What a job prints that gets no package but those of its command and environment."""
    argv = [*command, *words]
    done = subprocess.run(
        argv, cwd=cwd, env={**env, **SHELL}, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_foreign_interpreter_gets_the_code_in_the_work_folder(tmp_path, monkeypatch):
    """After an upgrade the new one, also under the same version, as installations from newer commits have it; and the copy is
    as private as the work folder, whatever the source was."""
    ask = "import os, evaljobs, evaljobs.errors as e; print(evaljobs.__file__, os.environ['EXTRA'], hasattr(e, 'UPGRADED'))"
    work = tmp_path / "work"
    work.mkdir(mode=0o700)
    config = Config(work_dir=work, trial=TrialConfig(python=sys.executable, container="env EXTRA=1"))

    def asks():
        site = site_of(config)
        return runs(site.trial_command, site.trial_env, "-S", "-c", ask, cwd=work)

    where = asks()
    assert where.startswith(str(work / "cache"))
    assert where.endswith(" 1 False")
    upgraded = tmp_path / "site" / "evaljobs"
    shutil.copytree(Path(str(evaljobs.__file__)).parent, upgraded)
    (upgraded / "errors.py").open("a").write("\nUPGRADED = True\n")
    for place in (upgraded, *upgraded.rglob("*")):
        place.chmod(0o777)
    monkeypatch.setattr(evaljobs, "__file__", str(upgraded / "__init__.py"))
    assert asks().endswith(" 1 True")
    copied = [p for c in (work / "cache").glob("code-*") for p in c.rglob("*")]
    modes = {p.stat().st_mode & 0o777 for p in copied}
    assert modes == {0o700, 0o600}


def test_workers_get_the_prologue_and_the_environment_that_trials_get(tmp_path):
    """HF_HOME of [trial] env, or of a module in the prologue, is where offline scoring finds its data. Paths of another
    interpreter's libraries stay with that one. Jobs run in the folder in which `evalspan` was typed: a file there stands
    before no module of theirs.
    """
    trial = TrialConfig(env={"HF_HOME": "/data", "PYTHONPATH": "/mine"}, prologue="export SITE=1")
    site = site_of(Config(work_dir=tmp_path, trial=trial))
    (tmp_path / "timeit.py").write_text("raise SystemExit('not the module')")
    script = "import os, timeit; print(os.environ['SITE'], os.environ['HF_HOME'])"
    for command, env in ((site.trial_command, site.trial_env), (site.worker_command, site.worker_env)):
        assert runs(command, env, "-c", script, cwd=tmp_path) == "1 /data"
        assert "usage" in runs(command, env, "-m", "evaljobs", "--help", cwd=tmp_path)
    assert site.worker_env["PYTHONPATH"] == "/mine"
    other = site_of(Config(work_dir=tmp_path, trial=trial.model_copy(update={"python": "/opt/python"})))
    assert "PYTHONPATH" not in other.worker_env


def test_code_that_others_own_or_may_write_is_not_run(tmp_path):
    """A user changed the folder before a job began: the job's own script looks."""
    site = site_of(Config(work_dir=tmp_path, trial=TrialConfig(python=sys.executable)))
    (code,) = (tmp_path / "cache").glob("code-*")

    def said():
        argv = [*site.trial_command, "-c", "print('ran')"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == (done.stdout == "")
        return done.stdout, done.stderr

    assert said()[0] == "ran\n"
    below = code / "evaljobs" / "scoring"
    for place in (code, code / "evaljobs", below / "__pycache__", below / "worker.py"):
        place.chmod(0o770)
        out, error = said()
        assert out == ""
        assert f"others may write to it or own it: {place}; remove {code}" in error
        place.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(code, 64321, -1)
        assert "others may write to it or own it" in said()[1]
    shutil.rmtree(code)
    assert said()[0] == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
def test_a_guest_of_a_work_folder_runs_a_copy_of_his_own(open_folder, monkeypatch):
    """He may not write to it, and need not trust what lies there."""
    home = open_folder / "home"
    for place, mode in ((open_folder / "work", 0o755), (home, 0o777)):
        place.mkdir()
        place.chmod(mode)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config = Config(work_dir=open_folder / "work", trial=TrialConfig(python="/usr/bin/python3"))

    def act():
        site = site_of(config)
        ask = "import evaljobs; print(evaljobs.__file__)"
        where = runs(site.trial_command, site.trial_env, "-S", "-c", ask)
        assert where.startswith(str(home / ".cache" / "evalspan"))

    as_user(act)
