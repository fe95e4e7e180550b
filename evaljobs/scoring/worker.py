"""Metric workers: RQ workers that run `execute` and `score` and nothing else, and the process that keeps them.

Rule: a job is checked before anything is imported or opened on its behalf (metric_jobs.py), and its one argument must
be a spec file of this work folder that validates. Outcomes are files: a job whose outcome is on disk returns at once,
so a job may be run any number of times. The supervisor imports lm-eval once; workers and their work-horses are
forked from it. Redis being away is waited out; the password is read from the address file and is on no command line.
It does not know: what a score is, who enqueued.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import logging
import os
import signal
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import redis
from pydantic import ValidationError
from rq.exceptions import StopRequested
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker import Worker
from rq.worker_registration import clean_worker_registry

from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SPEC, ExecuteSpec, ScoreSpec
from evaljobs.contract.storage import write_outcome
from evaljobs.errors import one_line
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explained
from evaljobs.scoring import rq_jobs
from evaljobs.scoring.item_deadlines import Watch
from evaljobs.scoring.rq_jobs import EXECUTE, HEARTBEAT_SECONDS, HEARTBEAT_TTL, SCORE, GuardedJob
from evaljobs.scoring.supervisor import Supervisor, die_with_parent

log = logging.getLogger(__name__)

KIND: Mapping[str, Literal["execute", "score"]] = {EXECUTE: "execute", SCORE: "score"}
MAX_SPEC_BYTES = 1 << 28
AWAY = (redis.ConnectionError, redis.TimeoutError)
JUDGE_SECONDS = 24 * 3600
BLOCK_SECONDS = 5  # an idle worker asks Redis this often


# --- a job -----------------------------------------------------------------------------------------------------------


class RefusedJobError(Exception):
    """A job that we did not enqueue, or whose spec is no spec: it is not run. The message is one line."""


def checked_path(path: str, work_dir: Path) -> Path:
    """The spec file, if it is one of this work folder: `work_dir/<evaluation>/specs/<name>.json`, a plain file."""
    try:
        real = Path(path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise RefusedJobError(f"there is no spec at {path[:200]!r}") from error
    root = work_dir.resolve()
    if real.parent.name != "specs" or real.parent.parent.parent != root or real.suffix != ".json":
        raise RefusedJobError(f"{path[:200]!r} is no spec of the work folder {root}")
    if not real.is_file() or real.stat().st_size > MAX_SPEC_BYTES:
        raise RefusedJobError(f"{path[:200]!r} is no plain file of a spec's size")
    return real


def read_spec(path: Path, kind: str) -> ExecuteSpec | ScoreSpec:
    """The spec of a checked path; RefusedJobError where it is of another kind, place or version."""
    try:
        spec = SPEC.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise RefusedJobError(
            f"{path.name} is no spec of this version: {first['loc']}: {first['msg']}"
        ) from error
    if not isinstance(spec, (ExecuteSpec, ScoreSpec)) or spec.kind != kind:
        raise RefusedJobError(f"{path.name} is a {spec.kind} spec, not one of {kind}")
    if Path(spec.evaluation_dir).resolve() != path.parent.parent:
        raise RefusedJobError(f"{path.name} belongs to another evaluation folder: {spec.evaluation_dir}")
    return spec


def deadline_seconds(spec: ExecuteSpec | ScoreSpec) -> int:
    """Seconds after which a work-horse is ended: far more than a sound job takes, so that a hung one is not for ever.

    Items have deadlines of their own (`item_seconds`), and run in parallel. A judge's have too, but may be kept waiting
    by the caps that all workers share.
    """
    if spec.judge is not None:
        return JUDGE_SECONDS
    if isinstance(spec, ExecuteSpec):
        return int(900 + spec.item_seconds * len(spec.documents))
    return int(3600 + spec.item_seconds * 60)


def outcome_on_disk(spec: ExecuteSpec | ScoreSpec) -> str | None:
    """The kind of outcome that the job has left already."""
    paths = EvaluationPaths(spec.evaluation_dir)
    for kind in ("executed" if isinstance(spec, ExecuteSpec) else "scored", "failed"):
        if paths.outcome(kind, spec.name).exists():
            return kind
    return None


def leave_failed(spec: ExecuteSpec | ScoreSpec, *, error: str, detail: str = "") -> None:
    """A job's own words for its failure, where it left none."""
    if outcome_on_disk(spec) is not None:
        return
    failed = Failed(
        name=spec.name,
        job=spec.kind,
        blame="retry",
        error=error,
        detail=detail[-4000:],
        node=socket.gethostname(),
        entry=spec.entry,
    )
    write_outcome(EvaluationPaths(spec.evaluation_dir), failed)


def run_spec(spec: ExecuteSpec | ScoreSpec) -> str:
    """Run a metric job; returns the kind of outcome that is on disk now."""
    there = outcome_on_disk(spec)
    if there is not None:
        return there
    try:
        metric = importlib.import_module("evaljobs.scoring.score")  # imported by `warm` long ago, in a worker
        return str(metric.perform(spec).kind)
    except Exception as error:  # the job's deadline, or an import: whatever it is, somebody must be told
        log.exception("%s", spec.name)
        leave_failed(spec, error=one_line(error), detail=traceback.format_exc())
        return "failed"


def execute(path: str, work_dir: str) -> str:
    """RQ job: the programs (or judges) of an ExecuteSpec."""
    return run_spec(read_spec(checked_path(path, Path(work_dir)), "execute"))


def score(path: str, work_dir: str) -> str:
    """RQ job: a ScoreSpec."""
    return run_spec(read_spec(checked_path(path, Path(work_dir)), "score"))


RUN: Mapping[str, Callable[[str, str], str]] = {EXECUTE: execute, SCORE: score}


# --- RQ --------------------------------------------------------------------------------------------------------------


class MetricJob(GuardedJob):
    """A guarded job that may run: its function comes from `RUN`, never from an import by name."""

    work_dir = ""  # set by the process that works

    def _execute(self) -> str:
        name, path = self.order()
        return RUN[name](path, self.work_dir)


class MetricWorker(Worker):  # type: ignore[misc]
    """RQ's forking worker: checks before it forks, takes deadlines from specs, outlives an absent Redis.

    It takes no commands over Redis, and cannot be suspended through it.
    """

    max_connection_wait_time = 2.0
    log_result_lifespan = False

    def __init__(self, queue: Any, *, work_dir: Path, file: Path, address: RedisAddress, crew: str) -> None:
        super().__init__(
            [queue],
            name=worker_name(crew, os.getpid()) + uuid.uuid4().hex[:8],
            connection=queue.connection,
            job_class=MetricJob,
            serializer=JSONSerializer,
            worker_ttl=BLOCK_SECONDS + 15,
            job_monitoring_interval=HEARTBEAT_SECONDS,
            maintenance_interval=3600,
            log_job_description=False,
        )
        self.work_dir = work_dir
        self.file = file
        self.address = address
        self._spec: ExecuteSpec | ScoreSpec | None = None
        self._watch: Watch | None = None
        self._ended_by_us = ""

    # --- one job ---------------------------------------------------------------------------------------------------

    def execute_job(self, job: MetricJob, queue: Any) -> None:
        try:
            name, path = job.order()
            self._spec = read_spec(checked_path(path, self.work_dir), KIND[name])
        except (ValueError, OSError, RefusedJobError) as error:
            self._refuse(job, queue, one_line(error))
            return
        job.timeout = deadline_seconds(self._spec)
        self._watch = Watch(self._spec)
        self._ended_by_us = ""
        try:
            # RQ's work-horse says so later: were both killed before, nobody would know whose job it was
            self.connection.hset(job.key, "worker_name", self.name)
            super().execute_job(job, queue)
        except AWAY as error:
            self.log.warning("Redis went away at the end of %s (%s): its outcome is on disk", job.id, error)
        finally:
            self._spec = self._watch = None

    def _refuse(self, job: MetricJob, queue: Any, why: str) -> None:
        """Not run. Where it is ours all the same (its own spec file is unreadable), its failure is an outcome."""
        self.log.warning("job %s is refused: %s", job.id, why)
        with suppress(ValueError, OSError, RefusedJobError):
            kind, path = job.order()
            self._leave_refused(job, queue, kind, checked_path(path, self.work_dir), why)
        with self.connection.pipeline() as pipe:
            pipe.lrem(queue.intermediate_queue_key, 1, job.id)
            job.set_status("failed", pipeline=pipe)
            job._handle_failure(f"refused: {why}", pipeline=pipe, worker_name=self.name)  # noqa: SLF001
            pipe.execute()

    def _leave_refused(self, job: MetricJob, queue: Any, kind: str, path: Path, why: str) -> None:
        paths = EvaluationPaths(path.parent.parent)
        name = rq_jobs.job_name(queue.name.removeprefix(rq_jobs.queue_name("")), job.id)
        if path == paths.spec(name).resolve() and not paths.outcome("failed", name).exists():
            failed = Failed(name=name, job=KIND[kind], blame="bug", error=why, node=socket.gethostname())
            write_outcome(paths, failed)

    def main_work_horse(self, job: MetricJob, queue: Any) -> None:
        # else a job whose worker died runs on beside its own retry
        die_with_parent(signal.SIGKILL, self.pid)
        super().main_work_horse(job, queue)

    def get_heartbeat_ttl(self, _job: MetricJob) -> int:
        return HEARTBEAT_TTL

    def set_current_job_working_time(self, current_job_working_time: float, pipeline: Any = None) -> None:
        if pipeline is not None:
            super().set_current_job_working_time(current_job_working_time, pipeline)
            return
        with suppress(*AWAY):
            super().set_current_job_working_time(current_job_working_time)
        self.current_job_working_time = current_job_working_time

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        if pipeline is not None:
            super().heartbeat(timeout, pipeline)
            return
        try:
            super().heartbeat(timeout)
        except AWAY as error:
            # An idle worker would ask the old place for ever: the supervisor starts one at the new.
            if not self.horse_pid and self._moved():
                raise StopRequested from error

    def _moved(self) -> bool:
        try:
            return redis_client.read(self.file) != self.address
        except QueueUnavailable:
            return False

    def teardown(self) -> None:
        with suppress(*AWAY):
            super().teardown()

    def set_shutdown_requested_date(self) -> None:
        """Called in a signal handler, where Redis may be in the middle of another answer."""

    def maintain_heartbeats(self, job: MetricJob) -> None:
        hung = self._watch.overdue(time.monotonic()) if self._watch is not None else ""
        if hung:  # the next process takes it for deadly, and goes on with the others
            self.log.warning("%s: the metric of %s hangs where no signal reaches it: ended", job.id, hung)
            super().kill_horse()
        try:
            super().maintain_heartbeats(job)
        except AWAY as error:
            self.log.warning("Redis is away (%s); the job goes on", error)

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        if not self._shutdown_requested_date:
            self._ended_by_us = f"it took longer than {self._limit()} s and was ended"
        super().kill_horse(sig)

    def _limit(self) -> int:
        return deadline_seconds(self._spec) if self._spec is not None else 0

    def handle_job_failure(
        self, job: MetricJob, queue: Any, started_job_registry: Any = None, exc_string: str = ""
    ) -> None:
        """A work-horse died. The last time, somebody must say so in a file: the horse could not."""
        if self._ended_by_us:
            job.retries_left = 0  # it would take as long again
        if not job.should_retry and self._spec is not None and not self.is_horse:
            why = self._ended_by_us or "its process died three times (out of memory?)"
            leave_failed(
                self._spec, error=f"{self._spec.name}: {why}: {one_line(Exception(exc_string))}"[:400]
            )
        super().handle_job_failure(job, queue, started_job_registry, exc_string)

    # --- what Redis shall not decide ---------------------------------------------------------------------------------

    def subscribe(self) -> None:
        """No commands are taken over Redis."""

    def unsubscribe(self) -> None:
        """See `subscribe`."""

    def check_for_suspension(self, burst: bool) -> None:
        """Nobody suspends our workers: on a site's Redis `rq suspend` is for others."""

    def run_maintenance_tasks(self) -> None:
        """The supervisor recovers jobs; here only the list of workers is kept clean."""
        for queue in self.queues:
            clean_worker_registry(queue)
        self.last_cleaned_at = now()


def worker_name(crew: str, pid: int) -> str:
    """How the name of a crew's worker in Redis begins. `crew`: a supervisor's own, whatever other hosts are called."""
    return f"{socket.gethostname()}-{crew}-{pid}-"


def work(redis_file: Path, work_dir: Path, evaluation_id: str, crew: str) -> int:
    """One worker, until it is told to stop; 1 where Redis took it down (the supervisor starts another)."""
    MetricJob.work_dir = str(work_dir)
    address = redis_client.read(redis_file)
    queue = rq_jobs.open_queue(redis_client.client(address), evaluation_id, MetricJob)
    with explained(address.where):
        worker = MetricWorker(queue, work_dir=work_dir, file=redis_file, address=address, crew=crew)
        worker.work(logging_level="INFO")
    return 0 if worker._shutdown_requested_date else 1  # noqa: SLF001


# --- the command -----------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m evaljobs worker", description="Run metric jobs of an evaluation."
    )
    made.add_argument(
        "--redis-file", type=Path, required=True, help="the published address (redis/address.json)"
    )
    made.add_argument("--work-dir", type=Path, required=True)
    made.add_argument("--queue", required=True, metavar="EVALUATION", help="whose jobs to run")
    made.add_argument("--stop-file", type=Path, help="its existence ends the workers")
    made.add_argument("--lease-file", type=Path, help="what a living coordinator touches")
    made.add_argument(
        "--lease-seconds", type=float, default=900.0, help="the workers end once it stood still for so long"
    )
    made.add_argument("--burst-idle", type=float, metavar="SECONDS", help="end after so long without a job")
    made.add_argument("--count", type=int, default=1, help="worker processes")
    return made


def main(argv: Sequence[str]) -> int:
    """`python -m evaljobs worker …`; exit code 0 when told to end or idle, 1 where Redis stayed away."""
    options = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        importlib.import_module("evaljobs.scoring.score").warm()
    except Exception:  # every job will leave an outcome that says so
        log.exception("the metric code cannot be imported")
    gc.collect()
    gc.freeze()  # what was imported stays shared: a work-horse's collections would otherwise copy its pages
    crew = uuid.uuid4().hex[:8]
    work_here = functools.partial(work, options.redis_file, options.work_dir, options.queue, crew)
    return Supervisor(options, work_here, functools.partial(worker_name, crew)).run()
