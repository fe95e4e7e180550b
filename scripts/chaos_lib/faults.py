"""What can go wrong, each as one function that breaks a thing and, where it is mended, mends it again; and who strikes when.

Rule: a fault strikes once its moment has come and what it needs is there; one that never finds it is "missed", which is
no pass.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import redis
from dev_cluster import procs

from chaos_lib import host_faults
from chaos_lib.site import INTRUDER
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

if TYPE_CHECKING:
    from chaos_lib.run import Run


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` returns what was hit, or None where it was too late. `span`: moments, as shares of an undisturbed run's events.

    `breaks`: parts of the site that no other fault may break at the same time; `on_hosts`: clock, network, storage or
    locks of a host, which is prepared for it; `own_redis`: the site's own Redis, in place of the coordinator's.
    """

    name: str
    strike: Callable[[Run], str | None]
    span: tuple[float, float] = (0.0, 0.9)
    breaks: tuple[str, ...] = ()
    partition: str = "gpu"
    on_small: bool = False
    on_hosts: bool = False
    accounting: bool = False
    own_redis: bool = False


# --- coordinator, Redis, controller ----------------------------------------------------------------------------------


def _kill_redis(run: Run) -> str | None:
    """It comes back empty."""
    work = WorkPaths(run.site.work)
    if not run.wait(work.redis_address.exists):
        return None
    try:
        with redis_client.make_client(redis_client.read_address(work.redis_address)) as client:
            pid = int(client.info("server")["process_id"])
        os.kill(pid, signal.SIGKILL)
    except (redis_client.QueueUnavailable, redis.RedisError, ProcessLookupError):  # it was down already
        return None
    return f"pid {pid}"


def _controller_down(run: Run) -> str:
    run.site.cluster.kill_controller()
    time.sleep(30)
    run.site.cluster.start_controller()
    return "30 s"


def _controller_frozen(run: Run) -> str:
    run.site.cluster.signal_controller(signal.SIGSTOP)
    time.sleep(20)
    run.site.cluster.signal_controller(signal.SIGCONT)
    return "20 s"


# --- nodes and their jobs ----------------------------------------------------------------------------------------------


def _node_killed(verb: str, run: Run) -> str | None:
    node = run.node_of(verb)
    if node is not None:
        run.site.cluster.kill_node(node)
    return node


def _slurmd_killed(run: Run) -> str | None:
    node = run.node_of("trial")
    if node is not None:
        run.site.cluster.kill_slurmd(node)
        time.sleep(5)
        run.site.cluster.start_node(node)
    return node


def _signal_of(verb: str, number: signal.Signals, run: Run) -> str | None:
    pid = run.victim(verb)
    time.sleep(run.dice.uniform(0, 6))  # in its imports, its load or its work
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, number)
            return f"pid {pid}"
    return None


def _out_of_memory(run: Run) -> str | None:
    """From now on the kernel gives a trial no more memory: in its imports, its load or its work an allocation fails."""
    pid = run.victim("trial")
    if pid is None:
        return None
    time.sleep(run.dice.uniform(0, 6))
    with contextlib.suppress(OSError):
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        # by the user: this takes no privilege of a process of one's own, but root in a container may lack it
        done = run.site.cluster.run_as_user(["prlimit", f"--pid={pid}", f"--as={size}"])
        return f"pid {pid} at {size >> 20} MB" if done.returncode == 0 else None
    return None


def _worker_killed(also: bool, run: Run) -> str | None:
    """A work-horse at its work; `also`: its worker, too."""

    def at_work() -> list[procs.Proc] | None:
        supervisors = run.site.processes_of("worker")
        pairs = [[h, w] for s in supervisors for w in procs.children(s) for h in procs.children(w.pid)]
        return run.dice.choice(pairs) if pairs else None

    struck = (run.found(at_work) or [])[: 1 + also]
    for proc in struck:
        proc.send(signal.SIGKILL)
    return f"pids {[proc.pid for proc in struck]}" if struck else None


# --- Slurm's commands and users --------------------------------------------------------------------------------------

# a submission alone: what is only asked passes
_SUBMITS = 'case "$*" in *--test-only*) exec "$REAL" "$@";; esac\n'
_TIMES_OUT = (
    'mkdir "$ONCE/1" 2>/dev/null && { "$REAL" "$@" >/dev/null 2>&1; exec sleep 600; }\nexec "$REAL" "$@"'
)
_FAILS_3 = """\
for i in 1 2 3; do mkdir "$ONCE/$i" 2>/dev/null || continue
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; done
exec "$REAL" "$@\""""


def _wrapped_sbatch(script: str, marks: int, run: Run) -> str | None:
    run.site.wrap("sbatch", _SUBMITS + script)
    folder = run.site.folder / "marks-sbatch"
    run.wait(lambda: len(list(folder.iterdir())) >= marks)
    made = len(list(folder.iterdir()))
    run.site.unwrap("sbatch")
    return f"{made} submissions" if made else None


def _wrapped_squeue(script: str, run: Run) -> str | None:
    run.site.wrap("squeue", f'touch "$ONCE/$$"\n{script}')
    time.sleep(run.dice.uniform(5, 40))
    run.site.unwrap("squeue")
    listings = len(list((run.site.folder / "marks-squeue").iterdir()))
    return f"{listings} listings" if listings else None


def _preempted(run: Run) -> str | None:
    node = run.node_of("trial")
    if node is None:
        return None
    options = ["--partition=gpu", f"--nodelist={node}", "--gres=gpu:2", "--mem=100", f"--job-name={INTRUDER}"]
    run.site.user(["sbatch", *options, "--output=/dev/null", "--wrap=sleep 5"])
    return node


# --- disk ------------------------------------------------------------------------------------------------------


def _disk_full(run: Run) -> str | None:
    filler = run.site.work.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    time.sleep(run.dice.uniform(5, 20))
    size = filler.stat().st_size
    filler.unlink()
    return f"{size >> 20} MB"


def _corrupted(run: Run) -> str | None:
    """Flip a byte in the answers of the record that an evaluation counted last: its task is hardly scored yet."""

    def counted() -> list[tuple[Path, int, int]] | None:
        found = []
        for folder in run.site.evaluations(open_only=True):
            dumped = (e["shards"] for e in run.site.events(folder) if e["kind"] == "shards-dumped")
            mine = [frame for shards in dumped for _, frame in shards]
            found += [(folder / "responses" / f["file"], f["offset"], f["length"]) for f in mine[-1:]]
        return found or None

    last = run.found(counted)
    if last is None:
        return None
    file, offset, length = run.dice.choice(last)
    with file.open("r+b", buffering=0) as handle:
        handle.seek(offset + length * 3 // 4)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 0xFF]))
    return f"{file.name} at {offset}"


_UNKNOWN_STATE = '"$REAL" "$@" | sed \'s/RUNNING/HYPERDRIVE/g; s/COMPLETED/LIMBO/g\''
_GARBAGE = "exec head -c 4096 /dev/urandom"
_ALL = (
    Fault("coordinator-killed", lambda run: run.kill_coordinator(), breaks=("coordinator",)),
    Fault("redis-killed-and-wiped", _kill_redis, (0.1, 0.8), breaks=("redis",)),
    Fault("slurmctld-down", _controller_down, breaks=("controller",)),
    Fault("slurmctld-frozen", _controller_frozen, breaks=("controller",)),
    Fault("node-killed-in-trial", partial(_node_killed, "trial"), (0.0, 0.7), breaks=("node",)),
    Fault("node-killed-in-precursor", partial(_node_killed, "stage"), (0.0, 0.3), breaks=("node",)),
    Fault("slurmd-killed", _slurmd_killed, (0.0, 0.7), breaks=("node",)),
    Fault("trial-killed", partial(_signal_of, "trial", signal.SIGKILL), (0.0, 0.6)),
    Fault("trial-out-of-memory", _out_of_memory, (0.0, 0.6)),
    Fault("trial-hung", partial(_signal_of, "trial", signal.SIGSTOP), (0.0, 0.6)),
    Fault("worker-killed", partial(_signal_of, "worker", signal.SIGKILL), (0.2, 0.8)),
    Fault("work-horse-killed", partial(_worker_killed, False), (0.1, 0.5)),
    Fault("worker-and-horse-killed", partial(_worker_killed, True), (0.1, 0.5)),
    Fault("sbatch-times-out", partial(_wrapped_sbatch, _TIMES_OUT, 1), (0.0, 0.4), breaks=("sbatch",)),
    Fault("sbatch-fails-3-times", partial(_wrapped_sbatch, _FAILS_3, 3), (0.0, 0.3), breaks=("sbatch",)),
    Fault("squeue-garbage", partial(_wrapped_squeue, _GARBAGE), breaks=("squeue",)),
    Fault("squeue-nothing", partial(_wrapped_squeue, "exit 0"), breaks=("squeue",)),
    Fault("squeue-unknown-state", partial(_wrapped_squeue, _UNKNOWN_STATE), breaks=("squeue",)),
    Fault("preempted", _preempted, (0.0, 0.6), partition="spare"),
    Fault("disk-full", _disk_full, breaks=("disk",), on_small=True),
    Fault("record-corrupted", _corrupted, (0.2, 0.8)),
    Fault("clock-forward", partial(host_faults.clock, host_faults.HOUR), breaks=("clock",), on_hosts=True),
    Fault("clock-back", partial(host_faults.clock, -host_faults.HOUR), breaks=("clock",), on_hosts=True),
    Fault(
        "network-cut-60s",
        partial(host_faults.network_cut, 60.0),
        (0.0, 0.7),
        ("node", "redis"),
        on_hosts=True,
    ),
    Fault(
        "network-cut-for-good",
        partial(host_faults.network_cut, None),
        (0.0, 0.7),
        ("node", "redis", "coordinator"),
        on_hosts=True,
    ),
    Fault("host-lost", host_faults.host_lost, (0.3, 0.5), ("coordinator", "redis")),
    Fault("redis-host-lost", host_faults.redis_host_lost, (0.3, 0.5), ("redis",), own_redis=True),
    Fault("storage-away", host_faults.storage_away, (0.3, 0.5), ("clock", "disk"), on_hosts=True),
    Fault("storage-hangs-30s", host_faults.storage_hangs, breaks=("clock", "disk"), on_hosts=True),
    Fault("storage-slow", host_faults.storage_slow, (0.0, 0.3), ("clock", "disk"), on_hosts=True),
    Fault("storage-stale", host_faults.storage_stale, breaks=("clock", "disk"), on_hosts=True),
    Fault("sacct-away", host_faults.sacct_away, breaks=("coordinator",), accounting=True),
    Fault("slurmdbd-away", host_faults.slurmdbd_away, breaks=("coordinator",), accounting=True),
    Fault("node-failed", host_faults.node_failed, (0.0, 0.7), ("node",)),
    Fault(
        "second-coordinator",
        host_faults.second_coordinator,
        (0.0, 0.6),
        breaks=("coordinator",),
        on_hosts=True,
    ),
)
FAULTS = {fault.name: fault for fault in _ALL}


def deal(names: Sequence[str], seed: int, together: int) -> list[tuple[str, ...]]:
    """Each of these faults once, in runs of `together` at most; none of a run break the same part. Drawn from the seed."""
    dice = random.Random(f"deal/{seed}")
    runs: list[list[str]] = []
    for name in dice.sample(list(names), len(names)) if together > 1 else names:
        parts = {*FAULTS[name].breaks}
        fitting = (r for r in runs if len(r) < together and not any(parts & {*FAULTS[n].breaks} for n in r))
        run = next(fitting, None)
        if run is None:
            runs.append([name])
        else:
            run.append(name)
    return [tuple(sorted(run)) for run in runs]
