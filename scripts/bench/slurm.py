"""portfolio63 in small on a real Slurm of this machine: evalspan beside two ways in which others run the same work.

A cluster of 4 nodes with 8 GPUs each. Time is scaled down; the seconds that hold a GPU or a CPU slot are drawn once and
the same for all three runs, one after the other, each from its first submission to its last score.

A peer's jobs are given to `sbatch` as fast as they are taken (per-dataset) or at its source's own pace (num-worker), and
wait in Slurm's queue; the end of a run is the last stamp that its jobs wrote.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dev_cluster import procs
from dev_cluster.api import Cluster, dev_cluster
from simulation.baselines import SUBMIT_SECONDS

from bench.harness import Options, RunError, command, option, row, say, targets
from bench.portfolio import INSTANCE, Portfolio
from bench.synthetic_run import run

NODES, GPUS, CPU_NODES = 4, 8, 2
PEER_JOB = Path("scripts") / "bench" / "peer_job.py"
PATIENCE = 3.0  # a run may take so many times the seconds of all its jobs on the GPUs, and a minute
NAMES = ("evalspan", "per_dataset", "num_worker")
TARGETS = {"per_dataset": 2.8, "num_worker": 1.6}


class Peer:
    """A folder of the user's on the cluster, in which a peer's jobs leave their accounts."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.folder = cluster.user_dir / "bench" / name
        parts = [str(self.folder / part) for part in ("jobs", "done", "reading")]
        cluster.run_as_user(["mkdir", "-p", *parts], check=True)

    def sbatch(self, jobs: Sequence[dict[str, float]], options: str, gap: float) -> None:
        """Submit these jobs in order, `gap` seconds apart."""
        first = len(list((self.folder / "jobs").iterdir()))
        words = [self.cluster.python, "-I", "-S", self.cluster.repo / PEER_JOB]
        python = " ".join(shlex.quote(str(word)) for word in words)
        lines = []
        for number, job in enumerate(jobs, start=first):
            (self.folder / "jobs" / f"{number:03d}").write_text(json.dumps(job))
            wrapped = shlex.quote(f"exec {python} {self.folder} {number:03d}")
            lines.append(f"sbatch --quiet --output=/dev/null --mem=100 {options} --wrap={wrapped} || exit 1")
            lines.append(f"sleep {gap}")
        done = self.cluster.run_as_user(["bash", "-c", "\n".join(lines)], timeout=600)
        if done.returncode:
            raise RunError(f"sbatch: {done.stderr.strip()}")

    def wait(self, jobs: Sequence[dict[str, float]], before: int = 0) -> float:
        """When the last of these jobs, and of `before` others, ended: a time of day."""
        done, count = self.folder / "done", before + len(jobs)
        seconds = [sum(job.values()) for job in jobs]
        patience = 60 + PATIENCE * (max(seconds) + sum(seconds) / (NODES * GPUS))
        ended: list[Path] = []

        def all_ended() -> bool:
            ended[:] = [path for path in done.iterdir() if not path.name.startswith(".")]
            return len(ended) >= count

        if not procs.poll(all_ended, deadline_s=patience, every_s=0.1):
            raise RunError(
                f"{count - len(ended)} of {count} jobs of {self.folder} did not end in {patience:.0f} s"
            )
        return max(json.loads(path.read_text())["ended"] for path in ended)


def per_dataset(cluster: Cluster, portfolio: Portfolio) -> dict[str, float]:
    """One job a set, in the portfolio's order: each prepares, loads, infers and scores with its GPU held."""
    peer = Peer(cluster, "per-dataset")
    pairs = zip(portfolio.per_dataset(), portfolio.truth.metric_seconds, strict=True)
    jobs = [_job(portfolio, seconds, metric) for seconds, metric in pairs]
    began = time.time()
    peer.sbatch(jobs, "--gres=gpu:1", 0.0)
    return {"jobs": len(jobs), "makespan_seconds": peer.wait(jobs) - began}


def num_worker(cluster: Cluster, portfolio: Portfolio) -> dict[str, float]:
    """As many tasks as GPUs, each with a piece of every set; then a CPU job a set for its metric."""
    peer = Peer(cluster, "num-worker")
    jobs = [_job(portfolio, seconds, 0.0) for seconds in portfolio.num_worker()]
    nothing = {"preprocess": 0.0, "storage": 0.0, "load": 0.0, "infer": 0.0}
    metrics = [{**nothing, "metric": seconds} for seconds in sorted(portfolio.truth.metric_seconds)[::-1]]
    began = time.time()
    peer.sbatch(jobs, "--gres=gpu:1", SUBMIT_SECONDS / portfolio.scale)
    inferred = peer.wait(jobs) - began
    peer.sbatch(metrics, "--partition=cpu", 0.0)
    ended = peer.wait(metrics, len(jobs))
    return {"jobs": len(jobs), "inference_seconds": inferred, "makespan_seconds": ended - began}


def _job(portfolio: Portfolio, infer: float, metric: float) -> dict[str, float]:
    instance = portfolio.instance
    fixed = {"preprocess": instance.preprocess_seconds, "storage": instance.storage_seconds_alone}
    return {**fixed, "load": instance.load_seconds, "infer": infer, "metric": metric}


def evalspan(cluster: Cluster, portfolio: Portfolio, options: Options) -> dict[str, Any]:
    """The daemon's run of one evaluation; its own report in short."""
    settings = {key: getattr(options, key) for key in ("scale", "sigma", "seed", "workers")}
    site, _, _ = run(cluster, "evalspan", settings, seconds=120 + 4 * portfolio.bound().seconds)
    [folder] = site.evaluations()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "journal.jsonl"):
            shutil.copyfile(folder / name, options.keep / name)
    report = json.loads((folder / "report.json").read_text())
    if report["status"] != "done":
        raise RunError(f"the evaluation is {report['status']}: {report['warnings']}")
    same = ("makespan_seconds", "predicted_makespan_seconds", "gpu_busy_fraction", "stages", "warnings")
    counts = {"trials": len(report["gpus"]), "shards": len(report["shards"])}
    return {**{name: report[name] for name in same}, **counts}


def judged(measured: dict[str, Any], bound: float) -> list[dict[str, Any]]:
    """Rows of the ratios to the bound and to each peer; without those of a run that was left out."""
    spans = {name: run["makespan_seconds"] for name, run in measured.items()}
    if "evalspan" not in spans:
        return []
    ours = spans["evalspan"]
    peers = [
        row(f"over_{name}", spans[name] / ours, target, at_least=True)
        for name, target in TARGETS.items()
        if name in spans
    ]
    return [row("over_bound", ours / bound, 1.10), *peers]


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    drawn = {"scale": options.scale, "sigma": options.sigma, "seed": options.seed}
    portfolio = Portfolio(INSTANCE.read_text(), **drawn)
    bound = portfolio.bound()
    measured: dict[str, Any] = {}
    with dev_cluster(nodes=NODES, gpus=GPUS, cpu_nodes=CPU_NODES) as cluster:
        for name in options.only:
            say(name)
            if name == "evalspan":
                measured[name] = evalspan(cluster, portfolio, options)
            else:
                peer = per_dataset if name == "per_dataset" else num_worker
                measured[name] = peer(cluster, portfolio)
            say(f"  {measured[name]['makespan_seconds']:.1f} s")
    machine = {"cores": os.cpu_count(), "lower_bound_seconds": bound.seconds, "binding": bound.binding}
    return targets(judged(measured, bound.seconds), **drawn, **machine, **measured)


OPTIONS = (
    option("--scale", 15.0, "seconds are divided by this"),
    option("--sigma", 0.3, "spread of log seconds around the priors"),
    option("--seed", 1),
    option("--workers", 10, "CPU jobs that run metrics"),
    option("--only", list(NAMES), nargs="*", choices=NAMES, type=str),
    option("--keep", text="put evalspan's journal and report there", type=Path, metavar="DIR"),
)
if __name__ == "__main__":
    sys.exit(command("bench_slurm", __doc__, measure, *OPTIONS, slurm=True))
