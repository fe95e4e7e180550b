"""A private copy of the package that any user can read, and its command as root and user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dev_cluster.testing import wait_until
from support.sites import running

REPOSITORY = Path(__file__).resolve().parents[2]
_USER = 64321  # a user id without an account
_SYSTEM_PYTHON = "/usr/bin/python3"

Runner = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def shared_folder():
    """A folder outside all homes that every user may read and write."""
    folder = Path(tempfile.mkdtemp(prefix="evalspan-tests-", dir="/tmp"))
    folder.chmod(0o777)
    (folder / "evaljobs").mkdir()
    (folder / "evaljobs" / "__init__.py").touch()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "evaljobs" / "sandbox", folder / "evaljobs" / "sandbox", ignore=ignore)
    yield folder
    shutil.rmtree(folder)


def _interpreter(who):
    if who == "self":
        return sys.executable, {}
    if os.geteuid() != 0:
        pytest.skip("not root: cannot become another user")
    old = [_SYSTEM_PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    if not Path(_SYSTEM_PYTHON).exists() or subprocess.run(old, check=False).returncode:
        pytest.skip(f"no {_SYSTEM_PYTHON} of 3.11 or later that an ordinary user can run")
    return _SYSTEM_PYTHON, {"user": _USER, "group": _USER, "extra_groups": []}


@pytest.fixture(params=["self", "user"])
def who(request):
    """The user who runs the sandbox: root (as in CI), or an ordinary user."""
    return request.param


@pytest.fixture(params=["namespaces", "landlock"])
def level(request):
    """Both levels that must hold."""
    return request.param


@pytest.fixture
def run(shared_folder, tmp_path):
    """run(programs, level, who): the real command's verdicts; all of its processes must end."""

    def run(programs, level, who, *options):
        python, identity = _interpreter(who)
        env = {"PYTHONPATH": str(shared_folder), "PATH": os.environ["PATH"], "EVALSPAN_TEST_TOKEN": "x"}

        def command(*words):
            line = [python, "-m", "evaljobs.sandbox", *words]
            return subprocess.run(
                line, env=env, cwd="/", capture_output=True, text=True, check=False, timeout=240, **identity
            )

        reports = {r["level"]: r for r in json.loads(command("--probe").stdout)}
        if not reports[level]["holds"]:
            pytest.skip(f"{level} does not hold here for {who}: {reports[level]['reason']}")
        source = shared_folder / f"{tmp_path.name}.jsonl"
        source.write_text("".join(json.dumps(program) + "\n" for program in programs))
        source.chmod(0o644)
        done = command(str(source), "--level", level, *options)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not _processes_of(shared_folder))
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def _processes_of(folder):
    return list(running(folder / "evaljobs" / "sandbox" / "isolation"))
