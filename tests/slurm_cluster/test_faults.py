"""Laws of losing parts: nodes, slurmd, the controller. Each test leaves the cluster whole."""

from __future__ import annotations

import pytest
from dev_cluster import procs
from dev_cluster.api import Cluster
from dev_cluster.testing import cancel, sbatch, srun, state, wait_state, wait_until

pytestmark = pytest.mark.slurm


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
