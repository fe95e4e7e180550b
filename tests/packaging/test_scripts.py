"""Laws of the scripts' help: it is printed before anything is made or fetched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
INSTALLING = [
    script.name
    for script in sorted((REPOSITORY / "scripts").iterdir())
    if script.is_file() and script.name[0] != "_" and b"/_env.sh" in script.read_bytes()
]


@pytest.mark.parametrize("script", [*INSTALLING, "fetch_smollm2.py"])
def test_help_comes_before_anything_is_installed(tmp_path: Path, script: str) -> None:
    """From a fresh clone: exit code 0, the script's own name in its text, and no new file."""
    clone = tmp_path / "clone"
    for folder in ("scripts", "coordinator"):
        shutil.copytree(REPOSITORY / folder, clone / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(clone.rglob("*"))
    program = ["python3", "-B"] if script.endswith(".py") else ["env", "PYTHONDONTWRITEBYTECODE=1", "bash"]
    for option in ("-h", "--help"):
        argv = [*program, str(clone / "scripts" / script), option]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert script.replace("-", "_") in done.stdout.replace("-", "_")
    assert sorted(clone.rglob("*")) == before
