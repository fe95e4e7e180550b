"""Metric jobs while their workers and Redis are killed: scripts/chaos metrics.

Real Redis, supervisor, workers, jobs and sandbox; a coordinator's part (enqueue, look, ask again) is played here with the
coordinator's own queue, server keeper and pace. Rule: judged from files alone: every program has its verdict once and it is
the undisturbed run's, every set its score. Exit code 1 where a law does not hold.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from bench.harness import command, option
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
KINDS = {"work-horse": 6, "worker": 4, "worker-and-horse": 4, "redis-kept": 3, "redis-emptied": 3}


@dataclass(slots=True, kw_only=True)
class Site:
    """One evaluation's metric jobs, and what a coordinator knows of them."""

    work: Work
    server: RedisServer
    paths: EvaluationPaths
    evaluation: str
    sets: int = 0  # that are to be at work: another is begun where one has ended
    begun: int = 0
    queue: MetricQueue = field(init=False)
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
        for folder in self.paths.folders():
            folder.mkdir(parents=True, exist_ok=True)
        self.queue = MetricQueue(self.server.work.redis_address, self.evaluation)

    def _begin(self) -> None:
        """Queue the execute jobs of a new set; its score follows them."""
        number, self.begun = self.begun, self.begun + 1
        made = self.work.set(number)
        frame = made.dump(self.paths)
        self.open[number] = (made, frame, 0)
        for spec in made.executes(self.paths, frame):
            self._enqueue(spec)

    def _enqueue(self, spec: ExecuteSpec | ScoreSpec) -> None:
        path = self.paths.spec(spec.name)
        write_atomic(path, spec.model_dump_json().encode())
        self.outstanding[spec.name] = spec
        self._push(spec)

    def _push(self, spec: ExecuteSpec | ScoreSpec) -> None:
        self.enqueued_at[spec.name] = time.monotonic()
        with suppress(QueueUnavailable):
            kind = spec.kind
            self.queue.enqueue(kind, spec.name, self.paths.spec(spec.name), seconds=float(kind == "execute"))

    def tick(self) -> None:
        now = time.monotonic()
        if now - self._kept_at >= KEEP_SECONDS:
            self._kept_at = now
            self.server.ensure()
        while len(self.open) < self.sets:
            self._begin()
        self._outcomes()
        for number, (made, frame, scores) in list(self.open.items()):
            if not any(name.split("-")[1] == made.task for name in self.outstanding):
                if scores >= MAX_SCORES:
                    self.closed[number] = ""
                    del self.open[number]
                    continue
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

    def _outcomes(self) -> None:
        for place in sorted(self.paths.outcomes.glob("*.json")):
            if place.name in self._seen:
                continue
            self._seen.add(place.name)
            outcome = OUTCOME.validate_json(place.read_bytes())
            spec = self.outstanding.pop(outcome.name, None)
            if isinstance(outcome, Failed):
                self.died_thrice += "died" in outcome.error
                print(f"{outcome.name}: {outcome.error}", file=sys.stderr)
            elif isinstance(outcome, Scored) and isinstance(spec, ScoreSpec):
                number = int(spec.name.split("-")[1].removeprefix("chaos_"))
                self.closed[number] = outcome.result_file
                self.open.pop(number, None)

    def describe(self) -> str:
        """What is open and what the queue says of it, for a campaign that is stuck."""
        try:
            queue = f"{self.queue.status()}, known {self.queue.known()}"
        except QueueUnavailable as error:
            queue = str(error)
        words = (self.paths.logs / "workers.log").read_text()[-3000:]
        return f"outstanding {sorted(self.outstanding)}; {queue}; workers' log: {words}"

    def settle(self, law: Callable[[], bool]) -> bool:
        """Tick until it holds; False where it does not in time."""
        deadline = time.monotonic() + STUCK_SECONDS
        while not law():
            if time.monotonic() > deadline:
                return False
            self.tick()
            time.sleep(TICK_SECONDS)
        return True


def children(pid: int) -> list[int]:
    """Living children of a process."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(p) for p in text.split() if b") Z" not in Path(f"/proc/{p}/stat").read_bytes()]
    return []


@contextmanager
def workers(site: Site, count: int) -> Iterator[int]:
    """A supervisor with its workers; its pid."""
    argv = [sys.executable, "-m", "evaljobs", "worker", "--queue", site.evaluation, "--count", str(count)]
    argv += ["--redis-file", str(site.server.work.redis_address), "--work-dir", str(site.paths.root.parent)]
    with (
        (site.paths.logs / "workers.log").open("ab") as log,
        subprocess.Popen(argv, stdout=log, stderr=log) as process,
    ):
        try:
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)


# --- kills -----------------------------------------------------------------------------------------------------------


def strike(site: Site, supervisor: int, kind: str, dice: random.Random) -> list[str] | None:
    """Kill something that is at work; the jobs that were outstanding in its hands. None: nothing was at work."""
    if kind.startswith("redis"):
        pid = site.server.pid()
        if pid is None:
            return None
        os.kill(pid, signal.SIGKILL)
        if kind == "redis-emptied":
            for file in (site.server.folder / "data").rglob("*"):
                if file.is_file():
                    file.unlink(missing_ok=True)
        return list(site.outstanding)
    busy = [(w, h) for w in children(supervisor) for h in children(w)]
    if not busy:
        return None
    worker, horse = dice.choice(busy)
    try:
        hit = [name for name in site.queue.status().running if name in site.outstanding]
    except QueueUnavailable:
        return None
    with suppress(ProcessLookupError):
        if kind != "work-horse":
            os.kill(worker, signal.SIGKILL)
        if kind != "worker":
            os.kill(horse, signal.SIGKILL)
    return hit


def campaign(site: Site, supervisor: int, kills: int, dice: random.Random) -> list[dict[str, Any]]:
    """Strike, wait until all that was struck has its outcome, strike again; a line a kill."""
    rows: list[dict[str, Any]] = []
    while len(rows) < kills:
        end = time.monotonic() + dice.uniform(0.0, 1.5)
        site.settle(lambda end=end: time.monotonic() >= end)
        kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
        row = _one_kill(site, supervisor, kind, dice)
        if row is None:
            break
        rows.append(row)
        print(f"{len(rows)}: {row}", file=sys.stderr)
    site.sets = 0
    site.settle(lambda: not site.open)
    return rows


def _one_kill(site: Site, supervisor: int, kind: str, dice: random.Random) -> dict[str, Any] | None:
    """None: there was nothing to strike, or nothing recovered from it."""
    hit: list[str] | None = None
    before: frozenset[bytes] = frozenset()

    def struck() -> bool:
        nonlocal hit, before
        before = executions(site)
        hit = strike(site, supervisor, kind, dice)
        return hit is not None

    if not site.settle(struck):
        print(f"nothing was at work: {site.describe()}", file=sys.stderr)
        return None
    at, jobs = time.monotonic(), list(hit or [])
    taken_at: float | None = None
    again: set[str] = set()

    def recovered() -> bool:
        nonlocal taken_at
        for execution in executions(site) - before:
            again.add(rq_jobs.job_name(site.evaluation, execution.decode().rpartition(":")[0]))
        if taken_at is None and all(name in again or name not in site.outstanding for name in jobs):
            taken_at = time.monotonic()
        left = {name for name in jobs if name in site.outstanding}
        if not kind.startswith("redis"):  # each job that was struck has its outcome
            return not left
        with suppress(QueueUnavailable):  # the new server knows each job, or the job has its outcome
            return left <= set(site.queue.known())
        return False

    if not site.settle(recovered):
        print(f"no recovery from {kind} of {jobs}: {site.describe()}", file=sys.stderr)
        return None
    now = time.monotonic()
    row = {"kind": kind, "jobs": len(jobs), "recovery_s": round(now - at, 2)}
    return row if kind.startswith("redis") else {**row, "taken_s": round((taken_at or now) - at, 2)}


def executions(site: Site) -> frozenset[bytes]:
    """What RQ says is running, under another name each time that a job is begun; nothing while Redis is away."""
    try:
        with redis_client.connect(site.server.work.redis_address) as client:
            queue = rq_jobs.open_queue(client, site.evaluation)
            return frozenset(client.zrange(queue.started_job_registry.key, 0, -1))
    except (QueueUnavailable, redis.RedisError):
        return frozenset()


# --- what must hold --------------------------------------------------------------------------------------------------


def undisturbed(work: Work, numbers: list[int], paths: EvaluationPaths) -> dict[int, str]:
    """The same sets in this process, without queue and workers; number → score file."""
    for folder in paths.folders():
        folder.mkdir(parents=True, exist_ok=True)
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


def judge(site: Site, calm: EvaluationPaths, calm_files: Mapping[int, str]) -> dict[str, Any]:
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
            started, name = time.monotonic(), "disturbed"
            paths = server.work.evaluation(name)
            site = Site(work=work, server=server, paths=paths, evaluation=name, sets=sets)
            with workers(site, count) as supervisor:
                rows = campaign(site, supervisor, kills, random.Random(seed))
            seconds = time.monotonic() - started
        finally:
            server.stop()
        calm = server.work.evaluation("calm")
        found = judge(site, calm, undisturbed(work, sorted({*site.closed, *site.open}), calm))
    again = {"jobs_asked_for_again": site.requeued, "jobs_that_died_three_times": site.died_thrice}
    holds = len(rows) == kills and not any(found[k] for k in BAD)
    return {**_of_rows(rows), **found, **again, "seconds": round(seconds), "seed": seed, "holds": holds}


def _of_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def by_kind(key: str) -> dict[str, list[float]]:
        found = {kind: [r[key] for r in rows if r["kind"] == kind and key in r] for kind in KINDS}
        return {kind: seconds for kind, seconds in found.items() if seconds}

    taken, recovered = by_kind("taken_s"), by_kind("recovery_s")
    return {
        "kills": {kind: len(recovered.get(kind, [])) for kind in KINDS},
        "longest_taken_s": {kind: max(seconds) for kind, seconds in taken.items()},
        "longest_recovery_s": {kind: max(seconds) for kind, seconds in recovered.items()},
        "median_recovery_s": {kind: statistics.median(seconds) for kind, seconds in recovered.items()},
    }


BAD = ("lost", "doubled", "different", "scores_lost", "scores_different")


def measure(said: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    report = run(said.kills, said.seed, count=said.workers)
    return report, bool(report["holds"])


def main(argv: Sequence[str]) -> int:
    options = (option("--kills", 200), option("--seed", 0), option("--workers", 2))
    return command("chaos metrics", __doc__, measure, *options, argv=argv)
