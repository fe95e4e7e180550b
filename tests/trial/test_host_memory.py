"""What a job that hosts trials says of one that the kernel ended for lack of memory."""

import subprocess
import sys

from support.with_root import memory_group

from evaljobs.contract.outcomes import OUTCOME, Failed
from evaljobs.contract.paths import EvaluationPaths

HOST = """
import os, subprocess, sys
from pathlib import Path
from evaljobs.contract.specs import LaneSpec, ModelOptions, TrialSpec
from evaljobs.trial import hosted_trials
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
trial = TrialSpec(
    name="host", evaluation_dir=sys.argv[2], evaluation_id="e", node="n1", model_path="/m", model=ModelOptions(),
    batch_size=8, request_sets={}, redis_file="/r",
    lanes=tuple(LaneSpec(lane=f"n1/{i}", trial=f"host.{i}") for i in range(2)),
)
large = subprocess.Popen([sys.executable, "-c", "x = bytearray(400 << 20)"])
large.wait()
other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
other.wait()
hosted_trials._report_dead(trial, [large, other], set())
"""


def test_a_child_that_the_kernel_ended_is_told_from_one_that_failed(tmp_path):
    """Its outcome holds the memory that its job had, by which the next job asks for more."""
    paths = EvaluationPaths(tmp_path)
    for folder in paths.folders():
        folder.mkdir(parents=True, exist_ok=True)
    with memory_group(100) as group:
        subprocess.run([sys.executable, "-c", HOST, str(group), str(tmp_path)], check=True, timeout=120)
    outcomes = [OUTCOME.validate_json(paths.outcome("failed", f"host.{i}").read_bytes()) for i in range(2)]
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    short, plain = outcomes
    assert (short.memory_mb, plain.memory_mb) == (100, None)
    assert "lack of memory" in short.error
