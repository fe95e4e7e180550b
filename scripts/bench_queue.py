"""Overheads of the work queue and of metric jobs on a real embedded server. Figures are of this machine.

Metric jobs are real RQ jobs whose outcome is on disk already: what is left of them is enqueue, dispatch, fork, checks
and result.
"""

from __future__ import annotations

import argparse
import json
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


def timed(effect: Any) -> float:
    started = time.perf_counter()
    effect()
    return time.perf_counter() - started


def bench_shards(work: WorkPaths, shards: int, lanes: int, processes: int) -> dict[str, Any]:
    queue = WorkQueue.connect(work.redis_address, "bench")
    per = shards // lanes
    plan = {
        f"l{n}": [
            QueuedShard(shard=f"task{n % 60}|{n * per + i}|{n * per + i + 1}", priority=i, seconds=per - i)
            for i in range(per)
        ]
        for n in range(lanes)
    }
    fill = timed(lambda: queue.fill(plan, "1"))
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    one = context.Process(target=pull, args=(str(work.redis_address), "t0", "none", 2000, out))
    one.start()
    out.get()
    count, seconds = out.get()
    one.join()
    many = [
        context.Process(target=pull, args=(str(work.redis_address), f"t{n}", f"l{n}", 2000, out))
        for n in range(processes)
    ]
    for p in many:
        p.start()
    answers = [out.get() for _ in range(2 * processes)]
    counted = [a for a in answers if a != "ready"]
    for p in many:
        p.join()
    for n in range(lanes):
        queue.heartbeat(f"beat{n}", phase="infer", shard=f"none|{n}|1", batches_done=n, batches=lanes)
    snapshots = sorted(timed(queue.snapshot) for _ in range(50))
    result = {
        "shards": per * lanes,
        "lanes": lanes,
        "fill_seconds": fill,
        "steal_and_done_ms": 1000 * seconds / count,
        "processes": processes,
        "claims_per_second_all_processes": sum(c for c, _ in counted) / max(s for _, s in counted),
        "snapshot_ms_median": 1000 * snapshots[25],
        "unclaimed_seconds": timed(queue.unclaimed),
        "remove_seconds": timed(queue.remove),
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def bench_jobs(work: WorkPaths, jobs: int) -> dict[str, Any]:
    paths = EvaluationPaths(work.root / "jobs")
    for folder in paths.folders():
        folder.mkdir(parents=True)
    suite = SuiteSpec(name="s", tasks=(TaskEntry(name="t"),))
    for n in range(jobs + 1):
        spec = ScoreSpec(
            name=f"score-{n}",
            evaluation_dir=str(paths.root),
            suite=suite,
            entry=0,
            request_sets={},
            frames={},
            model_dir="/",
            model=ModelOptions(),
        )
        write_atomic(paths.spec(spec.name), spec.model_dump_json().encode())
        write_outcome(paths, Failed(name=spec.name, job="score", blame="retry", error="a bench"))
    queue = MetricQueue(work.redis_address, "jobs")
    argv = [sys.executable, "-m", "evaljobs", "worker", "--redis-file", str(work.redis_address)]
    argv += ["--work-dir", str(work.root), "--queue", "jobs"]
    started = time.perf_counter()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        try:
            queue.enqueue("score", f"score-{jobs}", paths.spec(f"score-{jobs}"))
            wait_empty(queue)
            start = time.perf_counter() - started
            enqueue = timed(lambda: enqueue_all(queue, paths, jobs))
            # the worker ran some meanwhile: count from the first enqueue
            total = enqueue + timed(lambda: wait_empty(queue))
        finally:
            worker.send_signal(signal.SIGTERM)
    return {
        "jobs": jobs,
        "worker_start_seconds": round(start, 3),
        "enqueue_ms": round(1000 * enqueue / jobs, 3),
        "enqueue_dispatch_result_ms": round(1000 * total / jobs, 3),
        "target_ms": 50,
    }


def enqueue_all(queue: MetricQueue, paths: EvaluationPaths, jobs: int) -> None:
    for n in range(jobs):
        queue.enqueue("score", f"score-{n}", paths.spec(f"score-{n}"))


def wait_empty(queue: MetricQueue) -> None:
    deadline = time.monotonic() + 300
    while queue.known():
        if time.monotonic() > deadline:
            sys.exit("bench_queue: the jobs did not end within 300 s")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--lanes", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evalspan-bench-") as folder:
        work = WorkPaths(folder)
        server = RedisServer(work)
        server.ensure()
        try:
            result = {
                "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
                "work_queue": bench_shards(work, options.shards, options.lanes, options.processes),
                "metric_queue": bench_jobs(work, options.jobs),
            }
        finally:
            server.stop()
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
