"""What the daemon costs and how soon it acts.

Without an option: the CPU time that the state machine takes for an event of an evaluation on 256 nodes of 8 GPUs, and that a
coordinator takes to have its state again from the journal; then, on a development cluster, one evaluation through a daemon
and `--idle` seconds of silence.
--status N, and nothing else then: CPU seconds of `evalspan status` with Python's start, over N evaluations, one of them
open with such a journal.
--scale, and nothing else then: `--evaluations` at once on a cluster of `--nodes`, with an engine that holds its GPU for drawn
seconds. --answer has each Slurm command of the daemon take so many seconds more. The daemon gets the CPU time that it asks
for: at a site the nodes' trials run on other machines.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos_lib.campaign import laws_broken
from chaos_lib.site import Site, place
from dev_cluster.api import dev_cluster
from dev_cluster.testing import rpcs, wait_until
from support.simulated.large import Large, plain_step

from bench import on_slurm
from bench.harness import Options, command, option, row, spread, targets
from coordinator.decide.evaluation import events as ev
from coordinator.decide.evaluation.state import State
from coordinator.decide.evaluation.step import Step
from coordinator.runtime.journal import Journal, read_events, replayed_state
from coordinator.runtime.make_summary import summary_of
from coordinator.runtime.summary import write_summary
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.archived_files import files_in
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import WorkPaths, request_set_manifest
from evaljobs.contract.specs import RequestSetManifest
from evaljobs.contract.storage import read_frames, read_record

GPUS = 8
WHOLE = ("request-sets-found", "nodes-offered", "planned")  # each comes once and carries all nodes or shards
POLL_SECONDS = 10.0  # of the daemon that is watched: the default, as a site would have it
DRAWN = {"batches": 24, "batch_seconds": 1.0, "trials_each": 12, "seed": 1}  # of --scale
Rows = Iterator[dict[str, Any]]


# --- the state machine and `status` ------------------------------------------------------------------------------------


def journal(path: Path, events: list[ev.AnyEvent]) -> None:
    made = Journal(path)
    made.append(events)
    made.close()


def state_machine(options: Options) -> Rows:
    """CPU time of `step` an event, over an evaluation from its start to its end; and of reading its journal back."""
    spent: list[float] = []

    def step(state: State, event: ev.AnyEvent) -> Step:
        began = time.process_time_ns()
        made = plain_step(state, event)
        if event.kind not in WHOLE:
            spent.append((time.process_time_ns() - began) / 1e6)
        return made

    run = Large(options.step_nodes, GPUS, shards=options.shards, step=step)
    run.run()
    more = {"mean": statistics.mean(spent), "events": len(run.journal)}
    yield row("CPU ms of an event, 99th percentile", spread(spent)["p99"], 0.2, **more)
    with tempfile.TemporaryDirectory() as folder:
        journal(path := Path(folder) / "journal.jsonl", run.journal)
        began = time.process_time()
        state = replayed_state(read_events(path))
        took = time.process_time() - began
    assert state is not None
    assert state.ended_at is not None
    yield row("CPU seconds of replaying 100,000 events", took * 100_000 / len(run.journal), 2.5, took=took)


def status(options: Options) -> Rows:
    """CPU seconds of `evalspan status`, by the kernel's account of the child; the median of 5 calls."""
    run = Large(options.step_nodes, GPUS, shards=options.shards)
    run.run()
    state = replayed_state(run.journal[:-1])
    assert state is not None
    over = summary_of(Large(1, 1, tasks=5).run(), 60.0).model_copy(update={"journal_bytes": 0})
    argv, spent = [sys.executable, "-m", "coordinator", "status", "--work-dir"], []
    with tempfile.TemporaryDirectory() as folder:
        work = WorkPaths(folder)
        work.root.chmod(0o700)
        for number in range(options.status - 1):
            paths = work.evaluation(f"step-{number}-core-{number:08x}")
            paths.root.mkdir()
            paths.journal.touch()
            own = {"evaluation_id": paths.root.name, "accepted_at": number}
            write_summary(paths, over.model_copy(update=own))
        paths = work.evaluation(state.evaluation_id)
        paths.root.mkdir()
        paths.evaluation.write_text(state.record.model_dump_json())
        journal(paths.journal, run.journal[:-1])
        write_summary(paths, summary_of(state, time.time()))
        lock = WorkLock(work.lock)
        lock.acquire("evalspan daemon")
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([*argv, folder], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        lock.release()
    yield row("CPU seconds of status", statistics.median(spent), 0.6, events=len(run.journal))


# --- a daemon on Slurm ------------------------------------------------------------------------------------------------


def gaps(site: Site) -> list[float]:
    """Seconds between a shard's last answer and the next shard's start on the same trial, its dump between them."""
    found = []
    for file in (f for folder in site.evaluations() for f in files_in(folder / "responses", "*.frames")):
        spans = sorted((head.started_at, head.seconds) for _, head in read_frames(file, 0))
        found += [start - (before + lasted) for (before, lasted), (start, _) in itertools.pairwise(spans)]
    return found


def submissions(events: list[dict[str, Any]]) -> list[int]:
    """Precursors and trials submitted, of each node that has any."""
    jobs = [e["job"] for e in events if e["kind"] == "job-submitted"]
    parts = [job.split(part)[-1] for job in jobs for part in ("-stage-", "-trial-") if part in job]
    return list(Counter(part.rpartition("-")[0] for part in parts).values())


def daemon(options: Options) -> Rows:
    """One evaluation through a daemon, then silence."""
    with place() as where:
        site = Site.make(where, "bench")
        config = site.folder / "evalspan.toml"
        config.write_text(config.read_text().replace("poll_seconds = 1.0", f"poll_seconds = {POLL_SECONDS}"))
        on_slurm.count_commands(site)
        none = rpcs(where.cluster)
        process = site.start("daemon")
        try:
            wait_until((site.work / "redis" / "address.json").exists, "the daemon's Redis")
            site.start("submit", str(site.folder / "tiny"), "--suite", str(site.suite)).wait()
            announced = time.time()
            wait_until(lambda: any(e["kind"] == "results-written" for e in site.events()), "results", 600)
            events = site.events()
            wait_until(lambda: any(e["kind"] == "ended" for e in site.events()), "the last jobs' ends")
            asked, kinds = on_slurm.counted(site), rpcs(where.cluster) - none
            wait_until(lambda: not site.user(["squeue", "--noheader"]), "an empty queue")
            time.sleep(POLL_SECONDS)  # the evaluation's last child ends, and its CPU time counts from then
            before, _ = on_slurm.cost(process.pid)
            time.sleep(options.idle)
            after, rss = on_slurm.cost(process.pid)
        finally:
            process.kill()
            process.wait()
        waited, counts = gaps(site), submissions(events)
    staged = [e["at"] for e in events if e["kind"] == "job-submitted" and "-stage-" in e["job"]]
    yield row("seconds from the trigger to the first precursor", min(staged) - announced, 2 + POLL_SECONDS)
    if waited:  # none where each trial ran one shard
        yield row("seconds from a shard to the next, median", statistics.median(waited), 0.1)
    yield row("submissions per node", statistics.mean(counts), 2)
    yield row(
        "RPCs of the evaluation and of the daemon's start, by sdiag", kinds.total(), 35, **kinds, calls=asked
    )
    yield row("idle: % of a core", 100 * (after - before) / options.idle, 1)
    yield row("idle: resident MB", rss, 200)


def scale(options: Options) -> Rows:
    """So many evaluations on so many synthetic GPUs at once: what was lost, and what it cost the coordinator."""
    settings = {"evaluations": options.evaluations, "tasks": options.tasks} | DRAWN
    with dev_cluster(nodes=options.nodes, gpus=options.gpus, cpu_nodes=2) as cluster:
        site = on_slurm.furnished(cluster, "scale", settings, answer=options.answer)
        costs = on_slurm.run_daemon(site, seconds=3600, own_machine=True)
        told = {folder: site.events(folder) for folder in site.evaluations()}
        broken = [f"{folder.name}: {law}" for folder, events in told.items() for law in laws_broken(events)]
        sets = WorkPaths(site.work).request_sets.glob("*/set")
        due = sum(read_record(request_set_manifest(one), RequestSetManifest).documents for one in sets)
        results = [json.loads((folder / "results.json").read_text())["results"] for folder in told]
    dumped = [e["shards"] for events in told.values() for e in events if e["kind"] == "shards-dumped"]
    shards = [ShardId.parse(shard) for each in dumped for shard, _ in each]
    lost = abs(due * options.evaluations - sum(one.end_batch - one.first_batch for one in shards))
    yield row("documents lost or doubled", lost, 0, of=due * options.evaluations)  # a document a batch
    unscored = options.evaluations * options.tasks - sum(map(len, results))
    yield row("tasks without a score", unscored, 0)
    yield row("laws broken", len(broken), 0, which=broken[:20])
    yield row("seconds of a turn of the loop, 99th percentile", costs["turns"]["p99"], 1.0, **costs)
    counts = [count for events in told.values() for count in submissions(events)]
    mean = statistics.mean(counts)
    yield row("submissions a node and evaluation, mean", mean, 2, most=max(counts))


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    if options.scale or options.status:
        return targets(list((scale if options.scale else status)(options)), answer=options.answer)
    return targets([*state_machine(options), *(daemon(options) if options.idle > 0 else ())])


OPTIONS = (
    option("--step-nodes", 256, "of the evaluation whose events and replay are timed; 8 GPUs each"),
    option("--shards", 48, "of each of its GPUs"),
    option("--status", 0, "evaluations that `status` lists"),
    option("--idle", 30.0, "seconds that the idle daemon is watched for; 0: no daemon"),
    option("--scale", False, "many evaluations on many synthetic GPUs", action="store_true"),
    option("--nodes", 32, "scale: nodes"),
    option("--gpus", GPUS, "scale: GPUs of each; 74 nodes of 64 are 4,736 lanes"),
    option("--evaluations", 20, "scale: evaluations at once"),
    option("--tasks", 60, "scale: of an evaluation"),
    option("--answer", 0.0, "scale: seconds that each Slurm command takes more"),
)


def on_a_cluster(options: Options) -> bool:
    return bool(options.scale or (options.idle > 0 and not options.status))


if __name__ == "__main__":
    sys.exit(command("bench_daemon", __doc__, measure, *OPTIONS, slurm=on_a_cluster))
