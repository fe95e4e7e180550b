"""Slurm whose jobs and nodes are listed by pyslurm: `[cluster] api = "pyslurm"`.

Rule: pyslurm answers queries, each in a process of its own (`pyslurm_queries`), which is killed where it does not answer in
time. Slurm's commands submit, cancel and say the site's rules. pyslurm is GPL-2.0: the optional extra `slurm`, never bundled.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from coordinator.base.run_command import CommandError, run_command
from coordinator.cluster import ClusterError, JobState, NodeState, RefusedError
from coordinator.cluster.job_environment import client_environment
from coordinator.cluster.pyslurm_queries import GPU
from coordinator.cluster.sbatch_text import SlurmOptions
from coordinator.cluster.slurm_cli import SlurmCli
from coordinator.cluster.slurm_parse import NodeRow

USE_COMMANDS = 'use [cluster] api = "cli"'
INSTALL_HINT = (
    "install it with `pip install 'evalspan[slurm]'` on a machine with the headers and libslurmfull.so of Slurm 25.11 "
    f"(SLURM_INCLUDE_DIR, SLURM_LIB_DIR), or {USE_COMMANDS}"
)
# Slurm's words where library and controller do not understand each other, and where slurmctld ends.
OTHER_VERSION = ("incompatible versions", "protocol version", "zero bytes")
BY_COMMANDS = "submissions (sbatch), cancellations (scancel), the site's rules (scontrol)"
NODES_BY_COMMAND = ", nodes (sinfo: AccountingStorageTRES lacks gres/gpu, so pyslurm shows no GPUs in use)"


class SlurmApi(SlurmCli):
    """The Cluster protocol with pyslurm's listings, as this process's user. RefusedError without a fitting pyslurm."""

    def __init__(self, options: SlurmOptions) -> None:
        super().__init__(options)
        try:
            self.version = self._query("version")["version"]
            slurm = self.ask(["sinfo", "--version"]).split()
        except ClusterError as error:
            raise RefusedError(str(error)) from error
        if len(slurm) > 1 and slurm[1].split(".")[:2] != self.version.split(".")[:2]:
            raise RefusedError(
                f"pyslurm {self.version} is built for another version than this Slurm ({slurm[1]}): {INSTALL_HINT}"
            )

    @property
    def by_commands(self) -> str:
        """What Slurm's commands do all the same, in words."""
        return BY_COMMANDS + NODES_BY_COMMAND * self._nodes_by_command()

    def _nodes_by_command(self) -> bool:
        return GPU not in self.rules().config.get("AccountingStorageTRES", "").split(",")

    def jobs(self) -> list[JobState]:
        """One query; the jobs whose comment has the token."""
        return [JobState(**row) for row in self._query("jobs", self.options.token)["found"]]

    def _node_rows(self) -> list[NodeRow]:
        if self._nodes_by_command():  # else GPUs in use would read as free
            return super()._node_rows()
        found = self._query("nodes")["found"]
        of = {"features", "partitions"}
        return [
            (NodeState(**node | {key: tuple(node[key]) for key in of}), default) for node, default in found
        ]

    def _query(self, *words: str) -> Any:
        """The answer of one process of pyslurm; ClusterError in one line."""
        argv = [*self.options.command_prefix, sys.executable, "-m", "coordinator.cluster.pyslurm_queries"]
        # Slurm's library abbreviates the list of an array's waiting members, but for SLURM_BITSTR_LEN=0.
        env = {**client_environment(os.environ, self.options.env), "SLURM_BITSTR_LEN": "0"}
        try:
            return json.loads(run_command([*argv, *words], seconds=self.options.timeout_seconds, env=env))
        except CommandError as error:
            said = f"pyslurm: {error}"
            if error.timed_out:
                said += "; is slurmctld up?"
            elif "No module named 'pyslurm'" in str(error):
                said = f"pyslurm is not installed: {INSTALL_HINT}"
            elif any(words in str(error).lower() for words in OTHER_VERSION):
                said += (
                    f": where squeue answers, pyslurm is of another version than this Slurm; {USE_COMMANDS}"
                )
            raise ClusterError(said) from error
