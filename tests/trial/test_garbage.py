"""What a job's process spends on objects that stay: no pass over what it has imported, no freeing at its end."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import atexit, gc, os, runpy, sys
class Kept:
    def __del__(self, write=os.write):
        write(1, b"freed")
kept = Kept()
atexit.register(lambda: print(gc.get_stats()[2]["collections"], "collections", flush=True))
sys.argv = ["evaljobs", "tasks", sys.argv[1]]
runpy.run_module("evaljobs", run_name="__main__", alter_sys=True)
"""


def test_a_job_neither_collects_nor_frees_what_it_has_imported():
    """The oldest generation is what was imported so far. Exit handlers run, then the process ends."""
    asked = json.dumps({"include_path": ["evaljobs/suites/quickstart"], "names": ["quickstart_mmlu"]})
    argv = [sys.executable, "-c", CODE, asked]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 collections", done.stdout
