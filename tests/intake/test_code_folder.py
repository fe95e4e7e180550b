"""Laws of the copy of node-side code that an interpreter or container without evalspan runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.with_root import as_user, needs_open_code

import evaljobs
from coordinator.config.schema import Config, TrialConfig
from coordinator.intake.from_settings import site_of


def _asks(work: Path, question: str) -> str:
    """What a foreign interpreter prints that gets no package but the copy."""
    site = site_of(Config(work_dir=work, trial=TrialConfig(python=sys.executable, container="env EXTRA=1")))
    done = subprocess.run(
        [*site.trial_command, "-S", "-c", question],
        cwd=work,
        env={**site.trial_env, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def test_a_foreign_interpreter_gets_the_code_in_the_work_folder(tmp_path, monkeypatch):
    """After an upgrade the new one, also under the same version, as installations from newer commits have it; and the copy is
    as private as the work folder, whatever the source was."""
    ask = "import os, evaljobs, evaljobs.errors as e; print(evaljobs.__file__, os.environ['EXTRA'], hasattr(e, 'UPGRADED'))"
    (tmp_path / "work").mkdir(mode=0o700)
    where = _asks(tmp_path / "work", ask)
    assert where.startswith(str(tmp_path / "work" / "cache"))
    assert where.endswith(" 1 False")
    upgraded = tmp_path / "site" / "evaljobs"
    shutil.copytree(Path(str(evaljobs.__file__)).parent, upgraded)
    (upgraded / "errors.py").open("a").write("\nUPGRADED = True\n")
    for place in (upgraded, *upgraded.rglob("*")):
        place.chmod(0o777)
    monkeypatch.setattr(evaljobs, "__file__", str(upgraded / "__init__.py"))
    assert _asks(tmp_path / "work", ask).endswith(" 1 True")
    copied = [p for c in (tmp_path / "work" / "cache").glob("code-*") for p in c.rglob("*")]
    modes = {p.stat().st_mode & 0o777 for p in copied if "__pycache__" not in p.parts}
    assert modes == {0o700, 0o600}


def test_workers_get_the_prologue_and_the_environment_that_trials_get(tmp_path):
    """HF_HOME of [trial] env, or of a module in the prologue, is where offline scoring finds its data. Paths of another
    interpreter's libraries stay with that one.
    """
    trial = TrialConfig(env={"HF_HOME": "/data", "PYTHONPATH": "/mine"}, prologue="export SITE=1")
    site = site_of(Config(work_dir=tmp_path, trial=trial))
    script = "import os; print(os.environ['SITE'], os.environ['HF_HOME'])"
    for command, env in ((site.trial_command, site.trial_env), (site.worker_command, site.worker_env)):
        done = subprocess.run(
            [*command, "-c", script],
            env={"PATH": "/usr/bin:/bin", **env},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["1", "/data"]
    assert site.worker_env["PYTHONPATH"] == "/mine"
    other = site_of(Config(work_dir=tmp_path, trial=trial.model_copy(update={"python": "/opt/python"})))
    assert "PYTHONPATH" not in other.worker_env


def test_a_file_in_the_current_folder_stands_before_no_module_of_a_job(tmp_path):
    """Jobs run in the folder in which `evalspan` was typed, which may hold a file of a module's name."""
    (tmp_path / "timeit.py").write_text("raise SystemExit('not the module')")
    site = site_of(Config(work_dir=tmp_path))
    for command, env in ((site.trial_command, site.trial_env), (site.worker_command, site.worker_env)):
        subprocess.run(
            [*command, "-m", "evaljobs", "--help"],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", **env},
            capture_output=True,
            check=True,
        )
        subprocess.run([*command, "-c", "import timeit"], cwd=tmp_path, env=env, check=True)


def test_code_that_others_own_or_may_write_is_not_run(tmp_path):
    """A user changed the folder before a job began: the job's own script looks."""
    config = Config(work_dir=tmp_path, trial=TrialConfig(python=sys.executable))
    site = site_of(config)
    (code,) = (tmp_path / "cache").glob("code-*")

    def run() -> subprocess.CompletedProcess[str]:
        argv = [*site.trial_command, "-c", "print('ran')"]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    assert run().stdout == "ran\n"
    for place in (code, code / "evaljobs"):
        place.chmod(0o770)
        refused = run()
        assert (refused.returncode, refused.stdout) == (1, "")
        assert f"others may write to it or own it: {place}; remove {code}" in refused.stderr
        place.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(code, 64321, -1)
        assert "others may write to it or own it" in run().stderr
    shutil.rmtree(code)
    assert run().returncode == 1


@needs_open_code
@pytest.mark.skipif(os.geteuid() != 0, reason="not root: cannot become another user")
def test_a_guest_of_a_work_folder_runs_a_copy_of_his_own(monkeypatch):
    """He may not write to it, and need not trust what lies there."""
    folder = Path(tempfile.mkdtemp(prefix="guest-"))
    home = folder / "home"
    for place, mode in ((folder, 0o755), (folder / "work", 0o755), (home, 0o777)):
        place.mkdir(exist_ok=True)
        place.chmod(mode)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    config = Config(work_dir=folder / "work", trial=TrialConfig(python="/usr/bin/python3"))

    def act() -> None:
        site = site_of(config)
        argv = [*site.trial_command, "-S", "-c", "import evaljobs; print(evaljobs.__file__)"]
        env = {**site.trial_env, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(argv, cwd="/", env=env, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(str(home / ".cache" / "evalspan"))

    try:
        as_user(act)
    finally:
        shutil.rmtree(folder)
