"""A cluster that runs: its user's side, its nodes, its controller, each of which may be lost and come back; and its end.

Rule: every start is idempotent (alive already: nothing happens). A node is a set of namespaces (mount, pid, host name,
IPC) held by its first process: SIGKILL to that one is a power cut, for the kernel then ends everything inside. slurmd runs
inside and may die alone, as on a real node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dev_cluster import daemons, ns_order, procs, registry
from dev_cluster.procs import Proc
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

DEFAULT_HOME = Path("/var/tmp/evalspan-dev")
CGROUPS = Path("/sys/fs/cgroup")
TRIES = 5  # of making a node's namespaces before those of its jobs
NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child")
SUFFIXES = "~#!%$@^-+"  # that sinfo puts behind a node's state


class Cluster:
    """A running cluster. Pids are those seen outside the nodes."""

    def __init__(self, record: Record) -> None:
        spec, layout = record.spec, record.layout
        self.record = record
        self.name = spec.name
        self.dir = record.root  # `log/` in it has the daemons' logs
        self.nodes = spec.node_names  # GPU nodes (n1, …), then CPU nodes (c1, …)
        self.gpu_nodes, self.cpu_nodes = spec.gpu_node_names, spec.cpu_node_names
        self.user = record.user  # the ordinary user who submits
        self.user_dir = layout.user  # the user's home on this cluster, the same on all nodes
        # both usable by the user, at these paths, on the nodes and through `run_as_user`
        self.python, self.repo = record.python, record.repo
        # the user's whole environment on the submit side; `sbatch` gives it to jobs
        self.user_env = {
            "SLURM_CONF": str(layout.slurm_conf),
            "HOME": str(layout.user),
            "USER": record.user,
            "LOGNAME": record.user,
            "LANG": "C.UTF-8",
            "PATH": f"{record.python.parent}:{daemons.DAEMON_PATH}",
            "PYTHONPATH": str(record.repo),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    # --- the ordinary user -------------------------------------------------------------------------------------------

    def user_argv(self, argv: Sequence[str | Path], *, cwd: Path | str | None = None) -> list[str]:
        """The command line that runs `argv` as the user on the submit side; for `Popen`, with `user_env` as its env.

        The process started is `argv` itself (no process in between), so signals reach it. `cwd`: `user_dir` by default.
        """
        holder = self._running("login")
        if holder is None:
            raise DevClusterError(f"cluster {self.name} is down: scripts/dev-cluster up --name {self.name}")
        ids = ["--reuid", str(self.record.uid), "--regid", str(self.record.gid), "--clear-groups"]
        enter = ["nsenter", "-t", str(holder.pid), "-m", "--", "setpriv", *ids, "--"]
        return [*enter, "env", "-C", str(cwd or self.user_dir), *map(str, argv)]

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

    # --- nodes ---------------------------------------------------------------------------------------------------------

    def node_pid(self, name: str) -> int:
        """Pid of the node's slurmd; a DevClusterError where it does not run."""
        proc = self._slurmd(name)
        if proc is None:
            raise DevClusterError(f"slurmd of {name} is not running")
        return proc.pid

    def node_pids(self, name: str) -> list[int]:
        """Every process of the node, in the order of their starts: its first one, slurmd, job steps and what they started."""
        return [proc.pid for proc in self._inside(name)]

    def job_pids(self, job: int | str) -> list[int]:
        """The processes of a job (with its SLURM_JOB_ID in their environment), on all nodes."""
        pids = (proc.pid for name in self.nodes for proc in self._inside(name))
        return [pid for pid in pids if procs.environment(pid).get("SLURM_JOB_ID") == str(job)]

    def kill_node(self, name: str) -> None:
        """A power cut: all processes of the node end at once, its /dev/shm is lost. Slurm shows DOWN* after a while."""
        outer = self._running(_outer(name))
        # An `up` that was killed may have left a node whose first process has no pid file yet.
        half_made = [] if outer is None else procs.children(outer.pid)
        procs.kill_all([*self._inside(name), *half_made])
        procs.kill_all([outer] if outer is not None else [])

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL the node's slurmd alone; its jobs and /dev/shm stay."""
        proc = self._slurmd(name)
        if proc is not None:
            procs.kill_all([proc])
            # A copy that was about to become a job step has the name for a moment more: `start_node` would take it for slurmd.
            procs.poll(lambda: self._slurmd(name) is None, deadline_s=10.0, every_s=0.01)

    def start_node(self, name: str) -> None:
        """Boot the node (with an empty /dev/shm), or only its slurmd where the node is alive; does not wait for Slurm."""
        if not self._inside(name):
            (first,) = procs.children(self._hold(_outer(name), name, NODE_NAMESPACES).pid)
            daemons.save(self.record, name, first)
        node = self._running(name)
        if node is None:
            raise DevClusterError(f"node {name} ended at its start: try again")
        if self._slurmd(name) is None:
            argv = ["nsenter", "-t", str(node.pid), "-m", "-u", "-i", "-p", "slurmd", "-N", name]
            # Slurm waits for a node that says that it has booted
            argv += ["-b"] if self.record.spec.power_save else []
            argv += ["-f", str(self.record.layout.slurm_conf)]  # returns once slurmd is in the background
            try:
                daemons.command(self.record, *argv, seconds=120)
            except DevClusterError as error:
                log = procs.tail(self.record.layout.log / f"slurmd.{name}.log")
                raise DevClusterError(f"slurmd of {name} did not start: {error}: {log}") from error

    def bring_back(self, name: str) -> None:
        """What an administrator does about a node that is away: `start_node`, and an end to its drain, or to being set down."""
        self.start_node(name)
        if self.node_states().get(name, "").startswith(("drain", "down")):
            with contextlib.suppress(DevClusterError):
                self.update(f"nodename={name}", "state=resume")

    def update(self, *words: str) -> None:
        """`scontrol update` as the administrator."""
        daemons.command(self.record, "scontrol", "update", *words)

    def power(self, nodes: str, *, on: bool) -> None:
        """Boot nodes (Slurm's list of names), or cut their power, as Slurm's ResumeProgram and SuspendProgram do."""
        for name in daemons.command(self.record, "scontrol", "show", "hostnames", nodes).split():
            (self.start_node if on else self.kill_node)(name)

    def node_states(self) -> dict[str, str]:
        """Node → state as `sinfo` prints it (`idle`, `allocated`, `down*`, …); empty without an answering slurmctld."""
        try:
            printed = daemons.command(self.record, "sinfo", "--noheader", "-N", "-o", "%N %T")
        except DevClusterError:
            return {}
        return dict(line.split()[:2] for line in printed.splitlines())

    def wait_nodes(self, names: Sequence[str], *states: str, deadline_s: float = 120.0) -> None:
        """Wait until Slurm shows each in one of `states` (`idle`, `mixed`, `down*`; `*` means: does not respond)."""
        late: list[tuple[str, str]] = []

        def there() -> bool:
            seen = self.node_states()
            shown = [(name, seen.get(name, "unknown")) for name in names]
            late[:] = [(name, state) for name, state in shown if state.rstrip(SUFFIXES) not in states]
            return not late

        if not procs.poll(there, deadline_s=deadline_s, every_s=0.2):
            name, state = late[0]
            log = procs.tail(self.record.layout.log / f"slurmd.{name}.log")
            raise DevClusterError(f"node {name} is {state} after {deadline_s:.0f} s: {log}")

    def _inside(self, name: str) -> list[Proc]:
        """Every living process of a node, by its pid outside, its first one first; empty where the node is down."""
        if name not in self.nodes:
            raise DevClusterError(f"no node named {name}: there are {', '.join(self.nodes)}")
        first = self._running(name)
        # by pid alone the first one need not come first: pids begin anew at the machine's highest
        found = procs.members(first.pid, "pid") if first is not None else []
        return sorted(found, key=lambda p: (p != first, p.started, p.pid))

    def _slurmd(self, name: str) -> Proc | None:
        """The node's slurmd (not the copies of it that are about to become job steps)."""
        found = [p for p in self._inside(name) if procs.command_name(p.pid) == "slurmd"]
        return min(found, key=lambda p: (p.started, p.pid), default=None)

    def _hold(self, part: str, role: str, namespaces: Sequence[str]) -> Proc:
        """Start the holder of a set of namespaces, furnished for a role (a node's name, or `login`).

        Where jobs have namespaces of their own, its ids are lower than theirs will be.
        """
        layout, ordered = self.record.layout, self.record.spec.private_shm
        ready = layout.run / f"{role}.ready"
        for _ in range(TRIES):
            ready.unlink(missing_ok=True)
            cpu = ns_order.lowest_cpu() if ordered else None
            argv = ["env", f"ALL_CPUS={','.join(map(str, sorted(os.sched_getaffinity(0))))}"]
            argv += [] if cpu is None else ["taskset", "-c", str(cpu)]
            argv += ["unshare", *namespaces, "--propagation", "slave", "sh", str(layout.view_script), role]
            proc = daemons.spawned(
                self.record,
                part,
                argv,
                log=layout.log / f"{role}.out",
                ready=ready.exists,
                failure=f"the namespaces of {role} could not be made",
            )
            if not ordered or ns_order.comes_first(proc.pid):
                return proc
            procs.kill_all(procs.children(proc.pid))
            procs.kill_all([proc])
        raise DevClusterError(f"this kernel makes later namespaces before those of {role}: try again")

    # --- submit side, munged, controller -----------------------------------------------------------------------------

    def _running(self, part: str) -> Proc | None:
        return daemons.running(self.record, part)

    def start_login(self) -> Proc:
        """The submit side: a mount namespace in which the user sees what the nodes see. Its first process."""
        return self._running("login") or self._hold("login", "login", ["--mount"])

    def start_munged(self) -> None:
        """An own munged with its own key and socket; a munged of the machine is never touched."""
        if self._running("munged"):
            return
        munge, socket = self.record.layout.munge, self.record.layout.munge_socket
        key = munge / "key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_bytes(secrets.token_bytes(128))
        socket.unlink(missing_ok=True)
        options = {"socket": socket, "key-file": key, "log-file": munge / "log"}
        options |= {"pid-file": munge / "pid", "seed-file": munge / "seed"}
        # munged refuses a socket below a folder that some user may not enter; the submit side shows no such folder.
        enter = ["nsenter", "-t", str(self.start_login().pid), "-m", "--"]
        argv = [*enter, "munged", "--foreground", *(f"--{name}={value}" for name, value in options.items())]
        daemons.spawned(self.record, "munged", argv, log=munge / "out", ready=socket.exists)

    def start_controller(self) -> None:
        """Start slurmctld on its saved state; returns when it answers."""

        def answers() -> bool:
            with contextlib.suppress(DevClusterError):
                daemons.command(self.record, "scontrol", "ping")
                return True
            return False

        if self._running("slurmctld") is None:
            argv = ["slurmctld", "-D", "-f", str(self.record.layout.slurm_conf)]
            log = self.record.layout.log / "slurmctld.out"  # -D prints what it logs, too
            daemons.spawned(self.record, "slurmctld", argv, log=log, ready=answers)

    def kill_controller(self) -> None:
        """SIGKILL slurmctld and its script helper: what it had not saved is lost."""
        proc = self._running("slurmctld")
        if proc is not None:
            procs.kill_all([proc, *procs.children(proc.pid)])

    def kill_accounting(self) -> int | None:
        """SIGKILL slurmdbd; its pid. `accounting.start` brings it back."""
        proc = self._running("slurmdbd")
        procs.kill_all([proc] if proc is not None else [])
        return None if proc is None else proc.pid

    def signal_controller(self, number: int) -> None:
        """Signal slurmctld. After SIGSTOP clients wait and time out."""
        if (proc := self._running("slurmctld")) is not None:
            proc.send(number)

    # --- the whole -----------------------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Parts that do not run: daemons, nodes, and each `slurmd of NODE`."""
        dead = [part for part in (*self.record.spec.parts, *self.nodes) if self._running(part) is None]
        return dead + [f"slurmd of {name}" for name in self.nodes if self._slurmd(name) is None]

    def down(self) -> None:
        """End everything, then remove folder and registration. Does nothing twice."""
        self._kill_everything()
        root = self.record.root
        if self.record.spec.cgroups:
            _remove_cgroups(self.nodes)
        # No mount of a cluster is in this namespace; were one there, removing the folder would reach through it.
        points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        for point in sorted((p for p in points if Path(p).is_relative_to(root)), reverse=True):
            subprocess.run(["umount", "-l", point], check=True)
        if root.exists():
            shutil.rmtree(root)
        with registry.locked():
            with contextlib.suppress(OSError):  # another cluster's folder may be there
                DEFAULT_HOME.rmdir()
            registry.remove(self.name)

    def _kill_everything(self) -> None:
        """End every process of the cluster, the user's on its submit side included."""
        self.signal_controller(signal.SIGCONT)
        self._kill_login()
        for name in self.nodes:
            self.kill_node(name)
        self.kill_controller()
        for part in ("slurmdbd", "database", "munged"):
            procs.kill_all([proc] if (proc := self._running(part)) is not None else [])
        root = str(self.record.root)
        while left := [p for p in procs.everyone() if procs.environment(p.pid).get(daemons.MARK) == root]:
            procs.kill_all(left)

    def _kill_login(self) -> None:
        """End the submit side and whatever the user runs on it, children in namespaces of their own (a sandbox's) included."""
        holder = self._running("login")
        if holder is None:
            return
        # The holder goes last, for it names the namespace; what forks meanwhile is met in the next round.
        holding = {holder, *procs.children(holder.pid)}
        while others := [p for p in _tree(procs.members(holder.pid, "mnt")) if p not in holding and p.alive]:
            procs.kill_all(others)
        procs.kill_all(holding)


def _outer(name: str) -> str:
    """The label of the process outside the node that waits for its first one."""
    return f"{name}.unshare"


def _tree(roots: list[Proc]) -> list[Proc]:
    """The processes and all their living descendants."""
    found = dict.fromkeys(roots)
    waiting = list(roots)
    while waiting:
        new = [child for child in procs.children(waiting.pop().pid) if child not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)


def _remove_cgroups(nodes: Sequence[str]) -> None:
    """What Slurm's cgroup plugins leave when nodes are ended by SIGKILL. A group with a living process stays."""
    for node in nodes:
        for pattern in (f"*/slurm_{node}", f"slurm_{node}", f"*/{node}_slurmstepd.scope"):
            for top in CGROUPS.glob(pattern):
                for folder in sorted([top, *(f for f in top.rglob("*") if f.is_dir())], reverse=True):
                    with contextlib.suppress(OSError):
                        folder.rmdir()
