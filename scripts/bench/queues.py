"""Overheads of the work queue and of metric jobs on a real embedded server. Figures are of this machine.

Metric jobs are real RQ jobs whose outcome is on disk already: what is left of them is enqueue, dispatch, fork, checks
and result.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dev_cluster import procs

from bench.harness import Options, RunError, command, option, row, spread, targets, timed
from coordinator.services.metric_queue import MetricQueue
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import ModelOptions, ScoreSpec, SuiteSpec, TaskEntry
from evaljobs.contract.storage import write_atomic, write_outcome
from evaljobs.queue.work_queue import QueuedShard, WorkQueue


def pull(file: str, trial: str, lane: str, most: int, out: Any) -> None:
    """Claim and finish up to `most` shards; report how many in how many seconds."""
    queue = WorkQueue.connect(Path(file), "bench")
    queue.snapshot()
    out.put("ready")
    started, count = time.perf_counter(), 0
    while count < most and (claim := queue.claim(trial, lane)).shard is not None:
        queue.done(trial, claim.shard, 0)
        count += 1
    out.put((count, time.perf_counter() - started))


def bench_shards(work: WorkPaths, shards: int, lanes: int, processes: int) -> dict[str, Any]:
    queue = WorkQueue.connect(work.redis_address, "bench")
    per = shards // lanes
    plan = {
        f"l{n}": [
            QueuedShard(shard=f"task{n % 60}|{n * per + i}|{n * per + i + 1}", rank=i, seconds=per - i)
            for i in range(per)
        ]
        for n in range(lanes)
    }
    fill = timed(lambda: queue.fill(plan, "1"))
    context = multiprocessing.get_context("spawn")
    out = context.Queue()

    def pulled(pullers: list[tuple[str, str]]) -> list[tuple[int, float]]:
        """What processes claim side by side: (shards, seconds) of each."""
        made = [
            context.Process(target=pull, args=(str(work.redis_address), trial, lane, 2000, out))
            for trial, lane in pullers
        ]
        for process in made:
            process.start()
        answers = [out.get() for _ in range(2 * len(made))]
        for process in made:
            process.join()
        return [answer for answer in answers if answer != "ready"]

    [(count, seconds)] = pulled([("t0", "none")])
    counted = pulled([(f"t{n}", f"l{n}") for n in range(processes)])
    for n in range(lanes):
        queue.heartbeat(f"beat{n}", phase="infer", shard=f"none|{n}|1", batches_done=n, batches=lanes)
    return {
        "shards": per * lanes,
        "lanes": lanes,
        "fill_seconds": fill,
        "steal_and_done_ms": 1000 * seconds / count,
        "processes": processes,
        "claims_per_second_all_processes": sum(c for c, _ in counted) / max(s for _, s in counted),
        "snapshot_ms": spread([1000 * timed(queue.snapshot) for _ in range(50)]),
    }


def bench_jobs(work: WorkPaths, jobs: int) -> dict[str, Any]:
    paths = EvaluationPaths(work.root / "jobs")
    for folder in paths.folders():
        folder.mkdir(parents=True)
    suite = SuiteSpec(name="s", tasks=(TaskEntry(name="t"),))
    for n in range(jobs + 1):
        nothing = {"request_sets": {}, "frames": {}, "model_dir": "/", "model": ModelOptions()}
        spec = ScoreSpec(name=f"score-{n}", evaluation_dir=str(paths.root), suite=suite, entry=0, **nothing)
        write_atomic(paths.spec(spec.name), spec.model_dump_json().encode())
        write_outcome(paths, Failed(name=spec.name, job="score", blame="retry", error="a bench"))
    queue = MetricQueue(work.redis_address, "jobs")

    def enqueue_all() -> None:
        for n in range(jobs):
            queue.enqueue(f"score-{n}", paths.spec(f"score-{n}"))

    argv = [sys.executable, "-m", "evaljobs", "worker", "--redis-file", str(work.redis_address)]
    argv += ["--queue", "jobs"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        try:
            queue.enqueue(f"score-{jobs}", paths.spec(f"score-{jobs}"))
            wait_empty(queue)
            enqueue = timed(enqueue_all)
            # the worker ran some meanwhile: count from the first enqueue
            total = enqueue + timed(lambda: wait_empty(queue))
        finally:
            worker.send_signal(signal.SIGTERM)
    return {
        "jobs": jobs,
        "enqueue_ms": 1000 * enqueue / jobs,
        "enqueue_dispatch_result_ms": 1000 * total / jobs,
    }


def wait_empty(queue: MetricQueue) -> None:
    if not procs.poll(lambda: not queue.known(), deadline_s=300, every_s=0.01):
        raise RunError("the jobs did not end within 300 s")


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as folder:
        work = WorkPaths(folder)
        server = RedisServer(work)
        server.ensure()
        try:
            shards = bench_shards(work, options.shards, options.lanes, options.processes)
            jobs = bench_jobs(work, options.jobs)
        finally:
            server.stop()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    rows = [row("a metric job, enqueue to result, ms", jobs["enqueue_dispatch_result_ms"], 50.0)]
    return targets(rows, machine=machine, work_queue=shards, metric_queue=jobs)


if __name__ == "__main__":
    sizes = (
        option("--shards", 100_000),
        option("--lanes", 256),
        option("--processes", 8),
        option("--jobs", 200),
    )
    sys.exit(command("bench_queue", __doc__, measure, *sizes))
