"""The command line: `up`, `status`, `down`, `run`, `power`.

Rule: parses and prints. An operator's error is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from dev_cluster import api, registry
from dev_cluster.api import Cluster
from dev_cluster.spec import ClusterSpec, DevClusterError, flag


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(
        prog="dev-cluster", description="a real Slurm of several nodes on this machine"
    )
    subs = main.add_subparsers(dest="command", required=True)
    up = subs.add_parser("up", help="start a cluster")
    for one in dataclasses.fields(ClusterSpec)[1:]:  # --name is an option of each command
        kind: Any = {"action": "store_true"} if one.default is False else {"type": type(one.default)}
        says = one.metadata["help"]
        up.add_argument(flag(one.name), dest=one.name, default=one.default, help=says, **kind)
    status = subs.add_parser("status", help="show clusters and their nodes")
    down = subs.add_parser("down", help="end a cluster and remove its folder")
    down.add_argument("--all", action="store_true", help="every development cluster of this machine")
    down.add_argument("--orphans", action="store_true", help="those whose test run has died")
    run = subs.add_parser("run", help="run a command as the cluster's user: dev-cluster run -- squeue")
    run.add_argument("argv", nargs="+")
    power = subs.add_parser("power", help="boot nodes, or cut their power: dev-cluster power off n1,n2")
    power.add_argument("what", choices=("on", "off"))
    power.add_argument("nodes", help="node names, as Slurm writes them")
    for sub in (up, status, down, run, power):
        sub.add_argument("--name", default=None if sub is status else ClusterSpec().name)
    return main


def main(argv: list[str] | None = None) -> int:
    options = vars(parser().parse_args(argv))
    does = {"up": _up, "status": _status, "down": _down, "run": _run, "power": _power}[options.pop("command")]
    try:
        api.check_machine()
        does(**options)
    except DevClusterError as error:
        print(f"dev-cluster: {error}", file=sys.stderr)
        return 2
    return 0


def _up(**asked: Any) -> None:
    cluster = api.up(**asked)
    spec, layout = cluster.record.spec, cluster.record.layout
    print(f"cluster {spec.name} is up: {spec.nodes} nodes with {spec.gpus} GPUs, {spec.cpu_nodes} CPU nodes")
    print(f"  export SLURM_CONF={layout.slurm_conf}      (or: . {layout.env_file})")
    print(
        f"  scripts/dev-cluster run --name {spec.name} -- sinfo      (as {cluster.user}, with {cluster.python})"
    )


def _known(name: str) -> Cluster:
    record = registry.read(name)
    if record is None:
        names = ", ".join(r.spec.name for r in registry.everything()) or "none"
        raise DevClusterError(
            f"no cluster named {name} (there are: {names}): scripts/dev-cluster up --name {name}"
        )
    return Cluster(record)


def _status(*, name: str | None) -> None:
    clusters = [*map(Cluster, registry.everything())] if name is None else [_known(name)]
    for cluster in clusters:
        dead = ", ".join(cluster.missing())
        print(f"{cluster.name}: {f'DEAD: {dead}' if dead else 'all daemons run'}")
        print(f"  export SLURM_CONF={cluster.record.layout.slurm_conf}")
        for node, state in cluster.node_states().items():
            print(f"  {node:<5} {state}")
    if not clusters:
        print("no development cluster is up")


def _down(*, name: str, all: bool, orphans: bool) -> None:  # noqa: A002 (the options' names)
    if orphans:
        names = api.down_orphans()
    else:
        clusters = [*map(Cluster, registry.everything())] if all else [_known(name)]
        for cluster in clusters:
            cluster.down()
        names = [cluster.name for cluster in clusters]
    print(f"down: {', '.join(names) or 'nothing'}")


def _run(*, name: str, argv: list[str]) -> None:
    cluster = _known(name)
    line = cluster.user_argv(argv)
    sys.stdout.flush()
    os.execvpe(line[0], line, cluster.user_env)  # noqa: S606 - the command takes our place


def _power(*, name: str, what: str, nodes: str) -> None:
    _known(name).power(nodes, on=what == "on")
