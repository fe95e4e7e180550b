"""Laws of an ordinary site: what jobs see of their node, GPUs and user, and what is lost with a node, slurmd or controller."""

from __future__ import annotations

import pytest
from dev_cluster import procs
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
    code = "import os, sys, evaljobs as e; print(os.getuid(), os.environ['USER'], sys.executable, e.__file__)"
    assert not plain.warnings
    uid, *told = srun(plain, f'"{plain.python}" -c "{code}"', "-p", "cpu").split()
    assert uid == str(plain.record.uid) != "0"
    assert told == [plain.user, str(plain.python), str(plain.repo / "evaljobs" / "__init__.py")]


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
        mine, others = plain.record.layout.munge_socket, other.record.layout.munge_socket
        refused = plain.run_as_user(["sh", "-c", f"munge -n -S {mine} | unmunge -S {others}"])
        assert "Invalid credential" in refused.stdout + refused.stderr
    wait_state(plain, job, "RUNNING")
    cancel(plain, job)


# --- what is lost; each test leaves the cluster whole --------------------------------------------------------------------


def test_a_dead_node_is_down_and_comes_back_empty(plain: Cluster) -> None:
    """After a power cut Slurm shows the node DOWN, its job does not run on, and the rebooted node has an empty /dev/shm."""
    job = sbatch(plain, "touch /dev/shm/lost; exec sleep 600", "-w", "n2", "--no-requeue")
    wait_state(plain, job, "RUNNING")
    wait_until(lambda: bool(plain.job_pids(job)), "the job's script runs")
    plain.kill_node("n2")
    assert plain.node_pids("n2") == []
    assert plain.job_pids(job) == []
    plain.wait_node("n2", "down*")
    wait_state(plain, job, "NODE_FAIL")
    plain.start_node("n2")
    plain.wait_node("n2", "idle")
    assert srun(plain, "ls /dev/shm", "-w", "n2") == ""


def test_jobs_outlive_their_slurmd(plain: Cluster) -> None:
    """slurmd killed and started again: the job runs on at the same pid, and ends under its control."""
    job = sbatch(plain, "exec sleep 600", "-w", "n1")
    wait_state(plain, job, "RUNNING")

    def sleeps() -> bool:  # while the shell becomes the sleep, /proc shows no environment
        return [procs.command_name(pid) for pid in plain.job_pids(job)] == ["sleep"]

    wait_until(sleeps, "the job's script runs")
    before, old = plain.job_pids(job), plain.node_pid("n1")
    plain.kill_slurmd("n1")
    assert plain.job_pids(job) == before
    plain.start_node("n1")
    assert plain.node_pid("n1") != old
    assert state(plain, job) == "RUNNING"
    cancel(plain, job)


def test_a_killed_controller_recovers_its_queue(plain: Cluster) -> None:
    """Jobs that slurmctld had saved are there after SIGKILL and restart: the running one runs, the held one waits."""
    running = sbatch(plain, "exec sleep 600", "-w", "n1")
    wait_state(plain, running, "RUNNING")
    held = sbatch(plain, "true", "--hold", "--job-name=held-until-saved")
    saved = plain.record.layout.state / "job_state"

    def on_disk() -> bool:
        try:
            return b"held-until-saved" in saved.read_bytes()
        except FileNotFoundError:  # not yet, or just being replaced: slurmctld unlinks the old one first
            return False

    wait_until(on_disk, "the queue is on disk")
    plain.kill_controller()
    assert plain.run_as_user(["scontrol", "ping"]).returncode != 0
    plain.start_controller()
    wait_state(plain, running, "RUNNING")
    wait_state(plain, held, "PENDING")
    cancel(plain, running, held)


def test_a_frozen_controller_answers_after_the_thaw(plain: Cluster) -> None:
    """While frozen no answer comes; after the thaw the same controller answers."""
    plain.freeze_controller()
    asked = plain.run_as_user(["timeout", "1", "squeue"])
    plain.thaw_controller()
    assert asked.returncode == 124
    assert plain.run_as_user(["squeue"]).returncode == 0
