"""What a development cluster is, as plain values.

Rule: pure; processes, ports in use and the file system are looked at elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

LONG_NAME = (
    "gpu-node-of-the-very-long-named-cluster-in-building-12-n{:04}"  # 60 characters; only the end differs
)
MIXED_MB = 2000  # memory of the first node of a mixed cluster: less than a trial asks for
NAME_RULE = re.compile(r"[a-z][a-z0-9-]{0,30}")


class DevClusterError(Exception):
    """The operator must act; the message says how. The command line exits 2 with it."""


def _option(default: Any, says: str, *allowed: Any) -> Any:
    """A field that is an option of `dev-cluster up`: its help, and a number's limits or a text's choices."""
    return field(default=default, metadata={"help": says, "allowed": allowed or (0, 10_000_000)})


def flag(name: str) -> str:
    """The option of a field: `--cpu-nodes` of cpu_nodes, `--grace` of grace_s."""
    return "--" + name.removesuffix("_s").replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The cluster asked for. Memory in MiB, times in seconds."""

    name: str = "dev"
    nodes: int = _option(4, "GPU nodes (n1, n2, …)", 1, 256)
    gpus: int = _option(8, "GPUs a GPU node", 1, 64)
    cpu_nodes: int = _option(2, "nodes without GPUs (c1, c2, …)", 0, 256)
    cpus: int = _option(32, "CPUs each node claims", 1, 1024)
    memory_mb: int = _option(64_000, "memory each node claims, MiB", 100, 10_000_000)
    small_mb: int = _option(0, "memory the first GPU node claims instead, MiB (0: as the others)")
    private_shm: bool = _option(False, "each job has its own /dev/shm and /tmp")
    exclusive: bool = _option(False, "a job gets GPU nodes whole")
    gpu_jobs_only: bool = _option(False, "GPU partitions refuse jobs without a GPU")
    demand_account: bool = _option(False, "jobs that name no account are refused")
    cpu_memory_mb: int = _option(0, "MiB that raise a job's CPUs by one on GPU nodes (MaxMemPerCPU; 0: none)")
    cgroups: bool = _option(False, "cgroups hold each job to its memory, cores and GPUs")
    accounting: bool = _option(False, "slurmdbd and MariaDB: an account, and QOS with limits")
    max_time: int = _option(0, "MaxTime of every partition, minutes (0: none)", 0, 525_600)
    part_limits: str = _option("NO", "EnforcePartLimits: NO, ANY or ALL", "NO", "ANY", "ALL")
    max_array: int = _option(0, "MaxArraySize (0: Slurm's own)", 0, 4_000_001)
    untyped_gres: bool = _option(False, "GPUs have no type")
    mixed: bool = _option(False, "n1: 2000 MiB; n2: another GPU type; the others: names of 60 characters")
    reservation: bool = _option(False, "root holds the first GPU node in a reservation")
    power_save: bool = _option(False, "GPU nodes are powered down, and boot for a job")
    grace_s: int = _option(5, "seconds between a preemption's TERM and KILL", 0, 65_533)
    slurmd_timeout_s: int = _option(20, "seconds until a mute node is DOWN", 3, 65_533)

    def __post_init__(self) -> None:
        if not NAME_RULE.fullmatch(self.name):
            raise DevClusterError(
                f"--name {self.name!r}: use a-z, 0-9 and '-', a letter first, at most 31 characters"
            )
        for one in fields(self)[1:]:
            value, allowed = getattr(self, one.name), one.metadata["allowed"]
            if type(value) is int and not allowed[0] <= value <= allowed[1]:
                raise DevClusterError(
                    f"{flag(one.name)} {value}: give a number from {allowed[0]} to {allowed[1]}"
                )
            if type(value) is str and value not in allowed:
                raise DevClusterError(f"{flag(one.name)} {value}: give {' or '.join(allowed)}")
        if self.mixed and self.nodes < len(("little", "other type", "long", "long")):
            raise DevClusterError(f"--mixed with --nodes {self.nodes}: give 4 nodes or more")

    @property
    def gpu_node_names(self) -> list[str]:
        names = [f"n{i}" for i in range(1, self.nodes + 1)]
        return [*names[:2], *(LONG_NAME.format(i) for i in range(3, self.nodes + 1))] if self.mixed else names

    @property
    def cpu_node_names(self) -> list[str]:
        return [f"c{i}" for i in range(1, self.cpu_nodes + 1)]

    @property
    def node_names(self) -> list[str]:
        return self.gpu_node_names + self.cpu_node_names

    @property
    def ports(self) -> int:
        """How many ports the daemons take, side by side."""
        return 1 + len(self.node_names) + 2 * self.accounting

    @property
    def parts(self) -> tuple[str, ...]:
        """Labels of the processes beside the nodes, in the order of their starts."""
        return ("munged", "login", *(("database", "slurmdbd") if self.accounting else ()), "slurmctld")


class Layout:
    """All paths of one cluster, below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "conf"
        self.slurm_conf = self.conf / "slurm.conf"
        self.view_script = self.conf / "namespace.sh"
        self.hosts = self.conf / "hosts"
        self.env_file = root / "env.sh"
        self.log, self.run, self.state, self.spool = (root / n for n in ("log", "run", "state", "spool"))
        self.private = root / "private"  # of job_container/tmpfs; each node's own folder is bound there
        self.munge = root / "munge"
        self.munge_socket = self.munge / "socket"
        self.devices, self.user = root / "dev", root / "user"
        self.database = root / "database"  # of --accounting
        self.site = root / "site"  # shows a venv or repository that jobs could not see otherwise
