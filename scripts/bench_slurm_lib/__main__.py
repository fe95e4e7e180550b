"""portfolio63 in small on a real Slurm of this machine, beside two peers, as JSON on stdout.

    scripts/bench_slurm [--scale 15] [--sigma 0.3] [--seed 1] [--workers 10] [--only NAME ...]

A cluster of 4 nodes with 8 GPUs each. Time is scaled down; the seconds that hold a GPU or a CPU slot are drawn once and
the same for all three runs. What cannot be scaled stands beside it: `start_up` is what 32 trials take to start here.
The exit status is 1 when a target is missed, 2 where no cluster can be started.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from dev_cluster.api import DevClusterError, dev_cluster, unavailable

from bench_slurm_lib import runs
from bench_slurm_lib.portfolio import INSTANCE, Portfolio

NODES, GPUS, CPU_NODES = 4, 8, 2
TARGETS = {"over_bound": 1.10, "over_per_dataset": 2.8, "over_num_worker": 1.6}
PEERS = {"per_dataset": runs.per_dataset, "num_worker": runs.num_worker}


def measure(said: argparse.Namespace, portfolio: Portfolio) -> dict[str, Any]:
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_slurm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=15.0, help="seconds are divided by this")
    parser.add_argument("--sigma", type=float, default=0.3, help="spread of log seconds around the priors")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=10, help="CPU jobs that run metrics")
    names = ("evalspan", *PEERS)
    parser.add_argument("--only", nargs="*", choices=names, default=list(names))
    parser.add_argument("--keep", type=Path, metavar="DIR", help="put evalspan's journal and report there")
    said = parser.parse_args()
    why = unavailable()
    if why is not None:
        _say(why)
        return 2
    top = Path(__file__).resolve().parents[2]
    for part in ("coordinator", "evaljobs", "priors", "scripts/bench_slurm_lib"):
        compileall.compile_dir(
            top / part, quiet=2
        )  # else each of 32 trials would, as a user who cannot keep it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the cluster is taken down
    portfolio = Portfolio(INSTANCE.read_text(), scale=said.scale, sigma=said.sigma, seed=said.seed)
    bound = portfolio.bound()
    try:
        measured = measure(said, portfolio)
    except (DevClusterError, runs.RunError) as error:
        _say(str(error))
        return 2 if isinstance(error, DevClusterError) else 1
    rows = judged(measured, bound.seconds)
    result = {
        "schema_version": 1,
        "scale": said.scale,
        "sigma": said.sigma,
        "seed": said.seed,
        "cores": os.cpu_count(),
        "lower_bound_seconds": bound.seconds,
        "binding": bound.binding,
        **measured,
        "targets": rows,
    }
    print(json.dumps(_rounded(result), indent=1))
    return 0 if all(row["met"] is not False for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
