"""Development clusters for tests: `with dev_cluster(nodes=2, gpus=4) as cluster: …`.

Rule: a thin face on `lifecycle` and `daemons`. The cluster goes when the block ends, and, where the process was killed
before that, with the next `dev_cluster()` on this machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dev_cluster import daemons, lifecycle, procs
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

__all__ = ["Cluster", "DevClusterError", "dev_cluster", "unavailable"]

_numbers = itertools.count(1)


class Cluster:
    """A running cluster. Pids are those seen outside the nodes."""

    def __init__(self, record: Record) -> None:
        spec, layout = record.spec, record.layout
        self.record = record
        self.name = spec.name
        self.warnings = record.warnings
        self.dir = record.root  # `log/` in it has the daemons' logs
        self.nodes = spec.node_names  # GPU nodes (n1, …), then CPU nodes (c1, …)
        self.gpu_nodes, self.cpu_nodes = spec.gpu_node_names, spec.cpu_node_names
        self.user = record.user  # the ordinary user who submits
        self.user_dir = layout.user  # the user's home on this cluster, the same on all nodes
        self.user_env = lifecycle.user_env(record)
        # both usable by the user, at these paths, on the nodes and through `run_as_user`
        self.python, self.repo = record.python, record.repo

    def user_argv(self, argv: Sequence[str | Path], *, cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `argv` as the user on the submit side; for `Popen`, with `user_env` as its env.

        The process started is `argv` itself (no process in between), so signals reach it. `cwd`: `user_dir` by default.
        """
        return [*lifecycle.user_argv(self.record, cwd=cwd), *map(str, argv)]

    def run_as_user(
        self,
        argv: Sequence[str | Path],
        *,
        cwd: Path | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = 120.0,
        check: bool = False,
        **kw: Any,
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` as the user on the submit side; text, captured, without standard input unless given.

        `env` is added to `user_env`; `timeout` is in seconds.
        """
        options: dict[str, Any] = {"text": True, "capture_output": True, **kw}
        if {"stdout", "stderr"} & kw.keys():
            options["capture_output"] = False
        if "input" not in kw:
            options.setdefault("stdin", subprocess.DEVNULL)
        line = self.user_argv(argv, cwd=cwd)
        return subprocess.run(
            line, check=check, env=self.user_env | dict(env or {}), timeout=timeout, **options
        )

    def node_pid(self, name: str) -> int:
        """Pid of the node's slurmd; a DevClusterError where it does not run."""
        proc = daemons.slurmd(self.record, self._known(name))
        if proc is None:
            raise DevClusterError(f"slurmd of {name} is not running")
        return proc.pid

    def node_pids(self, name: str) -> list[int]:
        """Every process of the node, in the order of their starts: its first one, slurmd, job steps and what they started."""
        return [proc.pid for proc in daemons.inside(self.record, self._known(name))]

    def job_pids(self, job: int | str) -> list[int]:
        """The processes of a job (with its SLURM_JOB_ID in their environment), on all nodes."""
        pids = (proc.pid for name in self.nodes for proc in daemons.inside(self.record, name))
        return [pid for pid in pids if procs.environment(pid).get("SLURM_JOB_ID") == str(job)]

    def kill_node(self, name: str) -> None:
        """A power cut: all processes of the node end at once, its /dev/shm is lost. Slurm shows DOWN* after a while."""
        daemons.kill_node(self.record, self._known(name))

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL the node's slurmd alone; its jobs and /dev/shm stay."""
        daemons.kill_slurmd(self.record, self._known(name))

    def start_node(self, name: str) -> None:
        """Boot the node, or only its slurmd where the node is alive; does not wait for Slurm to see it."""
        daemons.start_node(self.record, self._known(name))

    def bring_back(self, name: str) -> None:
        """What an administrator does about a node that is away: `start_node`, and an end to its drain."""
        self.start_node(name)
        if self.node_states().get(name, "").startswith("drain"):
            self.update(f"nodename={name}", "state=resume", check=False)

    def update(self, *words: str, check: bool = True) -> None:
        """`scontrol update` as the administrator."""
        argv = ["scontrol", "update", *words]
        env = daemons.daemon_env(self.record)
        subprocess.run(argv, check=check, capture_output=True, env=env, timeout=60)

    def wait_node(self, name: str, *states: str, deadline_s: float = 120.0) -> None:
        """Wait until Slurm shows the node in one of `states` (`idle`, `mixed`, `down*`; `*` means: does not respond)."""
        lifecycle.wait_nodes(self.record, [self._known(name)], set(states), deadline_s=deadline_s)

    def node_states(self) -> dict[str, str]:
        """Node → state as `sinfo` prints it (`idle`, `allocated`, `down*`, …); empty without an answering slurmctld."""
        return lifecycle.node_states(self.record)

    def kill_controller(self) -> None:
        """SIGKILL slurmctld: what it had not saved is lost."""
        daemons.kill_controller(self.record)

    def start_controller(self) -> None:
        """Start slurmctld on its saved state; returns when it answers."""
        daemons.start_controller(self.record)

    def freeze_controller(self) -> None:
        """SIGSTOP slurmctld: clients wait and time out."""
        daemons.freeze(self.record, signal.SIGSTOP)

    def thaw_controller(self) -> None:
        daemons.freeze(self.record, signal.SIGCONT)

    def down(self) -> None:
        """End everything and remove the folder. Does nothing twice."""
        lifecycle.down(self.record)

    def _known(self, name: str) -> str:
        if name not in self.nodes:
            raise DevClusterError(f"no node named {name}: there are {', '.join(self.nodes)}")
        return name


def unavailable() -> str | None:
    """Why no cluster can be started here (for a test's skip), or None."""
    try:
        lifecycle.check_machine()
    except DevClusterError as error:
        return str(error)
    return None


@contextlib.contextmanager
def dev_cluster(*, name: str | None = None, **options: Any) -> Iterator[Cluster]:
    """A cluster for the length of the block; its name is unique unless given. Errors: DevClusterError.

    `options`: fields of `ClusterSpec` (nodes=4, gpus=8, cpu_nodes=2, …) and of `Request` (dir, port, user, venv, repo, expose).
    """
    lifecycle.down_orphans()
    name = name or f"t{os.getpid()}-{next(_numbers)}"
    request = lifecycle.Request.of({"name": name, "owner": procs.identify(os.getpid()), **options})
    cluster = Cluster(lifecycle.up(request))
    try:
        yield cluster
    finally:
        cluster.down()
