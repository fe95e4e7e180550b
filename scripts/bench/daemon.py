"""What the daemon costs and how soon it acts.

Without an option: the CPU time that the state machine takes for an event of an evaluation on 256 nodes of 8 GPUs, and that a
coordinator takes to have its state again from a journal of about `--events` events of such a one; then, on a development
cluster, one evaluation through a daemon and `--idle` seconds of silence: seconds from the trigger to the precursor's
submission and from a shard to the next one on its GPU, submissions per node, polls of the controller, and the share of a
core and the memory of a daemon with nothing to do.
--status N, and nothing else then: CPU seconds of `evalspan status` with Python's start, over N evaluations, one of them
open with such a journal.
--scale, and nothing else then: `--evaluations` at once on a cluster of `--nodes`, with an engine that holds its GPU for drawn
seconds. --answer has each Slurm command of the daemon take so many seconds more. The daemon gets the CPU time that it asks
for: at a site the nodes' trials run on other machines.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos_lib.campaign import laws_broken
from chaos_lib.site import Place, Site, place
from dev_cluster.api import dev_cluster
from dev_cluster.testing import wait_until
from support.simulated.large import Large, plain_step

from bench import on_slurm
from bench.harness import Options, command, option, row, spread, targets
from coordinator.evaluation import actions as do
from coordinator.evaluation import events as ev
from coordinator.evaluation.state import State
from coordinator.runtime.journal import Journal, read_events, replayed
from coordinator.runtime.summarise import summary_of
from coordinator.runtime.summary import write_summary
from coordinator.runtime.work_lock import WorkLock
from evaljobs.contract.folded import files_in
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import WorkPaths, request_set_manifest
from evaljobs.contract.specs import RequestSetManifest
from evaljobs.contract.storage import read_frames, read_record

GPUS, CPU_NODES = 8, 2
WHOLE = ("request-sets-found", "nodes-offered", "planned")  # each comes once and carries all nodes or shards
POLL_SECONDS = 10.0  # of the daemon that is watched: the default, as a site would have it
DRAWN = {"batches": 24, "batch_seconds": 1.0, "trials_each": 12, "seed": 1}  # of --scale
PATIENCE_SECONDS = 3600
Row = dict[str, Any]


# --- the state machine alone ------------------------------------------------------------------------------------------


def events(options: Options) -> Row:
    """CPU time of `step` an event, over an evaluation of 4 shards a trial from its start to its end."""
    spent: list[float] = []

    def step(state: State, event: ev.AnyEvent) -> list[do.Action]:
        began = time.process_time_ns()
        actions = plain_step(state, event)
        if event.kind not in WHOLE:
            spent.append((time.process_time_ns() - began) / 1e6)
        return actions

    Large(options.step_nodes, GPUS, step=step).run()
    mean, p99 = statistics.mean(spent), spread(spent)["p99"]
    return row("CPU ms of an event, 99th percentile", p99, 0.2, mean=mean, events=len(spent))


def large(options: Options) -> list[ev.AnyEvent]:
    """The events of an ended evaluation, about `--events`."""
    made = Large(options.step_nodes, GPUS, shards=max(1, options.events // (options.step_nodes * GPUS)))
    made.run()
    return made.journal


def write_journal(path: Path, lines: Sequence[ev.AnyEvent]) -> None:
    journal = Journal(path)
    journal.append(lines)
    journal.close()


def replay(options: Options) -> Row:
    """Write the journal of such an evaluation, read it back as a restarted coordinator does."""
    lines = large(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, lines)
        began = time.process_time()
        state = replayed(read_events(path))
        took = time.process_time() - began
    assert state is not None
    assert state.ended_at is not None
    return row(
        "CPU seconds of replaying 100,000 events",
        took * 100_000 / len(lines),
        2.5,
        events=len(lines),
        took=took,
    )


def status(options: Options) -> Row:
    """CPU seconds of `evalspan status`, by the kernel's account of the child; the median of 5 calls."""
    lines = large(options)[:-1]
    state = replayed(lines)
    assert state is not None
    over = summary_of(Large(1, 1, tasks=5).run(), 60.0).model_copy(update={"journal_bytes": 0})
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
        write_journal(paths.journal, lines)
        write_summary(paths, summary_of(state, time.time()))
        lock = WorkLock(work.lock)
        lock.acquire("evalspan daemon")
        spent = statistics.median(_cpu_of("status", "--work-dir", folder) for _ in range(5))
        lock.release()
    return row("CPU seconds of status", spent, 0.6, evaluations=options.status, events=len(lines))


def _cpu_of(*words: str) -> float:
    def used() -> float:
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return now.ru_utime + now.ru_stime

    before = used()
    subprocess.run([sys.executable, "-m", "coordinator", *words], check=True, stdout=subprocess.DEVNULL)
    return used() - before


# --- a daemon on Slurm ------------------------------------------------------------------------------------------------


def _cost(pid: int) -> tuple[float, float]:
    """CPU seconds so far, its ended children's included, and resident MB of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"), resident / 2**20


def gaps(site: Site) -> list[float]:
    """Seconds between a shard's last answer and the next shard's start on the same trial, its dump between them."""
    found = []
    for file in (f for folder in site.evaluations() for f in files_in(folder / "responses", "*.frames")):
        spans = sorted((head.started_at, head.seconds) for _, head in read_frames(file, 0))
        found += [start - (before + lasted) for (before, lasted), (start, _) in itertools.pairwise(spans)]
    return found


def daemon(where: Place, idle_seconds: float) -> Iterator[Row]:
    """One evaluation through a daemon, then silence."""
    site = Site.make(where, "bench")
    config = site.folder / "evalspan.toml"
    config.write_text(config.read_text().replace("poll_seconds = 1.0", f"poll_seconds = {POLL_SECONDS}"))
    on_slurm.count_commands(site)
    process = site.start("daemon")
    try:
        wait_until((site.work / "redis" / "address.json").exists, "the daemon's Redis")
        site.start("submit", str(site.folder / "tiny"), "--suite", str(site.suite)).wait()
        announced = time.time()
        wait_until(lambda: any(e["kind"] == "results-written" for e in site.events()), "results", 600)
        ended, asked, events = time.time(), on_slurm.counted(site), site.events()
        wait_until(lambda: not site.user(["squeue", "--noheader"]), "an empty queue")
        before, _ = _cost(process.pid)
        time.sleep(idle_seconds)
        after, rss = _cost(process.pid)
    finally:
        process.kill()
        process.wait()
    accepted = next(e["at"] for e in events if e["kind"] == "accepted")
    nodes = {o["node"] for e in events if e["kind"] == "nodes-offered" for o in e["offers"]}
    submitted = [e for e in events if e["kind"] == "job-submitted"]
    staged = [e["at"] for e in submitted if "-stage-" in e["job"]]
    of_nodes = [e for e in submitted if "-stage-" in e["job"] or "-trial-" in e["job"]]
    yield row("seconds from the trigger to the first precursor", min(staged) - announced, 2 + POLL_SECONDS)
    if waited := gaps(site):  # none where each trial ran one shard
        yield row(
            "seconds from a shard to the next, median", statistics.median(waited), 0.1, shards=len(waited)
        )
    yield row("submissions per node", len(of_nodes) / len(nodes), 2)
    yield row("polls a second", (asked["squeue"] + asked["sinfo"]) / (ended - accepted), 0.2)
    yield row("idle: % of a core", 100 * (after - before) / idle_seconds, 1)
    yield row("idle: resident MB", rss, 200)


# --- many evaluations -------------------------------------------------------------------------------------------------


def scale(options: Options) -> Iterator[Row]:
    """So many evaluations on so many synthetic GPUs at once: what was lost, and what it cost the coordinator."""
    sizes = {"evaluations": options.evaluations, "tasks": options.tasks}
    with dev_cluster(nodes=options.nodes, gpus=GPUS, cpu_nodes=CPU_NODES) as cluster:
        site = on_slurm.furnished(cluster, "scale", sizes | DRAWN, options.answer)
        costs = on_slurm.run_daemon(site, seconds=PATIENCE_SECONDS, own_machine=True)
        broken = [f"{f.name}: {law}" for f in site.evaluations() for law in laws_broken(site.events(f))]
        due, scored, counted = documents(site)
        submissions = submissions_of(site)
    lost = abs(due * options.evaluations - counted)
    yield row("documents lost or doubled", lost, 0, of=due * options.evaluations)
    yield row("tasks without a score", options.evaluations * options.tasks - scored, 0)
    yield row("laws broken", len(broken), 0, which=broken[:20])
    yield row("seconds of a turn of the loop, 99th percentile", costs["turns"]["p99"], 1.0, **costs)
    mean = statistics.mean(submissions)
    yield row("submissions a node and evaluation, mean", mean, 2, most=max(submissions))


def documents(site: Site) -> tuple[int, int, int]:
    """Documents of an evaluation's request sets; tasks with a score, and documents in the shards that were counted, of all."""
    sets = WorkPaths(site.work).request_sets.glob("*/set")
    due = sum(read_record(request_set_manifest(one), RequestSetManifest).documents for one in sets)
    scored = counted = 0
    for folder in site.evaluations():
        results = folder / "results.json"
        scored += len(json.loads(results.read_text())["results"]) if results.exists() else 0
        dumped = (e["shards"] for e in site.events(folder) if e["kind"] == "shards-dumped")
        shards = [ShardId.parse(shard) for each in dumped for shard, _ in each]
        counted += sum(shard.end_batch - shard.first_batch for shard in shards)  # a document a batch
    return due, scored, counted


def submissions_of(site: Site) -> list[int]:
    """Precursors and trials submitted, of each evaluation and node."""
    found = Counter[tuple[str, str]]()
    for folder in site.evaluations():
        for job in (e["job"] for e in site.events(folder) if e["kind"] == "job-submitted"):
            for part in ("-stage-", "-trial-"):
                if part in job:
                    found[folder.name, job.split(part)[-1].rpartition("-")[0]] += 1
    return list(found.values())


def measure(options: Options) -> tuple[Row, bool]:
    if options.scale:
        return targets(list(scale(options)), nodes=options.nodes, answer=options.answer)
    if options.status:
        return targets([status(options)])
    rows = [events(options), replay(options)]
    if options.idle > 0:
        with place() as where:
            rows += daemon(where, options.idle)
    return targets(rows)


OPTIONS = (
    option("--events", 100_000, "of the journal that is replayed"),
    option("--step-nodes", 256, "of the evaluation whose events and replay are timed; 8 GPUs each"),
    option("--status", 0, "evaluations that `status` lists"),
    option("--idle", 30.0, "seconds that the idle daemon is watched for; 0: no daemon"),
    option("--scale", False, "many evaluations on many synthetic GPUs", action="store_true"),
    option("--nodes", 32, "scale: nodes of 8 GPUs"),
    option("--evaluations", 20, "scale: evaluations at once"),
    option("--tasks", 60, "scale: of an evaluation"),
    option("--answer", 0.0, "scale: seconds that each Slurm command takes more"),
)


def on_a_cluster(options: Options) -> bool:
    return bool(options.scale or (options.idle > 0 and not options.status))


if __name__ == "__main__":
    sys.exit(command("bench_daemon", __doc__, measure, *OPTIONS, slurm=on_a_cluster))
