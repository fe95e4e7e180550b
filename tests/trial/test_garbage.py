"""What a job's process spends on imports that are no use to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import atexit, gc, runpy, sys
atexit.register(lambda: print(gc.get_stats()[2]["collections"]))
sys.argv = ["evaljobs", "tasks", "--names", "quickstart_mmlu", "--include-path", sys.argv[1]]
runpy.run_module("evaljobs", run_name="__main__", alter_sys=True)
"""


def test_a_job_imports_without_collecting_what_it_has_imported() -> None:
    """The oldest generation is everything that was imported so far: a pass over it frees nothing."""
    argv = [sys.executable, "-c", CODE, "evaljobs/suites/quickstart"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout.splitlines()[-1]) == 0, done.stdout
