"""portfolio63 in small on a real Slurm of this machine: evalspan beside two ways in which others run the same work.

A cluster of 4 nodes with 8 GPUs each. Time is scaled down; the seconds that hold a GPU or a CPU slot are drawn once and
the same for all three runs, one after the other. What cannot be scaled is left in and stands beside it: `start_up` is
what 32 trials take to start here. The exit status is 1 when a target is missed, 2 where no cluster can be started.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from dev_cluster.api import dev_cluster

from bench import slurm_runs as runs
from bench.harness import always, command, option
from bench.portfolio import INSTANCE, Portfolio
from bench.synthetic_run import compile_all

NODES, GPUS, CPU_NODES = 4, 8, 2
TARGETS = {"over_bound": 1.10, "over_per_dataset": 2.8, "over_num_worker": 1.6}
PEERS = {"per_dataset": runs.per_dataset, "num_worker": runs.num_worker}


def run_all(said: argparse.Namespace, portfolio: Portfolio) -> dict[str, Any]:
    """All runs asked for, one after the other on one cluster."""
    measured: dict[str, Any] = {}
    with dev_cluster(nodes=NODES, gpus=GPUS, cpu_nodes=CPU_NODES) as cluster:
        floor = runs.Floor(cluster)
        measured["start_up"] = runs.starts(floor)
        for name in said.only:
            _say(name)
            if name == "evalspan":
                settings = {key: getattr(said, key) for key in ("scale", "sigma", "seed", "workers")}
                patience = 120 + 4 * portfolio.bound().seconds
                measured[name] = runs.evalspan(floor, settings, patience, said.keep)
            else:
                measured[name] = PEERS[name](floor, portfolio)
            _say(f"  {measured[name]['makespan_seconds']:.1f} s")
    return measured


def judged(measured: dict[str, Any], bound: float) -> dict[str, Any]:
    """Ratios to the bound and to each peer, and whether they meet their targets; None where a run was left out."""
    spans = {name: measured.get(name, {}).get("makespan_seconds") for name in ("evalspan", *PEERS)}
    ours = spans["evalspan"]
    ratios: dict[str, float | None] = {
        "over_bound": ours / bound if ours else None,
        **{f"over_{name}": spans[name] / ours if ours and spans[name] else None for name in PEERS},
    }
    rows = {}
    for name, ratio in ratios.items():
        target = TARGETS[name]
        met = None if ratio is None else ratio <= target if name == "over_bound" else ratio >= target
        rows[name] = {"ratio": ratio, "target": target, "met": met}
    return rows


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(said: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    compile_all()
    drawn = {"scale": said.scale, "sigma": said.sigma, "seed": said.seed}
    portfolio = Portfolio(INSTANCE.read_text(), **drawn)
    bound = portfolio.bound()
    measured = run_all(said, portfolio)
    rows = judged(measured, bound.seconds)
    found = {"cores": os.cpu_count(), "lower_bound_seconds": bound.seconds, "binding": bound.binding}
    well = all(row["met"] is not False for row in rows.values())
    return {"schema_version": 1, **drawn, **found, **measured, "targets": rows}, well


NAMES = ("evalspan", *PEERS)
OPTIONS = (
    option("--scale", 15.0, "seconds are divided by this"),
    option("--sigma", 0.3, "spread of log seconds around the priors"),
    option("--seed", 1),
    option("--workers", 10, "CPU jobs that run metrics"),
    option("--only", list(NAMES), nargs="*", choices=NAMES, type=str),
    option("--keep", says="put evalspan's journal and report there", type=Path, metavar="DIR"),
)
if __name__ == "__main__":
    sys.exit(command("bench_slurm", __doc__, measure, *OPTIONS, slurm=always))
