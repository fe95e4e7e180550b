"""Faults of a whole host or service: a host or Redis lost, clock, network, storage, accounting, and locks that two coordinators do not share.

Rule: as in `faults`, whose table has them. What is broken "for good" is mended after the run.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

from dev_cluster import accounting, procs

from chaos_lib.hosts import LOGIN, UNTIL_BACK
from evaljobs.contract.paths import WorkPaths
from evaljobs.queue import redis_client

if TYPE_CHECKING:
    from chaos_lib.run import Run

HOUR = 3600
LOST_S = 30.0  # until another host runs what a lost one did
STORAGE_AWAY_S = 60.0  # ten minutes of a site, in proportion to a toy evaluation
TAKEN_OVER_S = 60.0  # within which the coordinator that another one follows must have ended
SLOW_RATE = 50_000  # bytes a second: the toy's weights take about as long as 40 GB do at 5 MB/s, an eighth of a minute


def _host(run: Run) -> str | None:
    """A host that works for the evaluation: a node with a trial or a metric worker, or the coordinator's."""

    def working() -> str | None:
        verb = run.dice.choice(["trial", "worker", LOGIN])
        pids = set(run.site.processes_of(verb))
        nodes = [n for n in run.site.cluster.nodes if pids & {*run.site.cluster.node_pids(n)}]
        return LOGIN if verb == LOGIN else run.dice.choice(nodes) if nodes else None

    return run.found(working)


def host_lost(run: Run) -> str | None:
    """A power cut of the coordinator's host, on which its Redis runs, too: the command is typed on another one."""
    return run.kill_coordinator(LOST_S)


def redis_host_lost(run: Run) -> str | None:
    """The site's own Redis, which comes back empty at the same address."""
    redis = run.site.redis
    if redis is None or not run.at_work():
        return None
    pid = redis.kill()
    run.wait_seconds(LOST_S)
    redis.start()
    return f"pid {pid} for {LOST_S:g} s"


def storage_away(run: Run) -> str | None:
    """The work folder's, on all hosts: what touches it waits, as on a hard mount."""
    for host in (LOGIN, *run.site.cluster.nodes):
        run.hosts.set(host, run.site.work, hold_s=UNTIL_BACK)
    run.wait_seconds(STORAGE_AWAY_S)
    for host in (LOGIN, *run.site.cluster.nodes):
        run.hosts.set(host)
    return f"{STORAGE_AWAY_S:g} s"


def clock(seconds: int, run: Run) -> str | None:
    """From now on; at half of the times it is set right again after a while."""
    host = _host(run)
    if host is None:
        return None
    run.hosts.set(host, clock_s=seconds)
    if run.dice.random() < 0.5:
        return f"{host} for good"
    time.sleep(run.dice.uniform(5, 30))
    run.hosts.set(host)
    return f"{host} for a while"


def network_cut(seconds: float | None, run: Run) -> str | None:
    """`seconds`: None: until the end of the run."""
    work = WorkPaths(run.site.work)
    node = run.node_of("trial")
    if node is None:
        return None
    with contextlib.suppress(redis_client.QueueUnavailable):
        run.hosts.cut(node, redis_client.read_address(work.redis_address).port)
        run.wait_seconds(seconds)
        return f"{node}: {run.hosts.join(node)} packets"
    return None


def storage_hangs(run: Run) -> str | None:
    """Each call takes 30 s, for a minute."""
    host = _host(run)
    if host is None:
        return None
    run.hosts.set(host, run.site.work, hold_s=30)
    run.wait_seconds(60)
    run.hosts.set(host)
    return host


def storage_slow(run: Run) -> str | None:
    """On the nodes, until the end of the run."""
    if run.node_of("stage") is None:
        return None
    for node in run.site.cluster.nodes:
        run.hosts.set(node, run.site.folder, rate=SLOW_RATE)
    return f"{SLOW_RATE} bytes/s"


def storage_stale(run: Run) -> str | None:
    """A failover: away for a while, then whole, but for what was open before."""
    host = _host(run)
    if host is None:
        return None
    seconds = run.dice.uniform(2, 15)
    run.hosts.set(host, run.site.work, stale=True)
    run.wait_seconds(seconds)
    run.hosts.set(host, run.site.work)
    return f"{host} for {seconds:.0f} s"


# --- accounting -------------------------------------------------------------------------------------------------------

_REFUSED = """\
touch "$ONCE/$$"
echo "$0: error: Problem talking to the database: Connection refused" >&2; exit 1"""


def sacct_away(run: Run) -> str | None:
    """It is asked at a start: the coordinator is killed, and comes back without it."""
    for command in ("sacct", "sacctmgr"):
        run.site.wrap(command, _REFUSED)
    hit = run.kill_coordinator()
    run.wait_seconds(60)
    for command in ("sacct", "sacctmgr"):
        run.site.unwrap(command)
    asked = len(list((run.site.folder / "marks-sacctmgr").iterdir()))
    return f"{hit}, asked {asked} times" if hit and asked else None


def slurmdbd_away(run: Run) -> str | None:
    """So is it, with what Slurm's own commands say then."""
    daemon = run.site.cluster.kill_accounting()
    hit = run.kill_coordinator()
    run.wait_seconds(60)
    accounting.start(run.site.cluster.record)
    return f"{daemon}, {hit}" if hit else None


# --- locks -----------------------------------------------------------------------------------------------------------


def second_coordinator(run: Run) -> str | None:
    """One whose lock sees no other's, as on two hosts with `localflock`: the first one ends by itself, in one line."""
    run.at_work()
    with run.replacing:
        if run.over:
            return None
        first = run.process
        run.process = run.site.start(alone=run.hosts.library)
    if not procs.poll(lambda: first.poll() is not None, deadline_s=TAKEN_OVER_S, every_s=0.1):
        run.broken.append(
            f"the first coordinator did not end within {TAKEN_OVER_S:g} s of the second's start"
        )
        first.kill()
        return f"pid {first.pid}"
    said = (run.site.folder / "eval.log").read_text()
    if first.returncode not in (0, 2) or (first.returncode == 2 and "was taken over by" not in said):
        run.broken.append(f"the first coordinator ended with {first.returncode}: {said[-600:]}")
    return f"pid {first.pid} ended with {first.returncode}" if first.returncode else None


def node_failed(run: Run) -> str | None:
    """An administrator sets it down: Slurm ends its jobs as NODE_FAIL."""
    node = run.node_of("trial")
    if node is not None:
        run.site.cluster.update(f"nodename={node}", "state=down", "reason=chaos")
        with contextlib.suppress(subprocess.SubprocessError):
            run.wait_seconds(run.dice.uniform(10, 30))
        run.site.cluster.bring_back(node)
    return node
