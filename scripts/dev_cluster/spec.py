"""What a development cluster is, as plain values.

Rule: pure. Knows nothing of processes, ports in use or the file system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NAME_RULE = re.compile(r"[a-z][a-z0-9-]{0,30}")


class DevClusterError(Exception):
    """The operator must act; the message says how. The command line exits 2 with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The cluster asked for. Memory in MiB, times in seconds."""

    name: str = "dev"
    nodes: int = 4
    gpus: int = 8
    cpu_nodes: int = 2
    cpus: int = 32
    memory_mb: int = 64_000
    small_mb: int = 0  # memory of the first GPU node; 0: as the others
    shm_mb: int = 4096
    private_shm: bool = False
    exclusive: bool = False
    gpu_jobs_only: bool = False
    cpu_memory_mb: int = 0  # MaxMemPerCPU of the GPU partitions; 0: none
    spare_mode: str = "REQUEUE"
    grace_s: int = 5
    slurmd_timeout_s: int = 20

    def __post_init__(self) -> None:
        if not NAME_RULE.fullmatch(self.name):
            raise DevClusterError(
                f"--name {self.name!r}: use a-z, 0-9 and '-', a letter first, at most 31 characters"
            )
        limits = {
            "--nodes": (self.nodes, 1, 256),
            "--gpus": (self.gpus, 1, 64),
            "--cpu-nodes": (self.cpu_nodes, 0, 256),
            "--cpus": (self.cpus, 1, 1024),
            "--memory-mb": (self.memory_mb, 100, 10_000_000),
            "--small-mb": (self.small_mb, 0, 10_000_000),
            "--shm-mb": (self.shm_mb, 1, 10_000_000),
            "--cpu-memory-mb": (self.cpu_memory_mb, 0, 10_000_000),
            "--grace": (self.grace_s, 0, 65_533),
            "--slurmd-timeout": (self.slurmd_timeout_s, 3, 65_533),
        }
        for flag, (value, low, high) in limits.items():
            if not low <= value <= high:
                raise DevClusterError(f"{flag} {value}: give a number from {low} to {high}")
        if self.spare_mode not in {"REQUEUE", "CANCEL"}:
            raise DevClusterError(f"--spare-mode {self.spare_mode}: give REQUEUE or CANCEL")

    @property
    def gpu_node_names(self) -> list[str]:
        return [f"n{i}" for i in range(1, self.nodes + 1)]

    @property
    def cpu_node_names(self) -> list[str]:
        return [f"c{i}" for i in range(1, self.cpu_nodes + 1)]

    @property
    def node_names(self) -> list[str]:
        return self.gpu_node_names + self.cpu_node_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All paths of one cluster, in one place. Everything is below `root`."""

    root: Path

    @property
    def conf(self) -> Path:
        return self.root / "conf"

    @property
    def slurm_conf(self) -> Path:
        return self.conf / "slurm.conf"

    @property
    def view_script(self) -> Path:
        return self.conf / "namespace.sh"

    @property
    def hosts(self) -> Path:
        return self.conf / "hosts"

    @property
    def env_file(self) -> Path:
        return self.root / "env.sh"

    @property
    def log(self) -> Path:
        return self.root / "log"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def state(self) -> Path:
        return self.root / "state"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    @property
    def private(self) -> Path:
        """Base of job_container/tmpfs; each node has a folder of its own bound here."""
        return self.root / "private"

    @property
    def munge(self) -> Path:
        return self.root / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def devices(self) -> Path:
        return self.root / "dev"

    @property
    def user(self) -> Path:
        return self.root / "user"

    @property
    def site(self) -> Path:
        """Where a venv or repository that jobs could not see otherwise is shown to them."""
        return self.root / "site"


def is_below(path: Path, folder: str) -> bool:
    """Whether `path` is `folder` or lies below it (by text; resolve links first)."""
    return PurePosixPath(path).is_relative_to(folder)
