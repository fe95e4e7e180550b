"""Overheads of the work queue and of metric jobs on a real embedded server. Figures are of this machine.

Metric jobs are real RQ jobs whose outcome is on disk already: what is left of them is enqueue, dispatch, fork, checks
and result.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dev_cluster import procs

from bench.harness import Options, RunError, command, option, row, targets, timed
from coordinator.site.services.metric_queue import MetricQueue
from coordinator.site.services.redis_server import RedisServer
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import ModelOptions, ScoreSpec, SuiteSpec, TaskEntry
from evaljobs.contract.storage import write_outcome, write_record
from evaljobs.queue.redis_client import Link
from evaljobs.queue.work_queue import QueuedShard, WorkQueue

MOST = 2000  # shards that a process claims
LOOKS = 20  # of a trial for a late shard


def pull(file: str, trial: str, lane: str) -> tuple[int, float]:
    """Claim and finish up to MOST shards: how many, in how many seconds."""
    queue = WorkQueue(Link(Path(file)), "bench")
    queue.snapshot()
    started, count = time.perf_counter(), 0
    while count < MOST and (claim := queue.claim(trial, lane)).shard is not None:
        queue.done(trial, claim.shard, 0)
        count += 1
    return count, time.perf_counter() - started


def of_shards(work: WorkPaths, options: Options) -> dict[str, Any]:
    queue, file = WorkQueue(Link(work.redis_address), "bench"), str(work.redis_address)
    lanes, processes = options.lanes, options.processes
    per = options.shards // lanes

    def queued(lane: int, rank: int) -> QueuedShard:
        first = lane * per + rank
        return QueuedShard(shard=f"task{lane % 60}|{first}|{first + 1}", rank=rank, seconds=per - rank)

    plan = {f"l{lane}": [queued(lane, rank) for rank in range(per)] for lane in range(lanes)}
    fill = timed(lambda: queue.fill(plan, "1"))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        count, seconds = pool.apply(pull, (file, "t0", "none"))
        counted = pool.starmap(pull, [(file, f"t{n}", f"l{n}") for n in range(processes)], chunksize=1)
    return {
        "fill_seconds": fill,
        "steal_and_done_ms": 1000 * seconds / count,
        "claims_per_second_all_processes": sum(c for c, _ in counted) / max(s for _, s in counted),
    }


def of_a_look(work: WorkPaths, claims: int) -> float:
    """Milliseconds of a freed trial's claim with so many shards open, none of them late and none left to claim."""
    queue = WorkQueue(Link(work.redis_address), "open")
    queue.fill(
        {"l": [QueuedShard(shard=f"t|{n}|{n + 1}", rank=n, seconds=60) for n in range(claims + 1)]}, "1"
    )
    first = queue.claim("t0", "l").shard or ""
    for n in range(claims):
        queue.claim(f"t{n + 1}", "l")
    queue.done("t0", first, 0)  # from now on a shard is known to take as long as this one has
    return 1000 * timed(lambda: [queue.claim("t0", "l") for _ in range(LOOKS)]) / LOOKS


def of_a_job(work: WorkPaths, jobs: int) -> float:
    """Milliseconds of a metric job from its enqueueing to its result, of so many that are queued at once."""
    paths, suite = EvaluationPaths(work.root / "jobs"), SuiteSpec(name="s", tasks=(TaskEntry(name="t"),))
    for folder in paths.folders():
        folder.mkdir(parents=True)
    about = {"evaluation_dir": str(paths.root), "suite": suite, "entry": 0, "request_sets": {}, "frames": {}}
    for n in range(jobs + 1):
        spec = ScoreSpec(name=f"score-{n}", model_dir="/", model=ModelOptions(), **about)
        write_record(paths.spec(spec.name), spec)
        write_outcome(paths, Failed(name=spec.name, job="score", blame="retry", error="a bench"))
    queue = MetricQueue(Link(work.redis_address), "jobs")

    def run(numbers: range) -> None:
        for n in numbers:
            queue.enqueue(f"score-{n}", paths.spec(f"score-{n}"))
        names = [f"score-{n}" for n in numbers]
        if not procs.poll(lambda: len(queue.gone(names)) == len(names), deadline_s=300, every_s=0.01):
            raise RunError("the jobs did not end within 300 s")

    argv = [sys.executable, "-m", "evaljobs", "worker", "--redis-file", str(work.redis_address)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*argv, "--queue", "jobs"], **quiet) as worker:
        try:
            run(range(jobs, jobs + 1))  # the worker's own start
            return 1000 * timed(lambda: run(range(jobs))) / jobs
        finally:
            worker.terminate()


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as folder:
        work = WorkPaths(folder)
        server = RedisServer(work)
        server.ensure()
        try:
            shards, job = of_shards(work, options), of_a_job(work, options.jobs)
            shards["look_for_a_late_shard_ms"] = of_a_look(work, options.claims)
        finally:
            server.stop()
    return targets([row("a metric job, enqueue to result, ms", job, 50.0)], cpus=os.cpu_count(), **shards)


SIZES = {"--shards": 100_000, "--lanes": 256, "--processes": 8, "--jobs": 200, "--claims": 4500}
if __name__ == "__main__":
    sys.exit(command("bench_queue", __doc__, measure, *(option(name, size) for name, size in SIZES.items())))
