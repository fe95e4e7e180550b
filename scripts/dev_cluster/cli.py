"""The command line: `up`, `status`, `down`, `run`.

Rule: parses and prints. An operator's error is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from dev_cluster import lifecycle, registry
from dev_cluster.registry import Record
from dev_cluster.spec import ClusterSpec, DevClusterError


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        prog="dev-cluster", description="a real Slurm of several nodes on this machine"
    )
    subs = main.add_subparsers(dest="command", required=True)
    default = ClusterSpec()
    up = subs.add_parser("up", help="start a cluster")
    up.add_argument("--nodes", type=int, default=default.nodes, help="GPU nodes (n1, n2, …)")
    up.add_argument("--gpus", type=int, default=default.gpus, help="GPUs a GPU node")
    up.add_argument("--cpu-nodes", type=int, default=default.cpu_nodes, help="nodes without GPUs (c1, c2, …)")
    up.add_argument("--cpus", type=int, default=default.cpus, help="CPUs each node claims")
    up.add_argument("--memory-mb", type=int, default=default.memory_mb, help="memory each node claims, MiB")
    up.add_argument(
        "--small-mb", type=int, default=default.small_mb, help="memory the first GPU node claims instead, MiB"
    )
    up.add_argument("--shm-mb", type=int, default=default.shm_mb, help="size of each node's /dev/shm, MiB")
    up.add_argument("--private-shm", action="store_true", help="each job has its own /dev/shm and /tmp")
    up.add_argument("--exclusive", action="store_true", help="a job gets GPU nodes whole")
    up.add_argument("--gpu-jobs-only", action="store_true", help="GPU partitions refuse jobs without a GPU")
    up.add_argument(
        "--cpu-memory-mb",
        type=int,
        default=default.cpu_memory_mb,
        help="MiB that raise a job's CPUs by one on GPU nodes (MaxMemPerCPU)",
    )
    up.add_argument(
        "--spare-mode", default=default.spare_mode, help="partition spare: REQUEUE or CANCEL when preempted"
    )
    up.add_argument(
        "--grace", type=int, default=default.grace_s, help="seconds between a preemption's TERM and KILL"
    )
    up.add_argument(
        "--slurmd-timeout",
        type=int,
        default=default.slurmd_timeout_s,
        help="seconds until a mute node is DOWN",
    )
    up.add_argument("--dir", type=Path, help="the cluster's folder (default /var/tmp/evalspan-dev/NAME)")
    up.add_argument(
        "--port", type=int, help="first of 1 + nodes neighbouring ports (default: free ones are found)"
    )
    up.add_argument(
        "--user", default=lifecycle.DEFAULT_USER, help="the ordinary user who submits; made if absent"
    )
    up.add_argument("--venv", type=Path, help="venv for jobs (default: the repository's .venv)")
    up.add_argument(
        "--expose", type=Path, action="append", default=[], help="a further folder that jobs shall see"
    )
    status = subs.add_parser("status", help="show clusters and their nodes")
    down = subs.add_parser("down", help="end a cluster and remove its folder")
    down.add_argument("--all", action="store_true", help="every development cluster of this machine")
    down.add_argument("--orphans", action="store_true", help="those whose test run has died")
    run = subs.add_parser("run", help="run a command as the cluster's user: dev-cluster run -- squeue")
    run.add_argument("argv", nargs="+")
    for sub in (up, status, down, run):
        sub.add_argument("--name", default=None if sub is status else default.name)
    for sub in (up, status):
        sub.add_argument("--json", action="store_true", help="print JSON")
    return main


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        lifecycle.check_machine()
        return {"up": _up, "status": _status, "down": _down, "run": _run}[options.command](options)
    except DevClusterError as error:
        print(f"dev-cluster: {error}", file=sys.stderr)
        return 2


def _up(options: argparse.Namespace) -> int:
    spec = ClusterSpec(
        name=options.name,
        nodes=options.nodes,
        gpus=options.gpus,
        cpu_nodes=options.cpu_nodes,
        cpus=options.cpus,
        memory_mb=options.memory_mb,
        small_mb=options.small_mb,
        shm_mb=options.shm_mb,
        private_shm=options.private_shm,
        exclusive=options.exclusive,
        gpu_jobs_only=options.gpu_jobs_only,
        cpu_memory_mb=options.cpu_memory_mb,
        spare_mode=options.spare_mode,
        grace_s=options.grace,
        slurmd_timeout_s=options.slurmd_timeout,
    )
    record = lifecycle.up(
        lifecycle.Request(
            spec=spec,
            root=options.dir,
            port=options.port,
            user=options.user,
            venv=options.venv,
            expose=tuple(options.expose),
        )
    )
    for warning in record.warnings:
        print(f"dev-cluster: warning: {warning}", file=sys.stderr)
    if options.json:
        print(json.dumps(lifecycle.status(record)))
    else:
        print(
            f"cluster {spec.name} is up: {spec.nodes} nodes with {spec.gpus} GPUs, {spec.cpu_nodes} CPU nodes"
        )
        print(f"  export SLURM_CONF={record.layout.slurm_conf}      (or: . {record.layout.env_file})")
        print(
            f"  scripts/dev-cluster run --name {spec.name} -- sinfo      (as {record.user}, with {record.python})"
        )
    return 0


def _known(name: str) -> Record:
    record = registry.read(name)
    if record is None:
        names = ", ".join(r.spec.name for r in registry.everything()) or "none"
        raise DevClusterError(
            f"no cluster named {name} (there are: {names}): scripts/dev-cluster up --name {name}"
        )
    return record


def _status(options: argparse.Namespace) -> int:
    records = registry.everything() if options.name is None else [_known(options.name)]
    reports = [lifecycle.status(record) for record in records]
    if options.json:
        print(json.dumps(reports))
        return 0
    if not reports:
        print("no development cluster is up")
    for report in reports:
        running = ", ".join(f"{part} {pid or 'DEAD'}" for part, pid in report["processes"].items())
        print(f"{report['name']}: {running}\n  export SLURM_CONF={report['slurm_conf']}")
        for node in report["nodes"]:
            print(
                f"  {node['name']:<5} {node['state']:<12} {node['gpus']} GPUs  port {node['port']}"
                f"  pid {node['pid'] or 'DEAD'}  slurmd {node['slurmd'] or 'DEAD'}"
            )
    return 0


def _down(options: argparse.Namespace) -> int:
    if options.orphans:
        names = lifecycle.down_orphans()
    else:
        records = registry.everything() if options.all else [_known(options.name)]
        for record in records:
            lifecycle.down(record)
        names = [record.spec.name for record in records]
    print(f"down: {', '.join(names) or 'nothing'}")
    return 0


def _run(options: argparse.Namespace) -> int:
    record = _known(options.name)
    argv = [*lifecycle.user_argv(record, cwd=None), *options.argv]
    sys.stdout.flush()
    os.execvpe(argv[0], argv, lifecycle.user_env(record))  # noqa: S606 - the command takes our place
