"""Starting and ending each part of one cluster: munged, the submit side, slurmctld, nodes, slurmd.

Rule: every start is idempotent (alive already: nothing happens) and leaves a pid file; every end goes by that file, and
the last one by a mark in the environment: an `up` that is killed may have started what it had no time to write down.
A node is a set of namespaces (mount, pid, host name, IPC) held by its first process: SIGKILL to that one is a power cut,
for the kernel then ends everything inside. slurmd runs inside and may die alone, as on a real node.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from dev_cluster import ns_order, procs
from dev_cluster.procs import Proc
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

PREFIX = os.environ.get(
    "DEV_CLUSTER_SLURM"
)  # of another Slurm than the machine's own: its bin and sbin go first
DAEMON_PATH = (f"{PREFIX}/sbin:{PREFIX}/bin:" if PREFIX else "") + (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
START_S = 90.0
MARK = "EVALSPAN_DEV_CLUSTER"
TRIES = 5  # of making a node's namespaces before those of its jobs
NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--mount-proc")


def daemon_env(record: Record) -> dict[str, str]:
    """Only what the daemons need: a job must not inherit the starter's environment through them.

    Only daemons have the mark: a shell that talks to this cluster has its SLURM_CONF, and `down` must not end it.
    """
    conf = str(record.layout.slurm_conf)
    return {"PATH": DAEMON_PATH, "LANG": "C.UTF-8", "SLURM_CONF": conf, MARK: str(record.root)}


def pid_file(record: Record, label: str) -> Path:
    return record.layout.run / f"{label}.json"


def running(record: Record, label: str) -> Proc | None:
    """The living process of a part: `munged`, `slurmctld`, `login` or a node's name (its first process)."""
    return procs.load(pid_file(record, label))


def spawned(
    record: Record, label: str, argv: list[str], *, log: Path, ready: Callable[[], bool], failure: str = ""
) -> Proc:
    """Start a part in the background, write its pid file and wait until it is ready."""
    proc = procs.spawn(argv, log=log, env=daemon_env(record))
    procs.save(proc, pid_file(record, label))
    procs.poll(lambda: ready() or not proc.alive, deadline_s=START_S, every_s=0.01)
    if not ready() or not proc.alive:
        raise DevClusterError(f"{failure or f'{label} did not start'}: {procs.tail(log)}")
    return proc


def start_munged(record: Record) -> None:
    """An own munged with its own key and socket; a munged of the machine is never touched."""
    if running(record, "munged"):
        return
    munge = record.layout.munge
    key = munge / "key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
    record.layout.munge_socket.unlink(missing_ok=True)
    options = {"socket": record.layout.munge_socket, "key-file": key, "log-file": munge / "log"}
    options |= {"pid-file": munge / "pid", "seed-file": munge / "seed"}
    # munged refuses a socket below a folder that some user may not enter; the submit side shows no such folder.
    enter = ["nsenter", "-t", str(start_login(record).pid), "-m", "--"]
    argv = [*enter, "munged", "--foreground", *(f"--{name}={value}" for name, value in options.items())]
    spawned(record, "munged", argv, log=munge / "out", ready=record.layout.munge_socket.exists)


def start_controller(record: Record) -> None:
    """Start slurmctld on its saved state and wait until it answers."""
    if running(record, "slurmctld") is None:
        argv = ["slurmctld", "-D", "-f", str(record.layout.slurm_conf)]
        log = record.layout.log / "slurmctld.out"  # -D prints what it logs, too
        spawned(record, "slurmctld", argv, log=log, ready=lambda: controller_answers(record))


def controller_answers(record: Record) -> bool:
    done = subprocess.run(
        ["scontrol", "ping"], check=False, capture_output=True, env=daemon_env(record), timeout=60
    )
    return done.returncode == 0


def scontrol(record: Record, *words: str) -> None:
    """A command of the administrator; a DevClusterError with Slurm's words where it is refused."""
    argv = ["scontrol", *words]
    done = subprocess.run(
        argv, check=False, text=True, capture_output=True, env=daemon_env(record), timeout=60
    )
    if done.returncode != 0:
        raise DevClusterError(f"{' '.join(argv)}: {' '.join((done.stderr + done.stdout).split())}")


def kill_controller(record: Record) -> None:
    """SIGKILL slurmctld and its script helper: nothing is saved on the way out."""
    proc = running(record, "slurmctld")
    if proc is not None:
        procs.kill_all([proc, *procs.children(proc.pid)])


def start_login(record: Record) -> Proc:
    """The submit side: a mount namespace in which the user sees what the nodes see. Its first process."""
    return running(record, "login") or _hold(record, "login", ["--mount"], label="login")


def _hold(record: Record, role: str, namespaces: list[str], *, label: str) -> Proc:
    """Start the holder of a set of namespaces under a label and wait until it has furnished them.

    Where jobs have namespaces of their own, its ids are lower than theirs will be.
    """
    for _ in range(TRIES):
        proc = _start_holder(record, role, namespaces, label=label)
        if not record.spec.private_shm or ns_order.comes_first(proc.pid):
            return proc
        procs.kill_all(procs.children(proc.pid))
        procs.kill_all([proc])
    raise DevClusterError(f"this kernel makes later namespaces before those of {role}: try again")


def _start_holder(record: Record, role: str, namespaces: list[str], *, label: str) -> Proc:
    ready = record.layout.run / f"{role}.ready"
    ready.unlink(missing_ok=True)
    log = record.layout.log / f"{role}.out"
    argv = ["unshare", *namespaces, "--propagation", "slave", "sh", str(record.layout.view_script), role]
    cpu = ns_order.lowest_cpu() if record.spec.private_shm else None
    pinned = [] if cpu is None else ["taskset", "-c", str(cpu)]
    argv = ["env", f"ALL_CPUS={ns_order.cpu_list()}", *pinned, *argv]
    failure = f"the namespaces of {role} could not be made"
    return spawned(record, label, argv, log=log, ready=ready.exists, failure=failure)


def start_node(record: Record, name: str) -> None:
    """Boot the node if it is down (with an empty /dev/shm), and its slurmd if that is dead."""
    if running(record, name) is None:
        outer = _hold(record, name, [*NODE_NAMESPACES, "--fork", "--kill-child"], label=_outer(name))
        (first,) = procs.children(outer.pid)
        procs.save(first, pid_file(record, name))
    node = running(record, name)
    if node is None:
        raise DevClusterError(f"node {name} ended at its start: try again")
    if slurmd(record, name) is None:
        log = record.layout.log / f"slurmd.{name}.log"
        argv = ["nsenter", "-t", str(node.pid), "-m", "-u", "-i", "-p", "slurmd", "-N", name]
        argv += (
            ["-b"] if record.spec.power_save else []
        )  # Slurm waits for a node that says that it has booted
        argv += ["-f", str(record.layout.slurm_conf)]  # returns once slurmd is in the background
        done = subprocess.run(
            argv, check=False, text=True, capture_output=True, env=daemon_env(record), cwd="/"
        )
        if done.returncode != 0:
            reason = " ".join((done.stderr + done.stdout).split()) or procs.tail(log)
            raise DevClusterError(f"slurmd of {name} did not start: {reason}")


def inside(record: Record, name: str) -> list[Proc]:
    """Every living process of a node, by its pid outside, its first one first; empty where the node is down."""
    first = running(record, name)
    if first is None:
        return []
    # by pid alone the first one need not come first: pids begin anew at the machine's highest
    return sorted(procs.members(first.pid, "pid"), key=lambda p: (p != first, p.started, p.pid))


def _outer(name: str) -> str:
    """The label of the process outside the node that waits for its first one."""
    return f"{name}.unshare"


def slurmd(record: Record, name: str) -> Proc | None:
    """The node's slurmd (not the copies of it that are about to become job steps)."""
    found = [p for p in inside(record, name) if procs.command_name(p.pid) == "slurmd"]
    return min(found, key=lambda p: (p.started, p.pid), default=None)


def kill_slurmd(record: Record, name: str) -> None:
    """SIGKILL slurmd alone: the jobs of the node run on."""
    proc = slurmd(record, name)
    if proc is not None:
        procs.kill_all([proc])
        # A copy that was about to become a job step bears the name for a moment more: `start_node` would take it for slurmd.
        procs.poll(lambda: slurmd(record, name) is None, deadline_s=10.0, every_s=0.01)


def kill_node(record: Record, name: str) -> None:
    """A power cut: every process of the node ends at once and its /dev/shm is lost."""
    outer = running(record, _outer(name))
    # An `up` that was killed may have left a node whose first process has no pid file yet.
    half_made = [] if outer is None else procs.children(outer.pid)
    procs.kill_all([*inside(record, name), *half_made])
    if outer is not None:
        procs.kill_all([outer])


def kill_login(record: Record) -> None:
    """End the submit side and whatever the user runs on it, children in namespaces of their own (a sandbox's) included."""
    holder = running(record, "login")
    if holder is None:
        return
    # The holder goes last, for it names the namespace; what forks meanwhile is met in the next round.
    holding = {holder, *procs.children(holder.pid)}
    while others := [p for p in _tree(procs.members(holder.pid, "mnt")) if p not in holding and p.alive]:
        procs.kill_all(others)
    procs.kill_all(holding)


def _tree(roots: list[Proc]) -> list[Proc]:
    """The processes and all their living descendants."""
    found = dict.fromkeys(roots)
    waiting = list(roots)
    while waiting:
        new = [child for child in procs.children(waiting.pop().pid) if child not in found]
        found.update(dict.fromkeys(new))
        waiting += new
    return list(found)


def freeze(record: Record, number: int) -> None:
    """SIGSTOP or SIGCONT to slurmctld."""
    proc = running(record, "slurmctld")
    if proc is None:
        raise DevClusterError("slurmctld is not running: start it first")
    proc.send(number)


def kill_everything(record: Record) -> None:
    """End every process of the cluster, the user's on its submit side included."""
    controller = running(record, "slurmctld")
    if controller is not None:
        controller.send(signal.SIGCONT)
    kill_login(record)
    for name in record.spec.node_names:
        kill_node(record, name)
    kill_controller(record)
    for label in ("slurmdbd", "database", "munged"):
        if (proc := running(record, label)) is not None:
            procs.kill_all([proc])
    while left := [p for p in procs.everyone() if procs.environment(p.pid).get(MARK) == str(record.root)]:
        procs.kill_all(left)
