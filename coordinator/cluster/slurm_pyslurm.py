"""Slurm through pyslurm: submits, lists and cancels jobs without a process each.

Rule: pyslurm runs in a process of its own (`pyslurm_process`, `pyslurm_server`), which is killed where it does not
answer in time. Slurm's commands (SlurmCli) do what pyslurm cannot; BY_COMMANDS names it. Written
for pyslurm 25.11.2, which needs Slurm 25.11. pyslurm is GPL-2.0: the optional extra `slurm`, never
bundled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from coordinator.cluster import ClusterError, Job, RefusedError
from coordinator.cluster.pyslurm_process import INSTALL_HINT, PyslurmProcess
from coordinator.cluster.pyslurm_text import description, environment, nodes_text, queue_text
from coordinator.cluster.sbatch_text import (
    SlurmOptions,
    batch_script,
    sbatch_arguments,
    submission_environment,
)
from coordinator.cluster.slurm_cli import SlurmCli

MOST_CANCELS = 100  # by RPC; pyslurm takes 12 ms for each, in turn
BY_COMMANDS = (
    "the check before the start (sbatch --test-only), cancelling waiting members of arrays and many jobs at once "
    "(scancel), MaxWall and the site's rules (scontrol)"
)
GPUS_BY_COMMAND = (
    ", nodes (sinfo: PrivateData hides other users' jobs and AccountingStorageTRES lacks gres/gpu, "
    "so pyslurm shows no GPUs in use)"
)


def of_another_version(pyslurm: str, slurm: str) -> str:
    """Why this pyslurm is not for this Slurm, in one line; "" where it is. `slurm`: of `sinfo --version`."""
    words = slurm.split()
    if len(words) > 1 and words[1].split(".")[:2] != pyslurm.split(".")[:2]:
        return f"pyslurm {pyslurm} is built for another version than this Slurm ({words[1]}): {INSTALL_HINT}"
    return ""


class SlurmApi(SlurmCli):
    """The Cluster protocol by pyslurm, as this process's user. RefusedError without pyslurm."""

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options)
        self._process = PyslurmProcess(options)
        self._hidden = False  # GPUs in use, at the last listing
        try:
            self.version = self._process.start()
            reason = of_another_version(self.version, self._ask(["sinfo", "--version"]))
        except ClusterError as error:
            reason = str(error)
        if reason:
            self.close()
            raise RefusedError(reason)

    @property
    def by_commands(self) -> str:
        """What Slurm's commands do all the same, in words."""
        return BY_COMMANDS + GPUS_BY_COMMAND * self._hidden

    def submit(self, job: Job) -> str:
        """Submit by one RPC. After a ClusterError, look for the job's name before a retry."""
        fields = description(sbatch_arguments(self.within_limits(job), self.options))
        present = submission_environment(os.environ, self.options, job)
        fields |= {
            "script": batch_script(job, self.options.log_mode),
            **environment(fields.get("environment", "ALL"), present),
        }
        fields["environment"]["SLURM_CPUS_PER_TASK"] = fields["cpus_per_task"]  # as sbatch does
        return str(self._process.ask("submit", fields))

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel by an RPC each; by `scancel` many, members that wait, and where the RPC failed. Ignores ids that are gone."""
        few = len(job_ids) <= MOST_CANCELS
        super().cancel(self._process.ask("cancel", list(job_ids)) if few else job_ids)

    def close(self) -> None:
        """End pyslurm's process."""
        self._process.stop()

    def _queue(self) -> str:
        return queue_text(self._process.ask("jobs"))

    def _sinfo(self) -> str:
        found = self._process.ask("nodes")
        self._hidden = found["used"] is None
        return super()._sinfo() if self._hidden else nodes_text(**found)
