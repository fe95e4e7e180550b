"""The nodes of the Slurm job that this process runs in, tested by steps of that job. `supervise` checks nodes with it.

Rule: a step shares the job's nodes with its other steps and asks for no more than the job has; `cancel` ends it through its srun.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.base.run_command import CommandError, run_command
from coordinator.site.cluster import ClusterError, Job, JobState, NodesJob, NodeState, nodes_of
from coordinator.site.cluster.job_environment import client_environment

COMMAND_SECONDS = 60.0  # for `scontrol` to expand a list of hosts


def nodes_of_allocation(environ: Mapping[str, str]) -> str:
    """Return the hostlist of the Slurm job that this process runs in, "" outside of one."""
    return environ.get("SLURM_JOB_NODELIST", "") if "SLURM_JOB_ID" in environ else ""


class Allocation:
    """The Cluster protocol within a job of Slurm. `environ`: as Slurm gave it to the job."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._job_id, self._hosts = environ["SLURM_JOB_ID"], nodes_of_allocation(environ)
        self._gpus = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
        self._environ = client_environment(environ, {})
        self._steps: dict[str, subprocess.Popen[bytes]] = {}

    def submit(self, job: Job) -> str:
        """Start a step. Raise ClusterError if `srun` cannot be started."""
        words = [
            "srun",
            f"--jobid={self._job_id}",
            "--overlap",
            "--mem=0",  # all of the job's: the training's step has ended
            "--kill-on-bad-exit=0",
            f"--nodes={len(nodes_of(job))}",
            f"--nodelist={','.join(nodes_of(job))}",
            f"--ntasks-per-node={job.tasks if isinstance(job, NodesJob) else 1}",
            *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        ]
        try:
            with Path(job.log).open("ab") as log:
                self._steps[job.name] = subprocess.Popen(
                    [*words, *job.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**self._environ, **job.env},
                    start_new_session=True,  # a Ctrl-C goes to the supervision, which cancels
                )
        except OSError as error:
            raise ClusterError(f"srun: {error}") from error
        return job.name

    def jobs(self) -> list[JobState]:
        codes = {name: step.poll() for name, step in self._steps.items()}
        return [
            JobState(
                job_id=name,
                name=name,
                index=0,
                phase="running" if code is None else "ended",
                state="RUNNING" if code is None else f"ended with exit code {code}",
            )
            for name, code in codes.items()
        ]

    def nodes(self) -> list[NodeState]:
        try:
            said = run_command(
                ["scontrol", "show", "hostnames", self._hosts], seconds=COMMAND_SECONDS, env=self._environ
            )
        except CommandError as error:
            raise ClusterError(str(error)) from error
        return [
            NodeState(
                name=name,
                usable=True,
                state="allocated",
                gpus=self._gpus,
                gpus_free=self._gpus,
                cpus=1,
                cpus_free=1,
                memory_mb=0,
                memory_free_mb=0,
            )
            for name in said.split()
        ]

    def cancel(self, job_ids: Sequence[str]) -> None:
        for job_id in job_ids:
            self._steps[job_id].terminate()  # srun ends its tasks

    def check(self, job: Job) -> None:
        """Accept any job: the nodes are ours."""
