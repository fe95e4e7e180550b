"""`evalspan supervise -- sbatch …` around the demo's training, on a Slurm with accounting: 20 kills change no loss."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from dev_cluster import accounting
from dev_cluster.api import Cluster, DevClusterError, dev_cluster
from dev_cluster.testing import wait_until
from support.sites import LONG

pytestmark = [pytest.mark.slurm, LONG]
KILLS, SEED = 20, 51
SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_training.py"
TRAINING = ("--train", "--steps", "800", "--checkpoints", "40")


def losses(folder: Path) -> list[str]:
    """Whole lines `step,loss`, of steps that were repeated several."""
    place = folder / "losses.csv"
    return place.read_text().split("\n")[:-1] if place.exists() else []


def kill_training(cluster: Cluster, said: Path) -> None:
    job = said.read_text().rpartition(": job ")[2].split()[0]
    for pid in cluster.job_pids(job):
        with suppress(ProcessLookupError, FileNotFoundError):
            if b"demo_training" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def test_twenty_kills_change_no_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Each at a moment that a seed drew: so many steps after the training goes on. Steps that are repeated have the same loss."""
    try:
        accounting.check_machine()
    except DevClusterError as error:
        pytest.skip(str(error))
    with dev_cluster(nodes=2, gpus=2, accounting=True) as cluster:
        alone, killed = cluster.user_dir / "alone", cluster.user_dir / "killed"
        environment = {**cluster.user_env, "OMP_NUM_THREADS": "1"}
        for folder in (alone, killed):
            cluster.run_as_user(["mkdir", "-p", str(folder / "runs")], check=True)
        program = [str(cluster.python), str(SCRIPT), *TRAINING, "--folder"]
        subprocess.run(cluster.user_argv([*program, str(alone)], cwd=alone), env=environment, check=True)
        job = f"#!/bin/sh\nexec {' '.join(program)} {killed}\n"
        cluster.run_as_user(["tee", str(killed / "job.sh")], input=job, check=True)
        options = [
            "--max-restarts",
            "40",
            "--pause",
            "0.1",
            "--checkpoints",
            "runs",
            "--work-dir",
            "supervised",
        ]
        batch = ["sbatch", "-p", "gpu", "--gpus=1", "--mem=2000", "-o", "%j.log", "job.sh"]
        words = [str(cluster.python), "-m", "coordinator", "supervise", *options, "--", *batch]
        said, rng = killed / "said.txt", random.Random(SEED)
        with said.open("w") as out:
            running = subprocess.Popen(
                cluster.user_argv(words, cwd=killed), env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            for _ in range(KILLS):
                least = len(losses(killed)) + rng.randrange(5, 45)
                wait_until(lambda least=least: len(losses(killed)) >= least, f"{least} losses", 180)
                kill_training(cluster, said)
            assert running.wait(300) == 0, said.read_text()
        finally:
            running.kill()
        assert said.read_text().count("restart ") == KILLS
        every = losses(killed)
        assert set(every) == set(losses(alone))
        with capsys.disabled():
            sys.stdout.write(
                f"{KILLS} kills, {len(every) - len(set(every))} of {len(set(every))} steps run again\n"
            )
