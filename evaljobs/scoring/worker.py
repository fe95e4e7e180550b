"""Metric workers: RQ workers that only run `execute` and `score` jobs, and the command that starts them.

Rule: a job runs `run_spec` on a spec file of this user. Outcomes are files, and a job whose outcome is on disk returns at
once, so a job may run any number of times. The supervisor imports lm-eval once and runs no job, so that no job can kill it;
it forks the worker, which forks the work-horses. A work-horse survives an outage of Redis. The password is read from the
address file and is on no command line.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import redis
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import Worker
from rq.worker_registration import clean_worker_registry

from evaljobs import garbage, log_lines
from evaljobs.contract.outcomes import Failed
from evaljobs.contract.paths import EvaluationPaths
from evaljobs.contract.specs import SPEC, ExecuteSpec, ScoreSpec
from evaljobs.contract.storage import STORAGE_AWAY, retry_while_away, write_outcome
from evaljobs.errors import error_details, one_line
from evaljobs.queue import redis_client
from evaljobs.queue.redis_client import QueueUnavailable, RedisAddress, explain_errors, metric_queue
from evaljobs.scoring.item_deadlines import ItemWatch
from evaljobs.staging.capacity import short_of_memory
from evaljobs.staging.coordinator_lease import CoordinatorLease, is_there
from evaljobs.trial.engines.tied import die_with_parent

log = logging.getLogger(__name__)

REDIS_AWAY_ERRORS = (redis.ConnectionError, redis.TimeoutError)
JUDGE_SECONDS = 24 * 3600  # deadline of a job that asks a judge
HEARTBEAT_SECONDS = 2  # between two signs of a busy worker
HEARTBEAT_TTL = 8  # how long a job counts as running after its worker's last sign
POLL_SECONDS = 0.2  # between two looks at the worker
REDIS_SECONDS = 2.0  # between two calls of Redis
# for a running job to finish, within the 30 s between Slurm's SIGTERM and SIGKILL
FINISH_SECONDS = 15.0
DROP_SECONDS = 5.0  # for a worker to drop its job then, before SIGKILL
SHORT_LIFE_SECONDS = 5.0  # a worker that lived no longer is replaced after a pause
PAUSE_SECONDS = 1.0
MUTE_RENEWALS = 4  # of the coordinator's lease, one every 30 s, without an answer of its Redis
BLOCK_SECONDS = 5  # how long an idle worker waits in Redis for a job
OUT_OF_MEMORY = (
    "the kernel ended its process for lack of memory: its job had {} MB; set [metric] memory_mb = {}"
)


# --- a job -----------------------------------------------------------------------------------------------------------


def read_spec(path: str) -> ExecuteSpec | ScoreSpec:
    """Read the spec of a metric job. Raise ValueError for any other."""
    spec = SPEC.validate_json(Path(path).read_bytes())
    if not isinstance(spec, (ExecuteSpec, ScoreSpec)):
        raise ValueError(f"{path} is a {spec.kind} spec")  # noqa: TRY004 (as of another version)
    return spec


def deadline_seconds(spec: ExecuteSpec | ScoreSpec) -> int:
    """Return the seconds after which a work-horse is killed: far more than a valid job takes.

    Items have deadlines of their own (`item_seconds`), and run in parallel. A judge's requests also have them, but only one
    job sends requests at a time.
    """
    if spec.judge is not None:
        return JUDGE_SECONDS
    if isinstance(spec, ExecuteSpec):
        return int(900 + spec.item_seconds * len(spec.documents))
    return int(3600 + spec.item_seconds * 60)


def outcome_on_disk(spec: ExecuteSpec | ScoreSpec) -> str | None:
    """Return the kind of outcome that the job has already left."""
    paths = EvaluationPaths(spec.evaluation_dir)
    kinds = ("executed" if isinstance(spec, ExecuteSpec) else "scored", "failed")
    return next((kind for kind in kinds if paths.outcome(kind, spec.name).exists()), None)


def leave_failed(
    spec: ExecuteSpec | ScoreSpec, *, error: str, detail: str = "", memory_mb: int | None = None
) -> None:
    """Write a failed outcome, unless the job has an outcome. `memory_mb`: as in `Failed`."""
    if outcome_on_disk(spec) is not None:
        return
    failed = Failed(
        name=spec.name,
        job=spec.kind,
        blame="retry",
        error=error,
        detail=detail,
        node=socket.gethostname(),
        entry=spec.entry,
        memory_mb=memory_mb,
    )
    write_outcome(EvaluationPaths(spec.evaluation_dir), failed)


def run_spec(spec: ExecuteSpec | ScoreSpec) -> str:
    """Run a metric job and return the kind of outcome that is now on disk. Raise OSError if storage is unavailable."""
    there = outcome_on_disk(spec)
    if there is not None:
        return there
    try:
        metric = importlib.import_module("evaljobs.scoring.score")  # already imported by the supervisor
        return str(metric.perform_metric_job(spec).kind)
    except Exception as error:  # the job's deadline, or an import: the outcome reports any error
        if isinstance(error, OSError) and error.errno in STORAGE_AWAY:
            raise
        log.exception("%s", spec.name)
        leave_failed(spec, error=one_line(error), detail=error_details())
        return "failed"


# --- RQ --------------------------------------------------------------------------------------------------------------


class MetricJob(Job):  # type: ignore[misc]
    """A job that imports nothing and has no callbacks, whatever its record says: its only argument is its spec's path."""

    def restore(self, raw_data: Any) -> None:
        super().restore(raw_data)
        self._success_callback_name = self._failure_callback_name = self._stopped_callback_name = None

    def _execute(self) -> str:
        return retry_while_away(lambda: run_spec(read_spec(self.args[0])))


class MetricWorker(Worker):  # type: ignore[misc]
    """RQ's forking worker with three differences: deadlines come from specs, a work-horse survives an outage of Redis and
    dies with its worker, and nothing in Redis commands the worker.

    A worker without a work-horse exits if Redis fails; its supervisor starts another.
    """

    max_connection_wait_time = 2.0
    log_result_lifespan = False

    def __init__(self, queue: Any) -> None:
        super().__init__(
            [queue],
            connection=queue.connection,
            job_class=MetricJob,
            serializer=JSONSerializer,
            worker_ttl=BLOCK_SECONDS + 15,
            job_monitoring_interval=HEARTBEAT_SECONDS,
            log_job_description=False,
            work_horse_killed_handler=self._on_killed_horse,
        )
        self._spec: ExecuteSpec | ScoreSpec | None = None
        self._watch: ItemWatch | None = None
        self._killed = 0  # processes that the kernel had killed for lack of memory when the job began

    # --- one job ---------------------------------------------------------------------------------------------------

    def prepare_execution(self, job: MetricJob) -> Execution:
        execution = super().prepare_execution(job)
        self._spec = self._watch = None
        with suppress(OSError, ValueError):  # the work-horse reports it
            self._spec = read_spec(job.args[0])
            self._watch = ItemWatch(self._spec)
            job.timeout = deadline_seconds(self._spec)
        self._killed, _ = short_of_memory()
        return execution

    def main_work_horse(self, job: MetricJob, queue: Any) -> None:
        # otherwise a job whose worker died would run alongside its own retry
        die_with_parent(signal.SIGKILL, self.pid)
        super().main_work_horse(job, queue)

    def monitor_work_horse(self, job: MetricJob, queue: Any) -> None:
        """Run RQ's watch over the work-horse, restarted after each failure of Redis while the work-horse lives."""
        while True:
            try:
                super().monitor_work_horse(job, queue)
            except REDIS_AWAY_ERRORS as error:
                if not _runs(self.horse_pid):
                    raise
                self.log.warning("Redis is unreachable (%s); the job continues", error)
            else:
                return

    def get_heartbeat_ttl(self, _job: MetricJob) -> int:
        return HEARTBEAT_TTL

    def maintain_heartbeats(self, job: MetricJob) -> None:
        hung = self._watch.overdue(time.monotonic()) if self._watch is not None else ""
        if hung:  # the job's next attempt sees that this item killed a process, and continues with the others
            self.log.warning("%s: the metric of %s hangs where no signal reaches it: ended", job.id, hung)
            self.kill_horse()
        super().maintain_heartbeats(job)

    def _on_killed_horse(self, job: MetricJob, _pid: object, status: int | None, _usage: object) -> None:
        """Write the outcome for a dead work-horse after its last attempt. RQ calls this for every dead work-horse."""
        if self._spec is None:
            return
        limit = deadline_seconds(self._spec)
        why = f"its process died three times; wait status {status}"
        killed, memory_mb = short_of_memory()
        if killed == self._killed:
            memory_mb = None
        elif memory_mb is not None:
            job.retries_left = 0  # the next attempt would need as much
            why = OUT_OF_MEMORY.format(memory_mb, 2 * memory_mb)
        if (job.ended_at - job.started_at).total_seconds() > limit:
            job.retries_left = 0  # the next attempt would take as long
            why = f"it took longer than {limit} s and was ended"
        if not job.should_retry:
            leave_failed(self._spec, error=f"{self._spec.name}: {why}", memory_mb=memory_mb)

    # --- what Redis must not decide ------------------------------------------------------------------------------------

    def run_maintenance_tasks(self) -> None:
        """Leave dead workers' jobs to the coordinator, since RQ would compare the clocks of two hosts to find them."""

    def subscribe(self) -> None:
        """Ignore commands over Redis."""

    def check_for_suspension(self, burst: bool) -> None:
        """Ignore `rq suspend`, which on a site's Redis is meant for other workers."""

    def set_shutdown_requested_date(self) -> None:
        """Write nothing: RQ calls this in a signal handler, when Redis may be in the middle of a reply, or unreachable."""


def _runs(pid: int) -> bool:
    """Return whether a child process still runs. `pid` 0: none was forked, or RQ has seen its end."""
    try:
        return pid > 0 and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def run_worker(redis_file: Path, evaluation_id: str) -> None:
    """Run as one worker until a signal, or Redis, ends it. Raise QueueUnavailable if Redis did."""
    address = redis_client.read_address(redis_file)
    queue = Queue(
        metric_queue(evaluation_id),
        connection=redis_client.make_client(address),
        job_class=MetricJob,
        serializer=JSONSerializer,
    )
    with explain_errors(address.where):
        clean_worker_registry(queue)  # names of dead workers, which RQ keeps in a list
        MetricWorker(queue).work(logging_level="INFO")


# --- the process that keeps a worker -----------------------------------------------------------------------------------


class Supervisor:
    """Keeps a worker running, replaced after a pause if it did not live long; ends on a signal, a file or a lease.

    If Redis stays unreachable although the coordinator lives, this host is the problem: it exits with 1, so that its job goes
    to another one. At its end a running job may finish for a while, and is then dropped to run elsewhere.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.worker = 0  # its pid; 0: none runs
        self.stopping_since: float | None = None
        self.pressed = 0  # signals that the worker has got since `stopping_since`
        self._started_at = 0.0  # monotonic seconds
        self._start_after = 0.0
        self._called_at = 0.0
        self._address: RedisAddress | None = None
        self._answered = 0  # lease renewals when Redis last answered
        self.status = 0  # exit status
        lease: Path | None = options.lease_file
        self._lease = None if lease is None else CoordinatorLease(lease, options.lease_seconds)

    def run(self) -> int:
        """Keep workers running until the end, and return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        while True:
            at = time.monotonic()
            self._reap(at)
            if self.stopping_since is not None:
                if not self.worker:
                    return self.status
                self._press(at - self.stopping_since)
            else:
                if not self.worker and at >= self._start_after:
                    self._fork(at)
                self._look(at)
                if self._over():
                    self.stopping_since = at
            time.sleep(POLL_SECONDS)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping_since is None:
            self.stopping_since = time.monotonic()

    def _over(self) -> bool:
        stop = self.options.stop_file
        if stop is not None and is_there(stop):
            return True
        if self._lease is not None and (expired := self._lease.expired()):
            log.error("%s: no coordinator needs these metrics", expired)
            return True
        if self._lease is not None and self._lease.renewals - self._answered >= MUTE_RENEWALS:
            log.error(
                "this host cannot reach Redis although its coordinator lives: exiting, so that another job takes over"
            )
            self.status = 1
            return True
        return False

    def _fork(self, at: float) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        parent, self._started_at = os.getpid(), at
        self.worker = os.fork()
        if self.worker == 0:
            self._be_a_worker(parent)

    def _be_a_worker(self, parent: int) -> None:
        """In the child; never returns."""
        try:
            die_with_parent(signal.SIGTERM, parent)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            # a signal may have arrived while the supervisor's handler was still installed here
            if self.stopping_since is None:
                run_worker(self.options.redis_file, self.options.queue)
        except QueueUnavailable as error:
            log.warning("worker %d: %s", os.getpid(), error)
        except BaseException:
            log.exception("worker %d", os.getpid())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _reap(self, at: float) -> None:
        if not self.worker or os.waitpid(self.worker, os.WNOHANG)[0] == 0:
            return
        pid, self.worker = self.worker, 0
        lived = at - self._started_at
        pause = PAUSE_SECONDS if lived < SHORT_LIFE_SECONDS else 0.0
        self._start_after = at + pause
        if self.stopping_since is None:
            log.warning("worker %d ended after %.1f s; starting another in %.1f s", pid, lived, pause)

    def _press(self, seconds: float) -> None:
        """Send SIGTERM: finish the running job. SIGTERM again: drop it to run elsewhere. Then SIGKILL."""
        due = sum(seconds >= at for at in (0.0, FINISH_SECONDS, FINISH_SECONDS + DROP_SECONDS))
        if due > self.pressed:
            self.pressed = due
            self._signal(signal.SIGTERM if due < 3 else signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.worker:
            os.kill(self.worker, number)

    def _look(self, at: float) -> None:
        if at - self._called_at < REDIS_SECONDS:
            return
        self._called_at = at
        try:
            address = redis_client.read_address(self.options.redis_file)
            if self._address not in (
                None,
                address,
            ):  # its worker exits after its running job: RQ would retry there for ever
                self._signal(signal.SIGTERM)
            self._address = address
            redis_client.shared_client(address).ping()
            self._answered = self._lease.renewals if self._lease is not None else 0
        except (QueueUnavailable, redis.RedisError, OSError) as error:
            log.warning("Redis: %s", error)


# --- the command -----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run `python -m evaljobs worker …` until a signal, the stop file or the lease (exit code 0); 1 without Redis."""
    parser = argparse.ArgumentParser(
        prog="python -m evaljobs worker", description="Run metric jobs of an evaluation."
    )
    add = parser.add_argument
    add("--redis-file", type=Path, required=True, help="the published address (redis/address.json)")
    add("--queue", required=True, metavar="EVALUATION", help="whose jobs to run")
    add("--stop-file", type=Path, help="its existence ends the workers")
    add("--lease-file", type=Path, help="what a living coordinator touches")
    add("--lease-seconds", type=float, default=900.0, help="without a touch, after which the workers end")
    options = parser.parse_args(argv)
    log_lines.begin_logging("%(asctime)s %(name)s: %(message)s")
    try:
        importlib.import_module("evaljobs.scoring.score").import_for_jobs()
    except Exception:  # each job will leave an outcome that reports it
        log.exception("the metric code cannot be imported")
    gc.collect()
    garbage.collect_new()  # imported modules stay shared with the work-horses
    return Supervisor(options).run()
