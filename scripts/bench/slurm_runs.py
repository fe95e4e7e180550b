"""The three runs on one cluster, each from its first submission to its last score.

Rule: a peer's jobs are given to `sbatch` as fast as they are taken (per-dataset) or at its source's own pace
(num-worker), and wait in Slurm's queue; the end of a run is the last stamp that its jobs wrote.
It does not know: what the figures are compared with.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from dev_cluster.api import Cluster

from bench import synthetic_run
from bench.harness import RunError
from bench.portfolio import Portfolio
from coordinator.simulation.baselines import SUBMIT_SECONDS

PEER_JOB = Path("scripts") / "bench" / "peer_job.py"
STARTS = 32
POLL_SECONDS = 0.1
PATIENCE = 3.0  # a run may take so many times the seconds of all its jobs on the GPUs, and a minute


class Floor:
    """A cluster and the user's folder on it, in which each run has one of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.root = Path(cluster.user_dir) / "bench"

    def folder(self, name: str) -> Path:
        folder = self.root / name
        parts = [str(folder / part) for part in ("jobs", "done", "reading")]
        self.cluster.run_as_user(["mkdir", "-p", *parts], check=True)
        return folder

    def sbatch(self, folder: Path, jobs: Sequence[dict[str, float]], options: str, gap: float) -> None:
        """Submit these jobs in order, `gap` seconds apart."""
        first = len(list((folder / "jobs").iterdir()))
        words = [self.cluster.python, "-I", "-S", self.cluster.repo / PEER_JOB]
        python = " ".join(shlex.quote(str(word)) for word in words)
        lines = []
        for number, job in enumerate(jobs, start=first):
            (folder / "jobs" / f"{number:03d}").write_text(json.dumps(job))
            command = shlex.quote(f"exec {python} {folder} {number:03d}")
            lines.append(f"sbatch --quiet --output=/dev/null --mem=100 {options} --wrap={command}")
        script = "\n".join(f"{line} || exit 1\nsleep {gap}" if gap else f"{line} || exit 1" for line in lines)
        done = self.cluster.run_as_user(["bash", "-c", script], timeout=600)
        if done.returncode:
            raise RunError(f"sbatch: {done.stderr.strip()}")

    def wait(self, folder: Path, count: int, seconds: float) -> list[dict[str, float]]:
        """Accounts of all jobs once there are `count`."""
        end = time.monotonic() + seconds
        while True:
            names = sorted(p.name for p in (folder / "done").iterdir() if not p.name.startswith("."))
            if len(names) >= count:
                return [json.loads((folder / "done" / name).read_text()) for name in names]
            if time.monotonic() > end:
                missing = count - len(names)
                raise RunError(f"{missing} of {count} jobs of {folder} did not end in {seconds:.0f} s")
            time.sleep(POLL_SECONDS)


def starts(floor: Floor) -> dict[str, float]:
    """What 32 trials cost to start on this machine: processes that import what a trial imports, and end."""
    folder = floor.folder("starts")
    python, mark = shlex.quote(str(floor.cluster.python)), "$SLURM_ARRAY_TASK_ID"
    script = (
        f'{python} -c "import evaljobs.__main__, evaljobs.trial.trial, evaljobs.staging.precursor" && '
        f"date +%s.%N >{folder}/.{mark} && mv {folder}/.{mark} {folder}/done/{mark}"
    )
    began = time.time()
    argv = ["sbatch", f"--array=1-{STARTS}", "--gres=gpu:1", "--mem=500", "--output=/dev/null"]
    floor.cluster.run_as_user([*argv, f"--wrap={script}"], check=True)
    stamps: list[Any] = floor.wait(folder, STARTS, 300)
    return {"trials": STARTS, "seconds": max(stamps) - began}


def per_dataset(floor: Floor, portfolio: Portfolio) -> dict[str, float]:
    """One job a set, in the portfolio's order: each prepares, loads, infers and scores with its GPU held."""
    folder = floor.folder("per-dataset")
    pairs = zip(portfolio.per_dataset(), portfolio.truth.metric_seconds, strict=True)
    jobs = [_job(portfolio, seconds, metric) for seconds, metric in pairs]
    began = time.time()
    floor.sbatch(folder, jobs, "--gres=gpu:1", 0.0)
    ended = floor.wait(folder, len(jobs), _patience(jobs))
    return {"jobs": len(jobs), "makespan_seconds": max(job["ended"] for job in ended) - began}


def num_worker(floor: Floor, portfolio: Portfolio) -> dict[str, float]:
    """As many tasks as GPUs, each with a piece of every set; then a CPU job a set for its metric."""
    folder = floor.folder("num-worker")
    jobs = [_job(portfolio, seconds, 0.0) for seconds in portfolio.num_worker()]
    nothing = {"preprocess": 0.0, "storage": 0.0, "load": 0.0, "infer": 0.0}
    metrics = [{**nothing, "metric": seconds} for seconds in sorted(portfolio.truth.metric_seconds)[::-1]]
    began = time.time()
    floor.sbatch(folder, jobs, "--gres=gpu:1", SUBMIT_SECONDS / portfolio.scale)
    inferred = max(job["ended"] for job in floor.wait(folder, len(jobs), _patience(jobs)))
    floor.sbatch(folder, metrics, "--partition=cpu", 0.0)
    ended = floor.wait(folder, len(jobs) + len(metrics), _patience(metrics))
    return {
        "jobs": len(jobs),
        "inference_seconds": inferred - began,
        "makespan_seconds": max(job["ended"] for job in ended) - began,
    }


def _job(portfolio: Portfolio, infer: float, metric: float) -> dict[str, float]:
    instance = portfolio.instance
    fixed = {"preprocess": instance.preprocess_seconds, "storage": instance.storage_seconds_alone}
    return {**fixed, "load": instance.load_seconds, "infer": infer, "metric": metric}


def _patience(jobs: Sequence[dict[str, float]]) -> float:
    seconds = [sum(job.values()) for job in jobs]
    return 60 + PATIENCE * (max(seconds) + sum(seconds) / 32)


def evalspan(floor: Floor, said: dict[str, Any], seconds: float, keep: Path | None) -> dict[str, Any]:
    """The daemon's run of one evaluation; its own report in short. `keep`: where report and journal are put."""
    site, _, _ = synthetic_run.run(floor.cluster, "evalspan", said, log=None, seconds=seconds)
    [folder] = site.evaluations()
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "journal.jsonl"):
            shutil.copyfile(folder / name, keep / name)
    report = json.loads((folder / "report.json").read_text())
    if report["status"] != "done":
        raise RunError(f"the evaluation is {report['status']}: {report['warnings']}")
    same = ("makespan_seconds", "predicted_makespan_seconds", "gpu_busy_fraction", "stages", "warnings")
    return {
        **{name: report[name] for name in same},
        "trials": len(report["gpus"]),
        "shards": len(report["shards"]),
        "seconds_to": milestones(site.events(folder), report),
    }


def milestones(events: Sequence[dict[str, Any]], report: dict[str, Any]) -> dict[str, float]:
    """Seconds from acceptance to what the way to the first shard and from the last one to the end is made of."""
    at: dict[str, list[float]] = defaultdict(list)
    for event in events:
        what = event["kind"]
        if what == "outcome-seen":
            what = event["outcome"]["kind"]
        elif what == "job-submitted":
            what = (
                next(p for p in ("stage", "trial", "metric", "job") if f"-{p}" in event["job"]) + "-submitted"
            )
        at[what].append(event["at"])
    first: dict[str, float] = {}
    for shard in report["shards"]:
        first[shard["trial"]] = min(shard["started_at"], first.get(shard["trial"], inf))
    marks = {
        "nodes_offered": min(at["nodes-offered"]),
        "planned": min(at["planned"]),
        "precursors_submitted": max(at["stage-submitted"]),
        "first_staged": min(at["staged"]),
        "last_staged": max(at["staged"]),
        "last_trials_submitted": max(at["trial-submitted"]),
        "first_shard": min(first.values()),
        "all_trials_infer": max(first.values()),
        "first_trial_drained": min(at["trial-ended"]),
        "last_shard_ended": max(s["started_at"] + s["seconds"] for s in report["shards"]),
        "last_executed": max(at["executed"], default=inf),
        "last_scored": max(at["scored"]),
    }
    return {name: when - report["accepted_at"] for name, when in marks.items()}
