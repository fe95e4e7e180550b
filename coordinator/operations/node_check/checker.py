"""Runs the rounds of a node check: one Slurm job per test, and the records of its processes.

Rule: a test that does not start in time is cancelled, and its nodes count as not checked. No job and no file of a check
outlives it. Called by `evalspan check-nodes`, and with `[nodes] check` by the daemon, beside its loop: each node is then
checked on its own before its first use of a day, and not offered until `nodes.json` lists it. A bad node is cordoned for a
day. One that failed while another passed is cordoned for an hour, then checked again; if none passed the check may be at
fault, and the node is used last. No evaluation waits for a check that cannot run.
"""

from __future__ import annotations

import json
import logging
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from coordinator.base.side_process import SideProcess
from coordinator.decide.allocation import cordons
from coordinator.decide.evaluation.job_specs import Site
from coordinator.errors import OperatorError, RetryError
from coordinator.intake.from_settings import site_of
from coordinator.operations.doctor.collect import scratch_folder
from coordinator.operations.doctor.node_jobs import GRACE_SECONDS, NodeJob, Target, ask_nodes
from coordinator.operations.node_check.pairing import (
    MOST_ROUNDS,
    Pairing,
    PairTest,
    Verdict,
    World,
    judge_round,
    own_rates,
)
from coordinator.runtime import wiring
from coordinator.runtime.loop import Coordinator
from coordinator.site.cluster import Cluster, ClusterError, NodesJob, NodeState
from coordinator.site.cluster.node_choice import in_hostlist
from coordinator.site.config.schema import Config
from evaljobs.contract.paths import WorkPaths
from evaljobs.contract.specs import Record

TEST_SECONDS = 120  # after which a test's process exits
TIME_LIMIT_SECONDS = 300  # of a test's job
MEMORY_MB = 3072  # per process of a test
COMMAND, BY_DAEMON = "check-nodes", "the daemon's check"  # names of the check in `nodes.json`
# until a node's next check, by verdict
AFTER_SECONDS = {"ok": 86400.0, "bad": 86400.0, "suspect": 3600.0, "not checked": 600.0}
log = logging.getLogger(__name__)


class CheckedNode(Record):
    """A row of the table. `rates`: operations or bytes per second, of the slowest device."""

    node: str
    verdict: Verdict
    why: str = ""
    rates: dict[str, float] = Field(default_factory=dict)


class CheckReport(Record):
    """Output of `check-nodes`. `undetermined`: no test passed, so suspects may be good nodes; `exclude`: the bad nodes."""

    schema_version: int = 1
    nodes: tuple[CheckedNode, ...]
    rounds: int
    undetermined: bool
    exclude: tuple[str, ...]


def check_nodes(
    config: Config,
    hosts: Sequence[str],
    *,
    wait_seconds: float,
    seed: int,
    alone: bool = False,
    cluster: Cluster | None = None,
) -> CheckReport:
    """Check these nodes (Slurm hostlists), or all idle nodes with GPUs of the trials' partition.

    `wait_seconds`: how long a job may take to start and end; `alone`: each node on its own, on its free GPUs; `cluster`:
    None for that of the settings. Raise OperatorError or RetryError.
    """
    if cluster is None and config.cluster.kind == "local":
        raise OperatorError("check-nodes tests the nodes of a Slurm cluster: use --cluster slurm")
    cluster = cluster or wiring.cluster_of(config)
    try:
        listed = cluster.nodes()
    except ClusterError as error:
        raise RetryError(f"no news of nodes: {error}") from error
    chosen, busy = choose_nodes(listed, hosts)
    with scratch_folder(config, "nodes") as folder:
        site, names = site_of(config), sorted(n.name for n in chosen)
        random.Random(seed).shuffle(names)
        cpu = (config.trial.device or "").startswith("cpu")
        gpus = {n.name: n.gpus_free if alone else n.gpus for n in chosen}
        job = partial(job_of_test, site=site, folder=folder, gpus=gpus, cpu=cpu)
        found = run_rounds(names, job, cluster, wait_seconds, alone=alone)
    now, place = time.time(), WorkPaths(config.work_dir).nodes
    bad = [
        (n.node, cordons.Failure(at=now, why=n.why, seen_by=COMMAND))
        for n in found.nodes
        if n.verdict == "bad" and not alone
    ]
    cordons.record_node_failures(place, bad, now)
    before = cordons.read_node_failures(place, now)
    rows = [*found.nodes, *(CheckedNode(node=n, verdict="not checked", why=why) for n, why in busy.items())]
    rows = [
        n.model_copy(update={"why": _history(before[n.node])})
        if n.verdict == "ok" and n.node in before
        else n
        for n in rows
    ]
    return found.model_copy(update={"nodes": tuple(sorted(rows, key=lambda n: n.node))})


def choose_nodes(nodes: Sequence[NodeState], hosts: Sequence[str]) -> tuple[list[NodeState], dict[str, str]]:
    """Return nodes to check, and the others with the reason. Raise OperatorError if a hostlist matches none."""
    for text in hosts:
        if not any(in_hostlist(n.name, text) for n in nodes):
            raise OperatorError(f"--nodes {text}: the cluster has no such node")
    named = [n for n in nodes if any(in_hostlist(n.name, text) for text in hosts)]
    asked = named if hosts else [n for n in nodes if n.gpus]
    left = {n.name: n.reason or f"it is {n.state}" for n in asked if not n.usable}
    if not hosts:  # busy nodes that were named are waited for
        left |= {
            n.name: f"jobs use {n.gpus - n.gpus_free} of its {n.gpus} GPUs"
            for n in asked
            if n.usable and n.gpus_free < n.gpus
        }
    return [n for n in asked if n.name not in left], left


def _history(failures: Sequence[cordons.Failure]) -> str:
    times = "once" if len(failures) == 1 else f"{len(failures)} times"
    return f"failed {times} in the last 7 days: {failures[-1].why}"


def job_of_test(
    world: World, name: str, *, site: Site, folder: Path, gpus: Mapping[str, int], cpu: bool
) -> tuple[NodesJob, Path]:
    """Return the job of a test, and the folder of its records. All nodes use the smallest number of GPUs."""
    out, fewest = folder / name, min(gpus[n] for n in world)
    tasks = 1 if cpu else max(1, fewest)
    words = ("-m", "evaljobs", "node-check", str(out), "--device", "cpu" if cpu or not fewest else "cuda")
    made = NodesJob(
        name=f"es-check-{folder.name}-{name}",
        argv=(*site.trial_command, *words, "--seconds", str(TEST_SECONDS)),
        log=str(out.with_suffix(".log")),
        nodes=world,
        tasks=tasks,
        gpus=fewest,
        memory_mb=MEMORY_MB * tasks,
        time_limit_seconds=TIME_LIMIT_SECONDS,
        comment=COMMAND,
        env=site.trial_env,
        purpose="probe",
    )
    return made, out


def run_rounds(
    names: Sequence[str], job: Any, cluster: Cluster, wait_seconds: float, *, alone: bool = False
) -> CheckReport:
    """Run all rounds; `alone`: one round with a test per node. `job(world, name)`: like `job_of_test`."""
    pairing = Pairing(names, most_rounds=1 if alone else MOST_ROUNDS)
    rates, was_slow = dict[str, dict[str, float]](), set[str]()
    while worlds := pairing.worlds():
        worlds = [(name,) for name in names] if alone else worlds
        asked = []
        for number, world in enumerate(worlds):
            made, out = job(world, f"{pairing.rounds}-{number}")
            out.mkdir(mode=0o700)
            target = Target(node="+".join(world), cluster=cluster)
            asked.append(NodeJob(target=target, job=made, out=out, answers=len(world) * made.tasks))
        ask_nodes(asked, wait_seconds, _look)
        held = [
            PairTest(
                world=world,
                records=_records(one),
                tasks=one.answers // len(world),
                ran=one.phase != "pending",
                said=one.trouble or one.state,
            )
            for world, one in zip(worlds, asked, strict=True)
        ]
        judge_round(pairing, held, was_slow)
        rates |= own_rates(record for each in held for record in each.records)
    rows = []
    for name in names:
        verdict, why = pairing.verdict(name)
        rows.append(CheckedNode(node=name, verdict=verdict, why=why, rates=rates.get(name, {})))
    return CheckReport(
        nodes=tuple(rows),
        rounds=pairing.rounds,
        undetermined=pairing.undetermined,
        exclude=tuple(sorted(pairing.bad)),
    )


def _look(one: NodeJob) -> None:
    """Look for an answer: it exists once each process has left its last record, or the job has ended."""
    if not one.open:
        return
    left = _records(one)
    whole = len(left) == one.answers and all(r["done"] for r in left)
    if whole or (one.ended_at is not None and time.monotonic() - one.ended_at > GRACE_SECONDS):
        one.record = {"ended": True}


def _records(one: NodeJob) -> list[Mapping[str, Any]]:
    return [json.loads(file.read_bytes()) for file in sorted(one.out.glob("*.json"))]


# --- before use, in a separate process --------------------------------------------------------------------------------


class CheckRequest(Record):
    config: Config
    nodes: tuple[str, ...]


class NodeChecker:
    """Starts the process for the daemon and does not wait for it."""

    def __init__(self, config: Config, coordinator: Coordinator) -> None:
        self._config, self._coordinator, self._nodes = config, coordinator, tuple[str, ...]()
        self._work = WorkPaths(config.work_dir)
        # File WORK_DIR/cache/node-check.log: output of checks of nodes before their use | the coordinator | may be removed
        self._process = SideProcess(__name__, self._work.cache / "node-check.log")
        coordinator.offers.checks_nodes = config.nodes.check and config.cluster.kind == "slurm"

    def tick(self, now: float) -> None:
        """Start what is due, if nothing runs. `now`: unix seconds. Raise OSError if it cannot be started yet."""
        if (code := self._process.ended()) is not None:
            # from a look at `nodes.json` before it was written
            self._coordinator.offers.to_check = frozenset()
            if code:
                log.warning("the check of %s has failed: see %s", ", ".join(self._nodes), self._process.log)
                write_report(
                    [CheckedNode(node=n, verdict="not checked") for n in self._nodes], self._work.nodes, now
                )
        if not self._process.running and self._coordinator.offers.to_check:
            self._nodes = tuple(sorted(self._coordinator.offers.to_check))
            self._process.begin(
                CheckRequest(config=self._config, nodes=self._nodes).model_dump_json().encode()
            )

    def stop(self) -> None:
        """End what runs, which cancels its jobs; the next daemon checks again."""
        self._process.stop()


def write_report(rows: Sequence[CheckedNode], place: Path, now: float) -> None:
    """Record the results in `nodes.json` (`place`). Raise OSError."""
    passed = any(row.verdict == "ok" for row in rows)
    after = {row.node: now + AFTER_SECONDS[row.verdict] for row in rows}
    for row in rows:
        log.info("%s: %s %s", row.node, row.verdict, row.why)
        if row.verdict in ("bad", "suspect"):
            cordons.record_node_failures(
                place, [(row.node, cordons.Failure(at=now, why=row.why, seen_by=BY_DAEMON))], now
            )
        if row.verdict == "bad" or (row.verdict == "suspect" and passed):
            cordons.cordon_nodes(place, [row.node], after[row.node], now)
    cordons.require_node_check(place, after, now)


def main() -> int:
    """Run the child process. Its output is the log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs must be cancelled and files deleted
    asked = CheckRequest.model_validate_json(sys.stdin.buffer.read())
    found = check_nodes(asked.config, asked.nodes, wait_seconds=TEST_SECONDS + 30.0, seed=0, alone=True)
    write_report(found.nodes, WorkPaths(asked.config.work_dir).nodes, time.time())
    return 0


if __name__ == "__main__":
    sys.exit(main())
