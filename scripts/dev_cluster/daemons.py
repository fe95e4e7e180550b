"""A part of a cluster (munged, the submit side, slurmctld, a node, …) as a process with a pid file, and commands that end.

Rule: a part is found by its pid file. A daemon also has a mark in its environment: an `up` that is killed may have started
what it had no time to write down.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from dev_cluster import procs
from dev_cluster.procs import Proc
from dev_cluster.registry import Record
from dev_cluster.spec import DevClusterError

# of another Slurm than the machine's own: its bin and sbin go first
PREFIX = os.environ.get("DEV_CLUSTER_SLURM")
DAEMON_PATH = (f"{PREFIX}/sbin:{PREFIX}/bin:" if PREFIX else "") + (
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
START_S = 90.0
MARK = "EVALSPAN_DEV_CLUSTER"


def daemon_env(record: Record) -> dict[str, str]:
    """Only what the daemons need: a job must not inherit the starter's environment through them.

    Only daemons have the mark: a shell that talks to this cluster has its SLURM_CONF, and `down` must not end it.
    """
    conf = str(record.layout.slurm_conf)
    return {"PATH": DAEMON_PATH, "LANG": "C.UTF-8", "SLURM_CONF": conf, MARK: str(record.root)}


def _pid_file(record: Record, part: str) -> Path:
    return record.layout.run / f"{part}.json"


def running(record: Record, part: str) -> Proc | None:
    """The living process of a part: `munged`, `slurmctld`, `login` or a node's name (its first process)."""
    try:
        proc = Proc(**json.loads(_pid_file(record, part).read_text()))
    except OSError:
        return None
    return proc if proc.alive else None


def save(record: Record, part: str, proc: Proc) -> None:
    """Write a pid file; whole or not at all."""
    file = _pid_file(record, part)
    file.with_suffix(".part").write_text(json.dumps({"pid": proc.pid, "started": proc.started}))
    file.with_suffix(".part").replace(file)


def spawned(
    record: Record, part: str, argv: Sequence[str], *, log: Path, ready: Callable[[], bool], failure: str = ""
) -> Proc:
    """Start a part in the background, write its pid file and wait until it is ready."""
    proc = procs.spawn(argv, log=log, env=daemon_env(record))
    save(record, part, proc)
    procs.poll(lambda: ready() or not proc.alive, deadline_s=START_S, every_s=0.01)
    if not ready() or not proc.alive:
        raise DevClusterError(f"{failure or f'{part} did not start'}: {procs.tail(log)}")
    return proc


def command(record: Record, *argv: str, seconds: float = 60.0) -> str:
    """What a command of the administrator prints; a DevClusterError with its words where it fails or takes too long."""
    try:
        done = subprocess.run(
            argv,
            check=False,
            text=True,
            capture_output=True,
            env=daemon_env(record),
            cwd="/",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise DevClusterError(f"{argv[0]} did not end in {seconds:g} s") from error
    if done.returncode != 0:
        raise DevClusterError(f"{' '.join(argv[:4])}: {' '.join((done.stderr + done.stdout).split())[-400:]}")
    return done.stdout
