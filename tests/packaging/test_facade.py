"""Laws of `import evalspan` and `evalspan --version`: what they need, and what they say from a clone, a wheel and an sdist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import evalspan

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import hatchling.build as b, sys; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def _built(kind: str, source: Path, out: Path) -> Path:
    argv = [sys.executable, "-c", BUILD, kind, str(out)]
    done = subprocess.run(argv, cwd=source, check=True, capture_output=True, text=True, timeout=240)
    return out / done.stdout.split()[-1]


def _said(*argv: str | Path, **env: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        argv, cwd="/", env={**clean, **env}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel of the clone, and the wheel of its sdist."""
    out = tmp_path_factory.mktemp("built")
    with tarfile.open(_built("build_sdist", ROOT, out)) as archive:
        archive.extractall(out / "source", filter="data")
    (source,) = (out / "source").iterdir()
    return [_built("build_wheel", ROOT, out), _built("build_wheel", source, out / "second")]


@pytest.fixture(scope="module")
def bare(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has evalspan's wheel and nothing else."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    shutil.unpack_archive(wheels[1], site, "zip")
    return folder / "bin" / "python"


def _commit() -> str:
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_the_commit_is_the_same_in_a_clone_a_wheel_and_the_wheel_of_an_sdist(wheels):
    """A dirty clone says so in each of them; no file is left in the clone."""
    here = _said(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {VERSION}")
    assert here.endswith(f"(commit {_commit()})"), here
    written = [zipfile.ZipFile(wheel).read("coordinator/commit.txt").decode().strip() for wheel in wheels]
    assert written == [_commit()] * 2
    assert not (ROOT / "coordinator" / "commit.txt").exists()


VERSION = "from coordinator.base.version import version_text; print(version_text())"


def test_without_a_clone_the_version_is_what_the_wheel_says(bare):
    """And a copy without either names its code by content: journals tell versions apart by this text."""
    assert _said(bare, "-c", VERSION).startswith("evalspan 0.")
    site = next(bare.parents[1].glob("lib/python*/site-packages"))
    commit = site / "coordinator" / "commit.txt"
    if commit.exists():
        assert f"(commit {commit.read_text().strip()})" in _said(bare, "-c", VERSION)
        commit.rename(commit.with_suffix(".away"))
    unnamed = _said(bare, "-c", VERSION)
    assert re.search(r"\(code [0-9a-f]{12}\)$", unnamed)
    (site / "coordinator" / "__init__.py").open("a").write("\n")
    assert _said(bare, "-c", VERSION) not in ("", unnamed)


def test_the_facade_needs_the_standard_library_alone(bare):
    """The hook's names work, pathlib and typing are not imported; a name of the coordinator says in one line what to install."""
    body = (
        "import sys; before = set(sys.modules); import evalspan\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert new - {'evalspan', 'coordinator'} <= sys.stdlib_module_names, new\n"
        "assert not {'pathlib', 'typing'} & set(sys.modules) - before and not evalspan.pinned('/nowhere')\n"
        "try: evalspan.evaluate\n"
        "except ImportError as error: print(error)\n"
    )
    said = _said(bare, "-I", "-c", body)
    assert said.startswith("evalspan.evaluate needs the package ")
    assert "`pip install evalspan`" in said
    assert len(said.splitlines()) == 1


def test_every_name_of_the_facade_is_there_and_no_other():
    """Also under `from evalspan import …` and for tab completion."""
    assert set(dir(evalspan)) == set(evalspan.__all__)
    for name in evalspan.__all__:
        assert getattr(evalspan, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'evalutae'"):
        _ = evalspan.evalutae


def test_python_m_evalspan_is_the_command():
    """For an interpreter whose scripts are not on the path."""
    said = _said(sys.executable, "-m", "evalspan", "--version", PYTHONPATH=str(ROOT))
    assert said.startswith("evalspan ")
