"""Laws of the sbatch wrappers: training is sacred, and a daemon near its time limit comes back.

`evalspan` is a small program of the test's here: what is tested is what the wrappers do around it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from dev_cluster.api import Cluster, dev_cluster, unavailable
from dev_cluster.testing import state, wait_state, wait_until

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FAKE = """#!/bin/bash
trap 'echo ended >> "{log}"; exit 0' TERM
printf '%s|%s|%s|%s\\n' "$*" "$EVALSPAN_WATCH_FOLDERS" "$EVALSPAN_WATCH_SUITE" "$EVALSPAN_CLUSTER_KIND" >> "{log}"
while :; do sleep 0.1; done
"""


def _program(folder: Path) -> tuple[Path, Path]:
    """A stand-in daemon that writes down how it was called and that it ended; its path and its log."""
    log = folder / "calls"
    program = folder / "evalspan"
    program.write_text(FAKE.format(log=log))
    program.chmod(0o755)
    return program, log


def _train(folder: Path, program: Path, *command: str) -> subprocess.Popen[bytes]:
    argv = ["bash", SCRIPTS / "train-with-eval.sbatch", folder / "ckpt", "core", "--", *command]
    return subprocess.Popen(argv, cwd=folder, env={**os.environ, "EVALSPAN_BIN": str(program)})


@pytest.mark.parametrize("code", [0, 3])
def test_the_jobs_exit_code_is_the_trainings(tmp_path, code):
    """Whatever training exits with, the job does; the daemon was told folder and suite, and ended in order."""
    program, log = _program(tmp_path)
    wait_for_daemon = f'until [ -s "{log}" ]; do sleep 0.05; done; exit {code}'
    assert _train(tmp_path, program, "sh", "-c", wait_for_daemon).wait(timeout=30) == code
    assert log.read_text().splitlines() == [f'daemon|["{tmp_path / "ckpt"}"]|core|slurm', "ended"]


def test_a_daemon_that_cannot_start_does_not_touch_training(tmp_path):
    """No evalspan at all: training runs and its exit code counts."""
    train = _train(tmp_path, tmp_path / "missing", "sh", "-c", "touch trained")
    assert train.wait(timeout=30) == 0
    assert (tmp_path / "trained").exists()


def test_signals_reach_training_and_its_own_exit_code_counts(tmp_path):
    """A signal that Slurm sends ahead of the time limit is training's to handle."""
    program, _log = _program(tmp_path)
    body = "trap 'exit 7' USR1; touch ready; while :; do sleep 0.05; done"
    train = _train(tmp_path, program, "bash", "-c", body)
    wait_until((tmp_path / "ready").exists, "training runs", 30)
    train.send_signal(signal.SIGUSR1)
    assert train.wait(timeout=30) == 7


@pytest.mark.parametrize("script", ["evaluate.sbatch", "train-with-eval.sbatch"])
def test_a_wrong_call_says_how_to_call(script):
    """Exit code 2 and the usage, before anything runs."""
    done = subprocess.run(["bash", SCRIPTS / script], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "usage: sbatch" in done.stderr


@pytest.fixture(scope="module")
def site():
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    with dev_cluster(nodes=1, gpus=1, cpu_nodes=1, cpus=4) as cluster:
        yield cluster


def _submit(site: Cluster, log: Path) -> str:
    program = site.user_dir / "evalspan"
    program.write_text(FAKE.format(log=log))
    program.chmod(0o755)
    script = site.user_dir / "evalspan-daemon.sbatch"
    script.write_text((SCRIPTS / "evalspan-daemon.sbatch").read_text())
    done = site.run_as_user(
        ["sbatch", "--parsable", "--mem=100", "-p", "cpu", script], env={"EVALSPAN_BIN": str(program)}
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    wait_until(lambda: log.exists() and "daemon" in log.read_text(), "the daemon runs")
    return job


@pytest.mark.slurm
def test_near_its_time_limit_the_daemon_stands_in_the_queue_again(site):
    """Slurm's warning ends the daemon in order, and the same job waits for its next run."""
    log = site.user_dir / "limit"
    job = _submit(site, log)
    site.run_as_user(["scancel", "--batch", "--signal=USR1", job], check=True)
    wait_until(lambda: "ended" in log.read_text(), "the daemon ended in order")
    wait_state(site, job, "PENDING")
    restarts = site.run_as_user(["scontrol", "show", "job", job]).stdout
    assert "Restarts=1" in restarts
    site.run_as_user(["scancel", job], check=True)
    wait_until(lambda: state(site, job) in ("CANCELLED", ""), "the job is gone")


@pytest.mark.slurm
def test_a_cancelled_daemon_stays_away(site):
    """`scancel` ends the daemon in order, and for good."""
    log = site.user_dir / "cancelled"
    job = _submit(site, log)
    site.run_as_user(["scancel", job], check=True)
    wait_until(lambda: state(site, job) in ("CANCELLED", ""), "the job is cancelled")
    wait_until(lambda: not site.job_pids(job), "its processes are gone")
    assert "ended" in log.read_text()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        assert state(site, job) != "PENDING"
