"""Laws of the copy of node-side code that an interpreter or container without evalspan runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.with_root import as_user

import evaljobs
from coordinator.config.schema import Config, TrialConfig
from coordinator.intake.from_settings import site_of

SHELL = {"PATH": "/usr/bin:/bin"}


def runs(command: Sequence[str], env: Mapping[str, str], *words: str, cwd: Path | str = "/") -> str:
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

    def asks() -> str:
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
    modes = {p.stat().st_mode & 0o777 for p in copied if "__pycache__" not in p.parts}
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

    def said() -> tuple[str, str]:
        argv = [*site.trial_command, "-c", "print('ran')"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert bool(done.returncode) == (done.stdout == "")
        return done.stdout, done.stderr

    assert said()[0] == "ran\n"
    for place in (code, code / "evaljobs"):
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

    def act() -> None:
        site = site_of(config)
        ask = "import evaljobs; print(evaljobs.__file__)"
        where = runs(site.trial_command, site.trial_env, "-S", "-c", ask)
        assert where.startswith(str(home / ".cache" / "evalspan"))

    as_user(act)
