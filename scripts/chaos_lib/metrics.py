"""Metric jobs while their workers and Redis are killed: scripts/chaos metrics.

Real Redis, supervisor, workers, jobs and sandbox; a coordinator's part (enqueue, look, enqueue again) is played here with the
coordinator's own queue, server keeper and pace. Rule: judged from files alone: every program has its verdict once and it is
the undisturbed run's, every set its score. Exit code 1 where a law does not hold.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from bench.harness import Options, option, say
from dev_cluster import procs
from support.toys import toy_model

from chaos_lib.metric_work import DOCUMENTS, Set, Work
from coordinator.runtime.runner import METRIC_AUDIT_SECONDS
from coordinator.services.metric_queue import MetricQueue, QueueUnavailable
from coordinator.services.redis_server import RedisServer
from evaljobs.contract.outcomes import OUTCOME, Failed, Scored
from evaljobs.contract.paths import EvaluationPaths, WorkPaths
from evaljobs.contract.specs import ExecuteSpec, FrameRef, ScoreSpec
from evaljobs.contract.storage import write_atomic
from evaljobs.lmeval import hooks
from evaljobs.lmeval import run as harness
from evaljobs.queue import redis_client
from evaljobs.scoring import rq_jobs, score

TICK_SECONDS = 0.2  # as the coordinator's
KEEP_SECONDS = 2.0  # how often the coordinator sees to Redis
LOST_AFTER_SECONDS = 5.0  # as the coordinator's audit
MAX_SCORES = 5
STUCK_SECONDS = 120.0  # a kill from which nothing recovers ends the campaign
KINDS = {"work-horse": 6, "worker": 4, "worker-and-horse": 4, "redis": 6}
BAD = ("lost", "doubled", "different", "scores_lost", "scores_different")


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The part of a coordinator that one evaluation's metric jobs need."""

    work: Work
    server: RedisServer
    paths: EvaluationPaths
    sets: int  # that are to be at work: another is begun where one has ended
    queue: MetricQueue = field(init=False)
    begun: int = 0
    outstanding: dict[str, ExecuteSpec | ScoreSpec] = field(default_factory=dict)
    enqueued_at: dict[str, float] = field(default_factory=dict)
    open: dict[int, tuple[Set, FrameRef, int]] = field(default_factory=dict)  # number -> set, frame, scores
    closed: dict[int, str] = field(default_factory=dict)  # number -> score file, "" where it failed
    died_thrice: int = 0
    requeued: int = 0
    _seen: set[str] = field(default_factory=set)
    _kept_at: float = 0.0
    _audited_at: float = 0.0

    def __post_init__(self) -> None:
        _make_folders(self.paths)
        self.queue = MetricQueue(self.server.work.redis_address, self.evaluation)

    @property
    def evaluation(self) -> str:
        return self.paths.root.name

    def _enqueue(self, spec: ExecuteSpec | ScoreSpec) -> None:
        write_atomic(self.paths.spec(spec.name), spec.model_dump_json().encode())
        self.outstanding[spec.name] = spec
        self._push(spec)

    def _push(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self.enqueued_at[spec.name] = time.monotonic()
        with suppress(QueueUnavailable):
            self.queue.enqueue(spec.name, self.paths.spec(spec.name))

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._kept_at >= KEEP_SECONDS:
            self._kept_at = now
            self.server.ensure()
        while len(self.open) < self.sets:
            made = self.work.set(self.begun)
            frame = made.dump(self.paths)
            self.open[self.begun] = (made, frame, 0)
            self.begun += 1
            for spec in made.executes(self.paths, frame):
                self._enqueue(spec)
        self._read_outcomes()
        for number, (made, frame, scores) in list(self.open.items()):
            if any(name.split("-")[1] == made.task for name in self.outstanding):
                continue
            if scores >= MAX_SCORES:
                self.closed[number] = ""
                del self.open[number]
            else:
                self.open[number] = (made, frame, scores + 1)
                self._enqueue(made.score(self.paths, frame, scores))
        if now - self._audited_at >= METRIC_AUDIT_SECONDS:
            self._audited_at = now
            with suppress(QueueUnavailable):
                self.queue.recover()
                known = set(self.queue.known())
                for name, spec in self.outstanding.items():
                    if name not in known and now - self.enqueued_at[name] > LOST_AFTER_SECONDS:
                        self.requeued += 1
                        self._push(spec)

    def _read_outcomes(self) -> None:
        for file in sorted(self.paths.outcomes.glob("*.json")):
            if file.name in self._seen:
                continue
            self._seen.add(file.name)
            outcome = OUTCOME.validate_json(file.read_bytes())
            spec = self.outstanding.pop(outcome.name, None)
            if isinstance(outcome, Failed):
                self.died_thrice += "died" in outcome.error
                say(f"{outcome.name}: {outcome.error}")
            elif isinstance(outcome, Scored) and isinstance(spec, ScoreSpec):
                number = int(spec.name.split("-")[1].removeprefix("chaos_"))
                self.closed[number] = outcome.result_file
                self.open.pop(number, None)

    def settle(self, law: Callable[[], bool], otherwise: str) -> bool:
        """Tick until it holds; where it does not in time, say so with what is open, and return False."""

        def holds() -> bool:
            if law():
                return True
            self.tick()
            return False

        settled = procs.poll(holds, deadline_s=STUCK_SECONDS, every_s=TICK_SECONDS)
        if not settled:
            with suppress(QueueUnavailable):
                otherwise += f"; failed {self.queue.failed()}, known {self.queue.known()}"
            log = (self.paths.logs / "workers.log").read_text()[-3000:]
            say(f"{otherwise}; outstanding {sorted(self.outstanding)}; workers' log: {log}")
        return settled

    def executions(self) -> frozenset[bytes]:
        """What runs, as RQ lists it: under another name each time that a job is begun; nothing while Redis is away."""
        try:
            with redis_client.connect(self.server.work.redis_address) as client:
                queue = rq_jobs.open_queue(client, self.evaluation)
                return frozenset(client.zrange(queue.started_job_registry.key, 0, -1))
        except (QueueUnavailable, redis.RedisError):
            return frozenset()


def _make_folders(paths: EvaluationPaths) -> None:
    for folder in paths.folders():
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def workers(site: Coordinator, count: int) -> Iterator[int]:
    """A supervisor with its workers; its pid."""
    argv = [sys.executable, "-m", "evaljobs", "worker", "--queue", site.evaluation, "--count", str(count)]
    argv += ["--redis-file", str(site.server.work.redis_address)]
    with (
        (site.paths.logs / "workers.log").open("ab") as log,
        subprocess.Popen(argv, stdout=log, stderr=log) as process,
    ):
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


# --- kills -----------------------------------------------------------------------------------------------------------


def strike(site: Coordinator, supervisor: int, kind: str, dice: random.Random) -> list[str] | None:
    """Kill something that is at work; the outstanding jobs that it had. None: nothing was at work."""
    if kind.startswith("redis"):
        pid = site.server.pid()
        if pid is None:
            return None
        os.kill(pid, signal.SIGKILL)
        return list(site.outstanding)
    busy = [(w, h) for w in procs.children(supervisor) for h in procs.children(w.pid)]
    if not busy:
        return None
    worker, horse = dice.choice(busy)
    try:
        with redis_client.connect(site.server.work.redis_address) as client:
            queue = rq_jobs.open_queue(client, site.evaluation)
            running = queue.started_job_registry.get_job_ids(cleanup=False)
        names = {rq_jobs.job_name(site.evaluation, job) for job in running}
        hit = sorted(names & site.outstanding.keys())
    except (QueueUnavailable, redis.RedisError):
        return None
    if kind != "work-horse":
        worker.send(signal.SIGKILL)
    if kind != "worker":
        horse.send(signal.SIGKILL)
    return hit


def campaign(site: Coordinator, supervisor: int, kills: int, dice: random.Random) -> list[dict[str, Any]]:
    """Strike, wait until all that was struck has its outcome, strike again; a row a kill."""
    rows: list[dict[str, Any]] = []
    while len(rows) < kills:
        end = time.monotonic() + dice.uniform(0.0, 1.5)
        site.settle(lambda end=end: time.monotonic() >= end, "the coordinator is stuck")
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        row = _one_kill(site, supervisor, kind, dice)
        if row is None:
            break
        rows.append(row)
        say(f"{len(rows)}: {row}")
    site.sets = 0
    site.settle(lambda: not site.open, "not every set was scored")
    return rows


def _one_kill(site: Coordinator, supervisor: int, kind: str, dice: random.Random) -> dict[str, Any] | None:
    """Seconds until recovery; None: nothing was at work, or nothing recovered."""
    hit: list[str] | None = None
    before: frozenset[bytes] = frozenset()

    def struck() -> bool:
        nonlocal hit, before
        before = site.executions()
        hit = strike(site, supervisor, kind, dice)
        return hit is not None

    if not site.settle(struck, "nothing was at work"):
        return None
    at, jobs = time.monotonic(), list(hit or [])
    taken_at: float | None = None
    again: set[str] = set()

    def recovered() -> bool:
        nonlocal taken_at
        for execution in site.executions() - before:
            again.add(rq_jobs.job_name(site.evaluation, execution.decode().rpartition(":")[0]))
        left = {name for name in jobs if name in site.outstanding}
        if taken_at is None and left <= again:
            taken_at = time.monotonic()
        if not kind.startswith("redis"):  # each job that was struck has its outcome
            return not left
        with suppress(QueueUnavailable):  # the new server lists each job, or the job has its outcome
            return left <= set(site.queue.known())
        return False

    if not site.settle(recovered, f"no recovery from {kind} of {jobs}"):
        return None
    now = time.monotonic()
    row = {"kind": kind, "jobs": len(jobs), "recovery_s": round(now - at, 2)}
    return row if kind.startswith("redis") else {**row, "taken_s": round((taken_at or now) - at, 2)}


# --- what must hold --------------------------------------------------------------------------------------------------


def undisturbed(work: Work, numbers: list[int], paths: EvaluationPaths) -> dict[int, str]:
    """The same sets in this process, without queue and workers; number → score file."""
    _make_folders(paths)
    files = {}
    for number in numbers:
        made = work.set(number)
        frame = made.dump(paths)
        for spec in made.executes(paths, frame, DOCUMENTS):
            score.perform(spec)
        outcome = score.perform(made.score(paths, frame, 0))
        files[number] = outcome.result_file if isinstance(outcome, Scored) else ""
    return files


def verdicts(paths: EvaluationPaths) -> Counter[tuple[str, str]]:
    """(program, verdict) → how often it is on disk."""
    lines = [line for file in paths.verdicts.glob("*.jsonl") for line in file.read_text().splitlines()]
    return Counter((v["id"], v["verdict"]) for v in map(json.loads, lines))


def scores(files: Mapping[int, str]) -> dict[int, Any]:
    """Number of a set → its results."""
    return {n: json.loads(Path(f).read_text())["results"] for n, f in files.items() if f}


def judge(site: Coordinator, calm: EvaluationPaths, calm_files: Mapping[int, str]) -> dict[str, Any]:
    found, wanted = verdicts(site.paths), verdicts(calm)
    by_program = Counter(program for program, _ in found.elements())
    theirs, ours = scores(calm_files), scores(site.closed)
    return {
        "verdicts": len(wanted),
        "of_each": dict(Counter(verdict for _, verdict in wanted)),
        "lost": len({program for program, _ in wanted} - set(by_program)),
        "doubled": sum(times > 1 for times in by_program.values()),
        "different": len(set(found) - set(wanted)),
        "sets": len(theirs),
        "scores_lost": len(set(calm_files) - set(ours)),
        "scores_different": sum(ours[n] != theirs.get(n) for n in ours),
    }


def run(kills: int, seed: int, *, count: int = 2, sets: int = 4) -> dict[str, Any]:
    """The campaign and the undisturbed run of the same sets; the report."""
    harness.quiet_environment(offline=True)
    hooks.install()
    with tempfile.TemporaryDirectory(prefix="evalspan-chaos-metrics-") as made:
        folder = Path(made)
        work = Work(folder / "tasks-and-sets", toy_model(folder))
        server = RedisServer(WorkPaths(folder / "work"))
        server.ensure()
        try:
            started = time.monotonic()
            paths = server.work.evaluation("disturbed")
            site = Coordinator(work=work, server=server, paths=paths, sets=sets)
            with workers(site, count) as supervisor:
                rows = campaign(site, supervisor, kills, random.Random(seed))
            seconds = time.monotonic() - started
        finally:
            server.stop()
        calm = server.work.evaluation("calm")
        found = judge(site, calm, undisturbed(work, sorted({*site.closed, *site.open}), calm))
    recovered, taken = _by_kind(rows, "recovery_s"), _by_kind(rows, "taken_s")
    return {
        "kills": {kind: len(recovered.get(kind, [])) for kind in KINDS},
        "longest_taken_s": {kind: max(each) for kind, each in taken.items()},
        "longest_recovery_s": {kind: max(each) for kind, each in recovered.items()},
        "median_recovery_s": {kind: statistics.median(each) for kind, each in recovered.items()},
        **found,
        "jobs_enqueued_again": site.requeued,
        "jobs_that_died_three_times": site.died_thrice,
        "seconds": round(seconds),
        "seed": seed,
        "holds": len(rows) == kills and not any(found[k] for k in BAD),
    }


def _by_kind(rows: list[dict[str, Any]], key: str) -> dict[str, list[float]]:
    found = {kind: [r[key] for r in rows if r["kind"] == kind and key in r] for kind in KINDS}
    return {kind: seconds for kind, seconds in found.items() if seconds}


def measure(options: Options) -> tuple[dict[str, Any], bool]:
    report = run(options.kills, options.seed, count=options.workers)
    return report, bool(report["holds"])


OPTIONS = (option("--kills", 200), option("--seed", 0), option("--workers", 2))
