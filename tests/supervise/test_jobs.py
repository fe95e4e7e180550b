"""`evalspan supervise -- sbatch …` on a real Slurm: bad nodes are left out, lost ones survived, and a person's word obeyed."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from dev_cluster.api import Cluster
from dev_cluster.testing import state, wait_state, wait_until

pytestmark = pytest.mark.slurm
LOST = "DistBackendError: NCCL error in: ncclRemoteError: A call to a remote peer failed"
JOB = """#!/bin/sh
mkdir -p runs/step-$((STEP = $(ls runs 2>/dev/null | wc -l) + 1))
set -- "$@"; shift $((STEP - 1))
echo "from=$EVALSPAN_RESUME_FROM on $SLURMD_NODENAME does $1" | tee -a tries.txt
echo '{}' > runs/step-$STEP/config.json
case ${1:-ends} in
  hangs) exec sleep 600 ;;
  dies) kill -9 $$ ;;
  ends) exit 0 ;;
  *) echo "$1" >&2; exit 1 ;;
esac
"""
# Python's start in a test of nodes: a matrix product of n1 is wrong
BAD = """
import os
if os.environ.get("SLURMD_NODENAME") == "n1" and "SLURM_STEP_ID" in os.environ:
    import torch
    real = torch.matmul
    torch.matmul = lambda a, b: real(a, b) + 1
"""


class Supervised:
    """A folder of the cluster's user, with a job whose attempts do what `does` says."""

    def __init__(self, cluster: Cluster, name: str, *does: str) -> None:
        self.cluster, self.folder = cluster, cluster.user_dir / name
        for path, text in {"job.sh": JOB, "bad/sitecustomize.py": BAD}.items():
            place = self.folder / path
            cluster.run_as_user(["mkdir", "-p", str(place.parent)], check=True)
            cluster.run_as_user(["tee", str(place)], input=text, check=True)
        self.said = self.folder / "said.txt"
        options = (
            "--max-restarts",
            "3",
            "--pause",
            "0.1",
            "--hang",
            "12",
            "--checkpoints",
            "runs",
            "--work-dir",
            "work",
        )
        job = ("sbatch", "-p", "gpu", "--gpus=1", "--mem=200", "-o", "%j.log", "job.sh", *does)
        self.words = [str(cluster.python), "-m", "coordinator", "supervise", *options, "--", *job]
        self.argv = cluster.user_argv(self.words, cwd=self.folder)
        prologue = f"export PYTHONPATH={self.folder}/bad:$PYTHONPATH"
        settings = {"TRIAL_PROLOGUE": prologue, "TRIAL_DEVICE": "cpu", "CLUSTER_PARTITION": "gpu"}
        self.env = {**cluster.user_env, **{f"EVALSPAN_{k}": v for k, v in settings.items()}}

    def start(self) -> subprocess.Popen[str]:
        with self.said.open("a") as out:
            return subprocess.Popen(self.argv, env=self.env, stdout=out, stderr=subprocess.STDOUT, text=True)

    def tries(self) -> list[str]:
        place = self.folder / "tries.txt"
        return place.read_text().splitlines() if place.exists() else []

    def job(self) -> str:
        """The last one that it told of."""
        return self.said.read_text().rpartition(": job ")[2].split()[0]


def test_a_bad_node_is_left_out_and_a_hang_ended(plain_cluster: Cluster) -> None:
    """After a network error the job's node is checked, found bad and excluded; later ends are answered from the newest checkpoint."""
    made = Supervised(plain_cluster, "bad-node", LOST, "hangs", "dies", "ends")
    assert made.start().wait(400) == 0, made.said.read_text()
    runs = made.folder / "runs"
    origins = ["", *(str(runs / f"step-{n}") for n in (1, 2, 3))]
    does = [LOST, "hangs", "dies", "ends"]
    assert made.tries() == [
        f"from={o} on {n} does {d}" for o, n, d in zip(origins, ["n1", "n2", "n2", "n2"], does, strict=True)
    ]
    said = made.said.read_text()
    assert "nodes: n1 is bad: wrong product" in said
    assert "restart 2 of 3: reason not known, no output and no heartbeat for" in said


def test_a_bad_node_of_an_allocation_is_left_out(plain_cluster: Cluster) -> None:
    """`supervise` within an sbatch script: steps of that job test its nodes, and the next `srun` runs on the good one."""
    made = Supervised(plain_cluster, "allocation", LOST, "ends")
    inner = shlex.join(
        [*made.words[: made.words.index("sbatch")], "srun", "-N1", "-n1", "sh", "job.sh", LOST, "ends"]
    )
    script = f"#!/bin/sh\nexec {inner}\n"
    place = made.folder / "outer.sh"
    plain_cluster.run_as_user(["tee", str(place)], input=script, check=True)
    options = [
        "-p",
        "gpu",
        "-w",
        "n1,n2",
        "-N2",
        "--ntasks-per-node=1",
        "--gpus-per-node=1",
        "--mem=1500",
        "-o",
        "outer.log",
    ]
    done = subprocess.run(
        plain_cluster.user_argv(["sbatch", "--wait", *options, "outer.sh"], cwd=made.folder),
        env=made.env, check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    said = (made.folder / "outer.log").read_text()
    assert done.returncode == 0, said + done.stderr
    first = f"from= on n1 does {LOST}"
    assert made.tries() == [first, f"from={made.folder}/runs/step-1 on n2 does ends"]
    assert "n1 is bad: wrong product" in said
    assert "attempt 2 from" in said
    assert "without n1" in said


def test_a_job_outlives_its_supervision_and_its_node(plain_cluster: Cluster) -> None:
    """The same command follows the job of a supervision that was killed. A node that loses power is answered by another job; one
    that a person cancels is not started again."""
    made = Supervised(plain_cluster, "power", "hangs", "hangs")
    made.argv[made.argv.index("--hang") + 1] = "0"
    killed = made.start()
    wait_until(lambda: len(made.tries()) == 1, "the job runs")
    first = made.job()
    killed.kill()
    killed.wait(60)
    assert state(plain_cluster, first) == "RUNNING"
    again = made.start()
    wait_until(lambda: f"follows job {first}," in made.said.read_text(), "the job is found")
    node = made.tries()[0].split(" on ")[1].split()[0]
    plain_cluster.kill_node(node)
    try:
        wait_until(lambda: len(made.tries()) == 2, "another job", 200)
        assert f"on {node}" not in made.tries()[1]
        second = made.job()
        wait_state(plain_cluster, second, "RUNNING")
        plain_cluster.run_as_user(["scancel", second], check=True)
        assert again.wait(120) != 0
    finally:
        plain_cluster.bring_back(node)
    said = made.said.read_text()
    assert "NodeFailure (owner: node)" in said
    assert "not restarted: Cancelled" in said
    assert len(made.tries()) == 2
