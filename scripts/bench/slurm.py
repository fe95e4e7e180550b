"""portfolio63 in small on a real Slurm of this machine: evalspan beside two ways in which others run the same work.

A cluster of 4 nodes with 8 GPUs each. Time is scaled down; the seconds that hold a GPU or a CPU slot are drawn once and
the same for all three runs, one after the other, each from its first submission to its last score.

A peer's jobs are given to `sbatch` as fast as they are taken (per-dataset) or at its source's own pace (num-worker), and
wait in Slurm's queue; the end of a run is the last stamp that its jobs wrote.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev_cluster import procs
from dev_cluster.api import Cluster, dev_cluster
from simulation.baselines import SUBMIT_SECONDS

from bench.harness import Options, RunError, command, option, row, say, targets
from bench.on_slurm import furnished, run_daemon
from bench.portfolio import Portfolio

NODES, GPUS, CPU_NODES = 4, 8, 2
PEER_JOB = Path("scripts") / "bench" / "peer_job.py"
PATIENCE = 3.0  # a run may take so many times the seconds of all its jobs on the GPUs, and a minute
TARGETS = {"per_dataset": 2.8, "num_worker": 1.6}


def run_jobs(
    cluster: Cluster, name: str, jobs: Sequence[dict[str, float]], options: str, gap: float = 0.0
) -> float:
    """Submit these jobs in order, `gap` seconds apart, and wait for them: when the last one ended, a time of day.

    They leave their accounts in a folder of this name, the user's on the cluster.
    """
    folder = cluster.user_dir / "bench" / name
    parts = [str(folder / part) for part in ("jobs", "done", "reading")]
    cluster.run_as_user(["mkdir", "-p", *parts], check=True)
    words = [cluster.python, "-I", "-S", cluster.repo / PEER_JOB, folder]
    python = " ".join(shlex.quote(str(word)) for word in words)
    lines = []
    for number, job in enumerate(jobs):
        (folder / "jobs" / f"{number:03d}").write_text(json.dumps(job))
        wrapped = shlex.quote(f"exec {python} {number:03d}")
        lines.append(f"sbatch --quiet --output=/dev/null --mem=100 {options} --wrap={wrapped} || exit 1")
        lines.append(f"sleep {gap}")
    submitted = cluster.run_as_user(["bash", "-c", "\n".join(lines)], timeout=600)
    if submitted.returncode:
        raise RunError(f"sbatch: {submitted.stderr.strip()}")
    seconds, done = [sum(job.values()) for job in jobs], folder / "done"
    patience = 60 + PATIENCE * (max(seconds) + sum(seconds) / (NODES * GPUS))
    if not procs.poll(lambda: len(list(done.glob("[0-9]*"))) >= len(jobs), deadline_s=patience, every_s=0.1):
        raise RunError(f"the {len(jobs)} jobs of {folder} did not end in {patience:.0f} s")
    return max(float(json.loads(path.read_text())["ended"]) for path in done.glob("[0-9]*"))


def per_dataset(cluster: Cluster, portfolio: Portfolio, _options: Options) -> dict[str, float]:
    """One job a set, in the portfolio's order: each prepares, loads, infers and scores with its GPU held."""
    pairs = zip(portfolio.per_dataset(), portfolio.truth.metric_seconds, strict=True)
    jobs, began = [_job(portfolio, seconds, metric) for seconds, metric in pairs], time.time()
    return {"makespan_seconds": run_jobs(cluster, "per-dataset", jobs, "--gres=gpu:1") - began}


def num_worker(cluster: Cluster, portfolio: Portfolio, _options: Options) -> dict[str, float]:
    """As many tasks as GPUs, each with a piece of every set; then a CPU job a set for its metric."""
    jobs, began = [_job(portfolio, seconds, 0.0) for seconds in portfolio.num_worker()], time.time()
    nothing = dict.fromkeys(jobs[0], 0.0)
    metrics = [nothing | {"metric": seconds} for seconds in sorted(portfolio.truth.metric_seconds)[::-1]]
    run_jobs(cluster, "num-worker", jobs, "--gres=gpu:1", SUBMIT_SECONDS / portfolio.scale)
    return {"makespan_seconds": run_jobs(cluster, "num-worker-metrics", metrics, "--partition=cpu") - began}


def _job(portfolio: Portfolio, infer: float, metric: float) -> dict[str, float]:
    instance = portfolio.instance
    fixed = {"preprocess": instance.preprocess_seconds, "storage": instance.storage_seconds_alone}
    return {**fixed, "load": instance.load_seconds, "infer": infer, "metric": metric}


def evalspan(cluster: Cluster, portfolio: Portfolio, options: Options) -> dict[str, Any]:
    """The daemon's run of one evaluation."""
    settings = {key: getattr(options, key) for key in ("scale", "sigma", "seed", "workers")}
    site = furnished(cluster, "evalspan", settings)
    run_daemon(site, seconds=120 + 4 * portfolio.bound().seconds)
    [folder] = site.evaluations()
    report = json.loads((folder / "report.json").read_text())
    if report["status"] != "done":
        raise RunError(f"the evaluation is {report['status']}: {report['warnings']}")
    known = {name: report[name] for name in ("makespan_seconds", "gpu_busy_fraction")}
    return known | {"tail_fraction": tail_seconds(report["shards"]) / report["makespan_seconds"]}


def tail_seconds(shards: Sequence[dict[str, Any]]) -> float:
    """Seconds from the first GPU without a shard to the last shard. `shards`: of a report."""
    last: dict[str, float] = {}
    for shard in sorted(shards, key=lambda one: one["started_at"]):
        last[shard["trial"]] = shard["started_at"] + shard["seconds"]
    ends = sorted(last.values())[
        -NODES * GPUS :
    ]  # a trial that another followed on its GPU is not among the last
    return ends[-1] - ends[0]


RUNS = {"evalspan": evalspan, "per_dataset": per_dataset, "num_worker": num_worker}


def judged(measured: dict[str, Any], bound: float) -> list[dict[str, Any]]:
    """Rows of the ratios to the bound and to each peer; without those of a run that was left out."""
    spans = {name: run["makespan_seconds"] for name, run in measured.items()}
    if "evalspan" not in spans:
        return []
    ours = spans.pop("evalspan")
    peers = [row(f"over_{name}", spans[name] / ours, TARGETS[name], at_least=True) for name in spans]
    tail = row("tail / makespan", measured["evalspan"]["tail_fraction"], 0.03)
    return [row("over_bound", ours / bound, 1.10), tail, *peers]


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    drawn = {"scale": options.scale, "sigma": options.sigma, "seed": options.seed}
    portfolio = Portfolio(**drawn)
    bound = portfolio.bound()
    measured: dict[str, Any] = {}
    with dev_cluster(nodes=NODES, gpus=GPUS, cpu_nodes=CPU_NODES) as cluster:
        for name in options.only:
            measured[name] = RUNS[name](cluster, portfolio, options)
            say(f"{name}: {measured[name]['makespan_seconds']:.1f} s")
    return targets(judged(measured, bound.seconds), **drawn, lower_bound_seconds=bound.seconds, **measured)


OPTIONS = (
    option("--scale", 15.0, "seconds are divided by this"),
    option("--sigma", 0.3, "spread of log seconds around the priors"),
    option("--seed", 1),
    option("--workers", 10, "CPU jobs that run metrics"),
    option("--only", list(RUNS), nargs="*", choices=RUNS, type=str),
)
if __name__ == "__main__":
    sys.exit(command("bench_slurm", __doc__, measure, *OPTIONS, slurm=True))
