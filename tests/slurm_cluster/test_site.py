"""Laws of an ordinary site: what jobs see of their node, their GPUs and their user."""

from __future__ import annotations

import pytest
from dev_cluster.api import Cluster, dev_cluster
from dev_cluster.testing import cancel, sbatch, srun, state, wait_state, wait_until

pytestmark = pytest.mark.slurm


def test_dev_shm_belongs_to_the_node(plain: Cluster) -> None:
    """A file left in /dev/shm is seen by the next job on that node and by none on another."""
    srun(plain, "echo weights > /dev/shm/left", "-w", "n1")
    assert srun(plain, "cat /dev/shm/left", "-w", "n1") == "weights"
    assert srun(plain, "ls /dev/shm", "-w", "n2") == ""
    assert srun(plain, "rm /dev/shm/left; hostname", "-w", "n1") == "n1"


def test_jobs_run_as_the_ordinary_user_with_the_given_python(plain: Cluster) -> None:
    """A job is not root, and its interpreter imports the venv's packages and the repository."""
    code = (
        "import os, sys, evaljobs; print(os.getuid(), os.environ['USER'], sys.executable, evaljobs.__file__)"
    )
    if not (plain.repo / "evaljobs" / "__init__.py").exists():
        code = code.replace(", evaljobs;", ";").replace("evaljobs.__file__", "''")
    assert not plain.warnings
    told = srun(plain, f'"{plain.python}" -c "{code}"', "-p", "cpu").split()
    assert told[0] == str(plain.record.uid) != "0"
    assert told[1:3] == [plain.user, str(plain.python)]
    assert all(place.startswith(str(plain.repo)) for place in told[3:])


def test_each_job_has_gpus_of_its_own(plain: Cluster) -> None:
    """Jobs that share a node get disjoint CUDA_VISIBLE_DEVICES, and a third waits for a free one."""
    out = plain.user_dir / "gpu-%j"
    script = 'echo "$CUDA_VISIBLE_DEVICES"; exec sleep 600'
    jobs = [sbatch(plain, script, "--gpus=1", "-w", "n1", "-o", str(out)) for _ in range(3)]
    wait_state(plain, jobs[0], "RUNNING")
    wait_state(plain, jobs[1], "RUNNING")
    seen = [plain.user_dir / f"gpu-{job}" for job in jobs[:2]]
    wait_until(lambda: all(path.exists() and path.read_text().strip() for path in seen), "both jobs wrote")
    assert sorted(path.read_text().strip() for path in seen) == ["0", "1"]
    assert state(plain, jobs[2]) == "PENDING"
    cancel(plain, *jobs)


def test_spare_jobs_give_way(plain: Cluster) -> None:
    """A job in `spare` gets TERM and goes back to the queue when `gpu` needs its GPUs."""
    mark = plain.user_dir / "told"
    ready = plain.user_dir / "trapped"
    script = f"trap 'touch {mark}' TERM; touch {ready}; while :; do sleep 0.1; done"
    spare = sbatch(plain, script, "-p", "spare", "--gpus=2", "-w", "n2", "--requeue")
    wait_state(plain, spare, "RUNNING")
    wait_until(ready.exists, "the job's script has set its trap")
    urgent = sbatch(plain, "exec sleep 600", "-p", "gpu", "--gpus=2", "-w", "n2")
    wait_state(plain, urgent, "RUNNING")
    assert state(plain, spare) == "PENDING"
    assert mark.exists()
    cancel(plain, spare, urgent)


def test_two_clusters_do_not_meet(plain: Cluster) -> None:
    """Clusters side by side have their own queues, nodes and keys, under the same node names."""
    with dev_cluster(nodes=1, gpus=1, cpu_nodes=0, cpus=4) as other:
        assert not set(other.record.ports) & set(plain.record.ports)
        job = sbatch(plain, "exec sleep 600", "-w", "n1")
        srun(other, "touch /dev/shm/other", "-w", "n1")
        queue = ["squeue", "--noheader"]  # the job of srun is in it until its node is swept
        wait_until(lambda: other.run_as_user(queue, check=True).stdout == "", "the other queue is empty")
        assert srun(plain, "ls /dev/shm", "-w", "n1") == ""
        refused = plain.run_as_user(
            [
                "sh",
                "-c",
                f"munge -n -S {plain.record.layout.munge_socket} | unmunge -S {other.record.layout.munge_socket}",
            ]
        )
        assert "Invalid credential" in refused.stdout + refused.stderr
    wait_state(plain, job, "RUNNING")
    cancel(plain, job)
