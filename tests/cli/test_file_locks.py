"""A file system without file locks, as Lustre mounted without `-o flock`: each command says so in one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REFUSES = """
#include <errno.h>
#include <stdlib.h>
int flock(int fd, int kind) { errno = atoi(getenv("FLOCK_ERRNO")); return -1; }
"""


@pytest.fixture(scope="module")
def refuses(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands before the C library's `flock`."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("preload")
    (folder / "flock.c").write_text(REFUSES)
    library = folder / "flock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "flock.c"], check=True)
    return library


@pytest.mark.parametrize("code", ["ENOSYS", "EOPNOTSUPP"])
def test_file_locks_that_are_refused_are_one_line_with_the_mount_option(
    code: str, refuses: Path, toy_model: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    env = {
        **os.environ,
        "EVALSPAN_CLUSTER_KIND": "local",
        "LD_PRELOAD": str(refuses),
        "FLOCK_ERRNO": str(getattr(errno, code)),
        "COLUMNS": "400",
    }

    def said(*words: str) -> tuple[int, list[str], str]:
        argv = [sys.executable, "-m", "coordinator", *words, "--work-dir", str(work)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stderr.splitlines(), done.stdout

    for words in (
        ("eval", str(toy_model), "--suite", "quickstart", "--cluster", "local"),
        ("daemon", "--wait"),
        ("status",),
    ):
        status, lines, _ = said(*words)
        assert status == 3, lines
        assert lines[-1].startswith(f"evalspan: the file system of {work} (")
        assert "`-o flock`" in lines[-1]
        assert not [line for line in lines if "Traceback" in line]
    status, lines, table = said("doctor", "--cluster", "local")
    assert (status, lines) == (1, [])
    assert "has no file locks" in table
