"""Laws of the odd sites that flags make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dev_cluster.api import Cluster, dev_cluster
from dev_cluster.testing import cancel, sbatch, srun, state, wait_state

pytestmark = pytest.mark.slurm


def test_private_shm_is_empty_for_the_next_job(odd: Cluster) -> None:
    """With --private-shm a second job on the node finds neither /dev/shm nor /tmp of the first."""
    srun(odd, "echo weights > /dev/shm/left; touch /tmp/left", "-p", "cpu", "-w", "c1")
    assert srun(odd, "ls /dev/shm /tmp | grep left; true", "-p", "cpu", "-w", "c1") == ""


def test_exclusive_gives_whole_nodes(odd: Cluster) -> None:
    """With --exclusive a one-GPU job keeps its node from every other job."""
    first = sbatch(odd, "exec sleep 600", "--gpus=1")
    wait_state(odd, first, "RUNNING")
    second = sbatch(odd, "exec sleep 600", "--gpus=1")
    shown = odd.run_as_user(["squeue", "--noheader", "-j", first, "-o", "%C %h"]).stdout.split()
    assert shown[0] == "8"
    assert state(odd, second) == "PENDING"
    cancel(odd, first, second)


def test_gpu_partitions_take_only_jobs_with_a_gpu(odd: Cluster) -> None:
    """With --gpu-jobs-only others are refused at submission, in words that name the way out; the cpu partition takes them."""
    for partition in ("gpu", "spare", "cpu,gpu"):
        done = odd.run_as_user(["sbatch", "-p", partition, "--wrap", "true"])
        assert done.returncode != 0
        assert "ask for a GPU" in done.stderr
    for options in ("--gpus=1", "--gres=gpu:1", "--gpus-per-node=1", "-n1 --gpus-per-task=1", "-p cpu"):
        cancel(odd, sbatch(odd, "exec sleep 600", *options.split()))


@pytest.mark.parametrize("private_shm", [False, True])
def test_a_closed_clone_is_usable(machine: None, private_shm: bool) -> None:
    """A clone that is itself a 0700 folder in /tmp, with a venv in it, serves the user's jobs; the folder stays closed."""
    clone = Path(tempfile.mkdtemp(prefix="newcomer.", dir="/tmp"))
    try:
        (clone / "evaljobs").mkdir()
        (clone / "evaljobs" / "__init__.py").write_text("where = __file__\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True)
        # The cluster's own folder may lie in there too; with --private-shm it may not lie in /tmp.
        folder = None if private_shm else clone / "cluster"
        with dev_cluster(
            nodes=1, gpus=1, cpu_nodes=0, cpus=4, repo=clone, dir=folder, private_shm=private_shm
        ) as cluster:
            assert not cluster.warnings
            code = "import evaljobs, sys; print(evaljobs.where, sys.prefix)"
            inside = srun(cluster, f'"{cluster.python}" -c "{code}"').split()
            assert inside == [f"{cluster.repo}/evaljobs/__init__.py", str(cluster.python.parents[1])]
            outside = cluster.run_as_user([cluster.python, "-c", code]).stdout.split()
            assert outside == inside
            assert (cluster.repo == clone) is not private_shm
        assert clone.stat().st_mode & 0o777 == 0o700
        assert os.listdir(clone / "evaljobs") == ["__init__.py"]  # noqa: PTH208
    finally:
        shutil.rmtree(clone)
