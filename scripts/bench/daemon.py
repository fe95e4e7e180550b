"""What the daemon costs and how soon it acts.

`events`: CPU milliseconds that the state machine takes for an event of an evaluation on 256 nodes of 8 GPUs, 2,048 trials ever.
`replay`: seconds until a coordinator that was killed has its state again from a journal of about `--events` events of such a one.
`status` (--status N, and nothing else then): CPU seconds of `evalspan status` with Python's start, over N evaluations, one of
them open with such a journal.
`slurm`: a daemon on a development cluster: seconds from the trigger to the precursor's submission (and of those the
gate's, which waits for a checkpoint that has stopped changing), submissions per node, what it asks of the controller
(its commands are counted by wrappers), seconds from a shard to the next one on its GPU, and its CPU share and memory when nothing is left to do.
`scale` (--scale, and nothing else then): many evaluations on one daemon and a cluster of many nodes, with an engine that
holds its GPU for drawn seconds; every document must be scored once, and the coordinator must stay below one core. A
checkpoint is announced every two seconds: the daemon must pick up each notice within two seconds, and a turn of its loop
may take one second, however late the controller answers: --answer has each Slurm command of the daemon take so many
seconds more (in the process that the daemon starts), --freeze stops slurmctld itself for so long. The daemon gets the CPU
time that it asks for: at a site the nodes' trials run on other machines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from chaos_lib.site import Place, Site, place
from dev_cluster.api import dev_cluster, unavailable
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
from evaljobs.contract.folded import files_in, read_bytes
from evaljobs.contract.outcomes import OUTCOME
from evaljobs.contract.paths import EvaluationPaths, WorkPaths, request_set_manifest
from evaljobs.contract.specs import SPEC, RequestSetManifest, ScoreSpec
from evaljobs.contract.storage import read_frame, read_frames, read_record

GPUS, CPU_NODES = 8, 2
WHOLE = ("request-sets-found", "nodes-offered", "planned")  # each comes once and carries all nodes or shards
PATIENCE_SECONDS = 3600


# --- the state machine alone ------------------------------------------------------------------------------------------


def events(nodes: int) -> dict[str, Any]:
    """CPU milliseconds of `step` by kind of event, over an evaluation of 4 shards a trial from its start to its end."""
    spent: dict[str, list[float]] = defaultdict(list)

    def step(state: State, event: ev.AnyEvent) -> list[do.Action]:
        kind = event.outcome.kind if isinstance(event, ev.OutcomeSeen) else event.kind
        began = time.process_time_ns()
        actions = plain_step(state, event)
        spent[kind].append((time.process_time_ns() - began) / 1e6)
        return actions

    Large(nodes, GPUS, step=step).run()
    each = [ms for kind, found in spent.items() if kind not in WHOLE for ms in found]
    by_kind = {kind: statistics.mean(ms) for kind, ms in sorted(spent.items())}
    sizes = {"nodes": nodes, "trials": nodes * GPUS, "events": len(each)}
    return {
        **sizes,
        "mean_ms": statistics.mean(each),
        "p99_ms": spread(each)["p99"],
        "mean_ms_by_kind": by_kind,
    }


def large(options: Options) -> list[ev.AnyEvent]:
    """The events of an ended evaluation, about `--events`."""
    made = Large(options.step_nodes, GPUS, shards=max(1, options.events // (options.step_nodes * GPUS)))
    made.run()
    return made.journal


def write_journal(path: Path, lines: Sequence[ev.AnyEvent]) -> None:
    journal = Journal(path)
    journal.append(lines)
    journal.close()


def replay(options: Options) -> dict[str, Any]:
    """Write the journal of such an evaluation, read it back as a restarted coordinator does."""
    lines = large(options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        write_journal(path, lines)
        began, cpu = time.perf_counter(), time.process_time()
        state = replayed(read_events(path))
        took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        size = path.stat().st_size / 1e6
    assert state is not None
    assert state.ended_at is not None
    return {"nodes": options.step_nodes, "events": len(lines), "journal_mb": size, **took}


def status(options: Options) -> dict[str, Any]:
    """CPU seconds of `evalspan status`, by the kernel's account of the child; of 5 calls."""
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
        spent = [_cpu_of("status", "--work-dir", folder) for _ in range(5)]
        lock.release()
    of_help = statistics.median(_cpu_of("--help") for _ in range(5))
    return {"evaluations": options.status, "events": len(lines), "cpu_seconds": spent, "of_help": of_help}


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


def gaps(work: Path) -> dict[str, Any]:
    """Seconds between a shard's last answer and the next shard's start on the same trial, its dump between them."""
    found = []
    for file in (f for folder in work.glob("*/responses") for f in files_in(folder, "*.frames")):
        spans = sorted((head.started_at, head.seconds) for _, head in read_frames(file, 0))
        found += [start - (before + lasted) for (before, lasted), (start, _) in itertools.pairwise(spans)]
    return {"shards": len(found), **(spread(found) if found else {})}


def daemon(where: Place, idle_seconds: float, poll: float) -> dict[str, Any]:
    """One evaluation through a daemon, then silence; its own poll interval, as a site would have it."""
    site = Site.make(where, "bench", daemon=True)
    config = site.folder / "evalspan.toml"
    config.write_text(config.read_text().replace("poll_seconds = 1.0", f"poll_seconds = {poll}"))
    on_slurm.count_commands(site)
    process = site.start("daemon")
    try:
        wait_until((site.work / "redis" / "address.json").exists, "the daemon's Redis")
        triggered = time.time()
        site.start("submit", str(site.folder / "tiny"), "--suite", str(site.folder / "chaos.toml")).wait()
        spooled = time.time()
        wait_until(lambda: any(e["kind"] == "results-written" for e in site.events()), "results", 600)
        ended, busy, events = time.time(), on_slurm.counted(site), site.events()
        wait_until(lambda: not site.user(["squeue", "--noheader"]), "an empty queue")
        quiet, (before, _) = on_slurm.counted(site), _cost(process.pid)
        time.sleep(idle_seconds)
        silent, (after, rss) = on_slurm.counted(site), _cost(process.pid)
    finally:
        process.kill()
        process.wait()
    accepted = next(e["at"] for e in events if e["kind"] == "accepted")
    nodes = {o["node"] for e in events if e["kind"] == "nodes-offered" for o in e["offers"]}
    submitted = [e for e in events if e["kind"] == "job-submitted"]
    staged = [e["at"] for e in submitted if "-stage-" in e["job"]]
    of_nodes = [e for e in submitted if "-stage-" in e["job"] or "-trial-" in e["job"]]
    return {
        "poll_seconds": poll,
        "submit_command_seconds": spooled - triggered,
        "trigger_to_accepted_seconds": accepted - spooled,
        "accepted_to_first_precursor_seconds": min(staged) - accepted,
        "trigger_to_first_precursor_seconds": min(staged) - spooled,
        "shard_to_next_seconds": gaps(site.work),
        "submissions": len(submitted),
        "submissions_per_node": len(of_nodes) / max(1, len(nodes)),
        "polls_per_second_busy": (busy["squeue"] + busy["sinfo"]) / (ended - accepted),
        "polls_per_second_idle": (sum(silent.values()) - sum(quiet.values())) / idle_seconds,
        "commands": busy,
        "idle_cpu_percent": 100 * (after - before) / idle_seconds,
        "rss_mb": rss,
    }


# --- many evaluations -------------------------------------------------------------------------------------------------


def scale(options: Options) -> dict[str, Any]:
    """So many evaluations on so many synthetic GPUs at once: what was lost, and what it cost the coordinator.

    Counted on disk after the run: the score jobs' specs name the records, and the records name their documents.
    """
    sizes = {key: getattr(options, key) for key in ("nodes", "gpus", "evaluations", "tasks")}
    drawn = {key: getattr(options, key) for key in ("batches", "batch_seconds", "trials_each", "seed")}
    with dev_cluster(nodes=options.nodes, gpus=options.gpus, cpu_nodes=CPU_NODES) as cluster:
        site = on_slurm.furnished(cluster, "scale", sizes | drawn, options.answer)
        slow, started = f"{cluster.gpu_nodes[0]}/0:{options.slow}", time.time()
        with disturbed(options, site):
            costs = on_slurm.run_daemon(site, seconds=PATIENCE_SECONDS, slow=slow, own_machine=True)
        commands = on_slurm.counted(site)
        return {
            **sizes,
            **figures(site.work, started),
            "coordinator": costs,
            "notices": heard(site.folder / "notices.json", costs["looked_at"]),
            "load_1_5_15": os.getloadavg(),
            "commands": commands,
            "polls_per_second": (commands["squeue"] + commands["sinfo"]) / costs["busy_seconds"],
            "left": site.wait_clean(60),
        }


@contextlib.contextmanager
def disturbed(options: Options, site: Site) -> Iterator[None]:
    """Announce checkpoints all the while; stop slurmctld once, where that is asked for."""
    argv = [site.cluster.python, "-m", "bench.notices", str(site.folder)]
    over = threading.Event()

    def freeze() -> None:
        if options.freeze and not over.wait(options.freeze_at):
            site.cluster.freeze_controller()
            over.wait(options.freeze)
            site.cluster.thaw_controller()

    freezer = threading.Thread(target=freeze)
    with (site.folder / "announcer.log").open("w") as log:
        argv = site.cluster.user_argv(argv, cwd=site.folder)
        announcer = subprocess.Popen(argv, env=on_slurm.environment(site), stderr=log)
    freezer.start()
    try:
        with on_slurm.first_on_the_machine(announcer.pid):  # else it would measure its own wait for the CPU
            yield
    finally:
        over.set()
        announcer.terminate()
        announcer.wait()
        freezer.join()


def heard(file: Path, looked_at: float) -> dict[str, Any]:
    """Seconds until notices were picked up, those of before the daemon's first look counted from that."""
    rows = json.loads(file.read_text())
    seconds = [max(0.0, heard_at - max(at, looked_at)) for at, heard_at in rows if heard_at is not None]
    return {"count": len(rows), "not_heard": len(rows) - len(seconds), "seconds": spread(seconds)}


def figures(work: Path, started: float) -> dict[str, Any]:
    """What the folders of all evaluations show."""
    totals, submissions = Counter[str](), Counter[tuple[str, str]]()
    wrong: list[str] = []
    ended = []
    stragglers: set[str] = set()
    for paths in (EvaluationPaths(journal.parent) for journal in sorted(work.glob("*/journal.jsonl"))):
        wrong += [f"{paths.root.name}: {what}" for what in checked(paths, totals)]
        events = [json.loads(line) for line in paths.journal.read_bytes().splitlines()]
        stragglers |= {t for e in events if e["kind"] == "stragglers-found" for t in e["trials"]}
        ended += [e["at"] for e in events if e["kind"] == "results-written"]
        for job in (e["job"] for e in events if e["kind"] == "job-submitted"):
            for part in ("-stage-", "-trial-"):
                if part in job:
                    submissions[paths.root.name, job.split(part)[-1].rpartition("-")[0]] += 1
        runs = [sum(1 for _ in read_frames(file, 0)) for file in files_in(paths.responses, "*.frames")]
        totals.update(events=len(events), shards_run=sum(runs), trials=len(runs))
    mean, most = submissions.total() / max(1, len(submissions)), max(submissions.values(), default=0)
    return {
        **totals,
        "evaluations_ended": len(ended),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "makespan_seconds": max(ended, default=started) - started,
        "stragglers": sorted(stragglers),
        "submissions_per_node_and_evaluation": {"mean": mean, "most": most},
    }


def checked(paths: EvaluationPaths, totals: Counter[str]) -> Iterator[str]:
    """What is wrong with an evaluation, whose tasks and documents are counted: each task has one score, made of each
    document once.
    """
    outcomes = [OUTCOME.validate_json(read_bytes(file)) for file in files_in(paths.outcomes, "*.scored.json")]
    suite = json.loads(paths.evaluation.read_text())["suite"]
    results = json.loads(paths.results.read_text()) if paths.results.exists() else {"results": {}}
    yield from (f"{name} failed: {reason}" for name, reason in results.get("failed", {}).items())
    for entry, task in enumerate(suite["tasks"]):
        scored = [each.name for each in outcomes if each.kind == "scored" and each.entry == entry]
        totals["tasks"] += 1
        if len(scored) != 1 or task["name"] not in results["results"]:
            yield f"{task['name']} was scored {len(scored)} times"
            continue
        spec = SPEC.validate_json(read_bytes(paths.spec(scored[0])))
        assert isinstance(spec, ScoreSpec)
        for leaf, frames in spec.frames.items():
            manifest = read_record(request_set_manifest(spec.request_sets[leaf]), RequestSetManifest)
            records = [read_frame(paths.responses, frame).responses for frame in frames]
            answers = Counter(index for responses in records for index, _ in responses)
            totals.update(documents=len(answers), shards=len(frames))
            if answers != Counter(range(manifest.documents)):
                yield f"{leaf}: {len(answers)} of {manifest.documents} documents, or some of them twice"


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    if options.scale:
        found = scale(options)
        lost = options.evaluations - found["evaluations_ended"] + found["wrong_count"]
        rows = [
            row("evaluations and tasks lost or wrong", lost, 0),
            row("cores of the coordinator", found["coordinator"]["cores"], 1.0),
            row("99th percentile of a turn", found["coordinator"]["turns"]["loop"]["seconds"]["p99"], 1.0),
            row("seconds until a notice is picked up", found["notices"]["seconds"]["max"], 2.0),
            row("notices lost", found["notices"]["not_heard"], 0),
        ]
        return targets(rows, scale=found)
    if options.status:
        found = status(options)
        median = statistics.median(found["cpu_seconds"])
        return targets([row("CPU seconds of status", median, 0.6)], status=found)
    result = {"events": events(options.step_nodes), "replay": replay(options), "slurm": None}
    if (reason := "not asked for" if options.idle <= 0 else unavailable()) is not None:
        return result | {"slurm_skipped": reason}, True
    with place() as where:
        return result | {"slurm": daemon(where, options.idle, options.poll)}, True


OPTIONS = (
    option("--events", 100_000, "of the journal that is replayed"),
    option("--step-nodes", 256, "of `events` and `replay`; 8 GPUs each"),
    option("--status", 0, "evaluations that `status` lists"),
    option("--idle", 30.0, "seconds that the idle daemon is watched for; 0: no daemon"),
    option("--poll", 10.0, "[cluster] poll_seconds"),
    option("--scale", False, "many evaluations on many synthetic GPUs", action="store_true"),
    option("--nodes", 32, "scale: nodes"),
    option("--gpus", 8, "scale: of each node"),
    option("--evaluations", 20, "scale: evaluations at once"),
    option("--tasks", 60, "scale: of an evaluation"),
    option("--batches", 24, "scale: of a task, on average; one document each"),
    option("--batch-seconds", 1.0, "scale: of a batch, on average"),
    option("--trials-each", 12, "scale: most trials of one evaluation, so that all evaluations run at once"),
    option("--slow", 1.0, "scale: the first GPU takes so many times as long"),
    option("--answer", 0.0, "scale: seconds that each Slurm command takes more"),
    option("--freeze", 0.0, "scale: seconds for which slurmctld is stopped"),
    option("--freeze-at", 20.0, "scale: seconds after the daemon's start"),
    option("--seed", 1, "scale: of what is drawn"),
)
if __name__ == "__main__":
    sys.exit(command("bench_daemon", __doc__, measure, *OPTIONS, slurm=lambda options: options.scale))
