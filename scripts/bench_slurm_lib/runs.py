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

from bench_slurm_lib.portfolio import Portfolio
from coordinator.simulation.baselines import SUBMIT_SECONDS

PEER_JOB = Path("scripts") / "bench_slurm_lib" / "peer_job.py"
STARTS = 32
POLL_SECONDS = 0.1
PATIENCE = 3.0
"""A run may take so many times the seconds of all its jobs one after the other on the GPUs, and a minute."""


class RunError(Exception):
    """A run did not end as it should; says where to look."""


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
        python = (
            f"{shlex.quote(str(self.cluster.python))} -I -S {shlex.quote(str(self.cluster.repo / PEER_JOB))}"
        )
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
                raise RunError(
                    f"{count - len(names)} of {count} jobs of {folder} did not end in {seconds:.0f} s"
                )
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
    instance, folder = portfolio.instance, floor.folder("per-dataset")
    jobs = [
        {
            "preprocess": instance.preprocess_seconds,
            "storage": instance.storage_seconds_alone,
            "load": instance.load_seconds,
            "infer": seconds,
            "metric": metric,
        }
        for seconds, metric in zip(portfolio.per_dataset(), portfolio.truth.metric_seconds, strict=True)
    ]
    began = time.time()
    floor.sbatch(folder, jobs, "--gres=gpu:1", 0.0)
    ended = floor.wait(folder, len(jobs), _patience(jobs))
    return {"jobs": len(jobs), "makespan_seconds": max(job["ended"] for job in ended) - began}


def num_worker(floor: Floor, portfolio: Portfolio) -> dict[str, float]:
    """As many tasks as GPUs, each with a piece of every set; then a CPU job a set for its metric."""
    instance, folder = portfolio.instance, floor.folder("num-worker")
    jobs = [
        {
            "preprocess": instance.preprocess_seconds,
            "storage": instance.storage_seconds_alone,
            "load": instance.load_seconds,
            "infer": seconds,
            "metric": 0.0,
        }
        for seconds in portfolio.num_worker()
    ]
    nothing = {"preprocess": 0.0, "storage": 0.0, "load": 0.0, "infer": 0.0}
    metrics = [{**nothing, "metric": seconds} for seconds in portfolio.truth.metric_seconds]
    metrics.sort(key=lambda job: -job["metric"])
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


def _patience(jobs: Sequence[dict[str, float]]) -> float:
    return 60 + PATIENCE * (
        max(sum(job.values()) for job in jobs) + sum(sum(job.values()) for job in jobs) / 32
    )


def evalspan(floor: Floor, settings: dict[str, Any], patience: float, keep: Path | None) -> dict[str, Any]:
    """The coordinator's run; its own report in short. `keep`: where report and journal are put."""
    folder = floor.folder("evalspan")
    env = {"PYTHONPATH": f"{floor.cluster.repo / 'scripts'}:{floor.cluster.repo}"}
    done = floor.cluster.run_as_user(
        [floor.cluster.python, "-m", "bench_slurm_lib.drive", str(folder), json.dumps(settings)],
        env=env,
        timeout=patience,
    )
    if done.returncode:
        raise RunError(done.stderr[-4000:])
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for name in ("report.json", "journal.jsonl"):
            shutil.copyfile(folder / name, keep / name)
    report = json.loads((folder / "report.json").read_text())
    if report["status"] != "done":
        raise RunError(f"the evaluation is {report['status']}: {report['warnings']}")
    events = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return {
        "makespan_seconds": report["makespan_seconds"],
        "predicted_makespan_seconds": report["predicted_makespan_seconds"],
        "trials": len(report["gpus"]),
        "shards": len(report["shards"]),
        "gpu_busy_fraction": report["gpu_busy_fraction"],
        "stages": report["stages"],
        "seconds_to": milestones(events, report),
        "warnings": report["warnings"],
    }


def milestones(events: Sequence[dict[str, Any]], report: dict[str, Any]) -> dict[str, float]:
    """Seconds from acceptance to what the way to the first shard and from the last one to the end is made of."""
    at: dict[str, list[float]] = defaultdict(list)
    for event in events:
        what = event["kind"]
        if what == "outcome-seen":
            what = event["outcome"]["kind"]
        elif what == "job-submitted":
            what = next(p for p in ("stage", "trial", "metric", "job") if f"-{p}" in event["job"])
            what = f"{what}-submitted"
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
