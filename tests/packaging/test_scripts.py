"""Laws of the scripts' heads: their help is printed before anything is made or fetched, and names their exit codes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = {
    file.name: file.read_text()
    for file in sorted((REPOSITORY / "scripts").iterdir())
    if file.is_file() and file.name[0] != "_"
}
INSTALLING = [name for name, text in TEXTS.items() if "/_env.sh" in text]


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("script", [*INSTALLING, "fetch_smollm2.py"])
def test_help_comes_before_anything_is_installed(tmp_path: Path, script: str, option: str) -> None:
    """From a fresh clone: exit code 0, the script's own name in its text, and no new file."""
    clone, ignored = tmp_path / "clone", shutil.ignore_patterns("__pycache__")
    for folder in ("scripts", "coordinator"):
        shutil.copytree(REPOSITORY / folder, clone / folder, ignore=ignored)
    before = sorted(clone.rglob("*"))
    program = ["python3", "-B"] if script.endswith(".py") else ["env", "PYTHONDONTWRITEBYTECODE=1", "bash"]
    argv = [*program, str(clone / "scripts" / script), option]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert script.replace("-", "_") in done.stdout.replace("-", "_")
    assert sorted(clone.rglob("*")) == before


def test_each_script_that_users_start_says_its_exit_codes() -> None:
    """In its head; commands that only run a module say them once, in _python.sh."""
    starts = [text for name, text in TEXTS.items() if not name.endswith(".py")]
    assert [text for text in starts if "Exit codes:" not in text and "/_python.sh" not in text] == []
