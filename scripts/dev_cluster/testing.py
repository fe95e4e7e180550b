"""Submitting and watching jobs in tests, by Slurm's own commands as the cluster's ordinary user.

Rule: waits poll with a deadline in seconds and fail by an AssertionError that names what did not happen.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable

from dev_cluster import procs
from dev_cluster.api import Cluster


def sbatch(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a batch job; its id."""
    done = cluster.run_as_user(
        ["sbatch", "--parsable", "--mem=100", *options], input=f"#!/bin/sh\n{script}\n"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def srun(cluster: Cluster, script: str, *options: str) -> str:
    """Run a shell line in a job and return what it printed."""
    done = cluster.run_as_user(["srun", "--mem=100", *options, "sh", "-c", script])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state(cluster: Cluster, job: str) -> str:
    """Slurm's state of the job; empty once it is purged, UNKNOWN where the controller did not answer."""
    done = cluster.run_as_user(["squeue", "--noheader", "--states=all", "-j", job, "-o", "%T"])
    if done.returncode != 0 and "Invalid job id" not in done.stderr:
        return "UNKNOWN"
    return done.stdout.strip()


def unfinished(cluster: Cluster) -> list[str]:
    """Names of the user's jobs that wait or run. One that Slurm calls COMPLETING has ended, and stays in the listing until
    its node says so too.
    """
    states = "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"
    return cluster.run_as_user(["squeue", "--noheader", states, "--format=%j"], check=True).stdout.split()


# what nodes and root send by themselves, and what `rpcs` itself costs
_OF_NODES = re.compile(r"MESSAGE_|REQUEST_(COMPLETE|STEP|PING|STATS|CONFIG)")


def rpcs(cluster: Cluster) -> Counter[str]:
    """RPCs that the controller has counted (`sdiag`), by kind, less those of nodes."""
    said = subprocess.run(["sdiag"], env=cluster.user_env, capture_output=True, text=True, check=True).stdout
    rows = re.findall(
        r"^\s*(\S+)\s+\(.*?\)\s+count:(\d+)", said.partition("statistics by user")[0], re.MULTILINE
    )
    return Counter({kind: int(count) for kind, count in rows if not _OF_NODES.match(kind)})


def wait_until(
    law: Callable[[], object], what: str = "what was waited for", deadline_s: float = 120.0
) -> None:
    """AssertionError with `what` where `law` does not hold within the deadline."""
    assert procs.poll(law, deadline_s=deadline_s, every_s=0.03), f"not within {deadline_s} s: {what}"


def wait_state(cluster: Cluster, job: str, *wanted: str) -> None:
    wait_until(lambda: state(cluster, job) in wanted, f"job {job} in {wanted}")


def cancel(cluster: Cluster, *jobs: str) -> None:
    """Cancel and wait until nothing of the jobs runs."""
    cluster.run_as_user(["scancel", *jobs])
    wait_until(lambda: not any(cluster.job_pids(job) for job in jobs), f"jobs {jobs} gone")

    def idle() -> bool:
        states = cluster.node_states()  # of no node where the controller does not answer
        return all(states.get(name) == "idle" for name in cluster.nodes)

    wait_until(idle, "idle nodes")
