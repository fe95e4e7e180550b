"""The loop of the coordinator: observe -> step -> log -> perform, for every evaluation of one work folder.

Rule: `evalspan eval` runs it until its evaluation has ended, `evalspan daemon` until a signal. Killed at any instruction
and run again, it resumes from the journals. `coordinator.runtime.registry` keeps the evaluations.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import NoReturn, Protocol

from coordinator.base import clock
from coordinator.base.clock import Throttle
from coordinator.base.disk_space import disk_shortage
from coordinator.base.isolate import isolate_errors, warn_once
from coordinator.base.words import one_line
from coordinator.decide.allocation import demand
from coordinator.decide.allocation.allocate import Limits
from coordinator.decide.evaluation.records import EvaluationRecord
from coordinator.decide.evaluation.state import State
from coordinator.errors import OperatorError, RetryError, TakenOverError
from coordinator.intake.inbox import Inbox, InboxFile, Notice, refuse_notice, remove_notice
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.node_offers import NodeOffers, Pace
from coordinator.runtime.registry import Evaluations
from coordinator.runtime.work_lock import InUseError
from coordinator.site.cluster import Cluster, ClusterError, JobState
from coordinator.site.cluster.local import LocalCluster
from coordinator.site.cluster.node_choice import none_usable
from evaljobs.contract.storage import make_file, make_folder

JOBS, NODES = "the listing of jobs", "the listing of nodes"
"""Descriptions of the loop's two questions to the cluster, for users."""
NOT_CHECKED = 1 << 10
"""Failures that an unchecked node counts as: checked nodes are offered first."""
log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Keeps Redis running: the embedded server, or a check of the site's server."""

    def ensure(self) -> object:
        """Make sure Redis answers or is being started, and the address file is up to date."""
        ...

    def stop(self) -> None: ...


class Coordinator:
    """The loop over all evaluations of a work folder. One per folder at a time (`WorkLock`)."""

    def __init__(
        self,
        *,
        performer: Performer,
        cluster: Cluster,
        keeper: Keeper,
        limits: Limits,
        pace: Pace,
        grace: Grace,
    ) -> None:
        self.performer = performer
        self.cluster = cluster
        self.keeper = keeper
        self.pace = pace
        self.calls = performer.calls
        self.evaluations = Evaluations(performer, grace)
        self.offers = NodeOffers(self.evaluations, cluster, limits, pace)
        self.lock = self.evaluations.lock
        self.turn_seconds = 0.0  # duration of the last turn
        self._throttle = Throttle()
        self._ending = False  # in the last turn, all evaluations were ending

    @contextmanager
    def in_charge(
        self, command: str = "evalspan", patient: Callable[[str], bool] = lambda _holder: False
    ) -> Iterator[None]:
        """Hold the work folder's lock for `command` and keep Redis running. Raise InUseError if another coordinator holds the
        lock and `patient(holder)`, asked each second, is False (by default at once).
        """
        while True:
            try:
                self.lock.acquire(command)
                break
            except InUseError as error:
                if not patient(error.holder):
                    raise
                work = self.performer.site.work_dir
                _warn(f"{work} is in use by {error.holder}: {command} begins once that has ended")
                time.sleep(1.0)
        try:
            self._touch_lease()
            try:
                self.keeper.ensure()
            except (RetryError, OSError) as error:  # the loop tries again
                if not disk_shortage(error):  # later writes meet a full disk as well, and report it
                    self._redis_away(error)
            yield
        finally:
            with suppress(TakenOverError):  # otherwise they belong to another coordinator
                self.lock.check()
                self.evaluations.write_summaries()
            self.keeper.stop()
            self.lock.release()

    # --- one tick --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do everything that is due, once. Raise RetryError if the work folder was removed, TakenOverError if taken over."""
        if self.lock.removed:
            self._leave_removed()
        now = clock.now()
        self.calls.new_turn()
        if self._throttle.due("lease", self.pace.lease, now):
            self._touch_lease()
        if self._throttle.due("redis", self.pace.redis, now):
            self.lock.check()
            self._keep_redis()
        listing = self._listing(now)
        for evaluation_id in list(self.evaluations.running):
            self.evaluations.guarded(evaluation_id, lambda r: r.observe(listing, clock.now()))
        if listing is not None:
            self.evaluations.end_jobs(listing)
            self.offers.make_way(listing, now)
        self.offers.look(now)
        self.offers.pass_on(now)
        self._submit()
        self._say_late()
        self.evaluations.return_parked(now)
        self.lock.show_trouble(
            self.evaluations.trouble if self.evaluations.running or self.evaluations.parked else ""
        )
        for running in self.evaluations.running.values():
            if running.state.ended_at is not None:
                self.evaluations.clear_converted(running.state.converted_digest)

    def _leave_removed(self) -> NoReturn:
        """Cancel all jobs, since they can no longer save anything, and raise RetryError."""
        live = [state.jobs.by_name[name] for state in self.evaluations.states() for name in state.jobs.live]
        self.performer.cancel([info.job_id for info in live if info.job_id])
        work = self.performer.site.work_dir
        raise RetryError(
            f"the work folder {work} was removed: its jobs are cancelled; run the same command to start over"
        )

    def _submit(self) -> None:
        """Submit requested jobs in the order in which evaluations are served."""
        deadline = time.monotonic() + self.pace.share
        for state in demand.in_turn(self.evaluations.states()):
            self.evaluations.guarded(state.evaluation_id, lambda r: r.submit(deadline))

    def _touch_lease(self) -> None:
        path = self.performer.site.paths.lease
        try:
            make_folder(path.parent)
            os.close(make_file(path))
            os.utime(path, (clock.now(), clock.now()))  # by our clock, like the signs in journals
        except OSError as error:  # a full disk: precursors tolerate several missed touches
            self.evaluations.show_trouble(f"the lease: {error}", error)

    def _keep_redis(self) -> None:
        with isolate_errors(self._redis_away):
            self.keeper.ensure()

    def _redis_away(self, error: Exception) -> None:
        text = str(error)
        self.evaluations.show_trouble(text if text.startswith("Redis") else f"Redis: {text}", error)

    def _listing(self, now: float) -> list[JobState] | None:
        # while all evaluations end, a command waits for the last jobs; with many evaluations one is always ending
        ending = all(r.state.winding_down for r in self.evaluations.running.values())
        every = min(self.pace.jobs, self.pace.last_jobs) if ending else self.pace.jobs
        left = any(parked.ending for parked in self.evaluations.parked.values())
        idle = not (self.evaluations.running or left)
        if idle or (
            ending and not self._ending
        ):  # jobs were just submitted or released: a look would show nothing new
            self._throttle.due("jobs", 0.0, now)
        self._ending = ending
        if idle:
            return None
        if not self.calls.asking(JOBS) and not self._throttle.due("jobs", every, now):
            return None
        call = self.calls.ask(JOBS, self.cluster.jobs)
        if call is None:
            return None
        try:
            listing = call.result()
        except ClusterError as error:
            self.evaluations.show_trouble(f"no news of jobs: {error}", error)
            return None
        self.evaluations.trouble = ""
        if (why := none_usable(self.offers.nodes)) and demand.gpu_demands(self.evaluations.states()):
            self.evaluations.show_trouble(why, ClusterError(why), "; it waits")
        self._name_unknown(listing)
        self.performer.cancel_again(listing)
        return listing

    def _say_late(self) -> None:
        late = self.calls.late()
        if late is not None:
            what, seconds = late
            error = ClusterError(what)
            self.evaluations.show_trouble(
                f"the cluster has not answered {what} yet", error, f", for {seconds:.0f} s"
            )

    def _name_unknown(self, listing: Iterable[JobState]) -> None:
        """Log each unknown job state once; its jobs count as still existing."""
        for job in listing:
            if job.phase == "unknown":
                warn_once(
                    log,
                    f"{job.state} is a state of jobs that is unknown here: such jobs count as still there",
                )

    # --- commands --------------------------------------------------------------------------------------------------

    def obey(self, files: Iterable[InboxFile], only: str | None = None) -> None:
        """Obey the commands among these inbox files, each at least once, then remove the file. A command that cannot be
        obeyed now stays; one that never can is refused, with the reason in the log.

        `only`: commands for this evaluation and for nodes; others stay for the daemon.
        """
        for file in files:
            notice = file.notice
            theirs = only is not None and (file.wrong or notice.evaluation_id not in ("", only))
            if notice.command == "evaluate" or theirs:
                continue
            with isolate_errors(partial(_passed_over, file)):
                if file.wrong:
                    raise OperatorError(file.wrong)
                try:
                    self._obey(notice)
                except (OSError, RetryError) as error:
                    # EAGAIN: the evaluation is parked, which has been logged
                    if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
                        _warn(f"the command in {file.path} cannot be obeyed yet: {error}")
                    continue
                remove_notice(file)

    def _obey(self, notice: Notice) -> None:
        name = notice.evaluation_id
        if notice.command == "cancel":
            self.evaluations.cancel(name, notice.reason)
        elif notice.command == "retry":
            self.evaluations.revive(name)
            self.evaluations.retry(name)
        elif notice.command == "pause":
            self.evaluations.pause(name, notice.reason)
        elif notice.command == "resume":
            self.evaluations.unpause(name)
        elif notice.command == "priority":
            self.evaluations.prioritize(name, notice.priority)
        elif notice.command == "release":
            self.offers.cordon(notice.nodes, clock.now() + notice.seconds)
        elif notice.record is not None:  # a `rescore`, refused if it has no record
            self.evaluations.accept_or_wait(notice.record)

    # --- run ---------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], on_tick: Callable[[], object] | None = None) -> None:
        """Tick until `until()`; `on_tick` is called after each tick."""
        while not until():
            started = time.monotonic()
            self.tick()
            if on_tick is not None:
                on_tick()
            self.turn_seconds = time.monotonic() - started
            time.sleep(max(0.0, self.pace.tick - (time.monotonic() - started)))

    def run_one(self, record: EvaluationRecord, watch: Callable[[], bool]) -> State:
        """Tick until this evaluation has ended and no local job is left. The caller holds the work folder (`in_charge`).

        `watch` is called after each tick; its first True cancels the evaluation. Raise OperatorError if the evaluation is
        given up, RetryError if it cannot be cancelled.
        """
        name, inbox, cancelled = record.evaluation_id, Inbox(self.performer.site.paths), False
        evaluations = self.evaluations

        def tick() -> None:
            nonlocal cancelled
            self.obey(inbox.look(), name)  # jobs of other evaluations would end with this run
            if watch() and not cancelled:
                self.interrupt(name)
                cancelled = True

        evaluations.accept_or_wait(record)
        try:
            self.run(lambda: name in evaluations.running or bool(evaluations.lost(name)), tick)
            running = evaluations.running.get(name)
            resumes = running is not None and bool(running.state.ending.cancelled)  # by an earlier run
            if running is not None and running.state.nodes.paused_at is not None:
                evaluations.unpause(name)
            state = self.until_ended(name, tick)
            while resumes and not cancelled:
                with suppress(OSError):  # on a full disk, retry once the evaluation has been read back
                    evaluations.retry(name)
                    resumes = False
                state = self.until_ended(name, tick)
            return state
        finally:
            if isinstance(self.cluster, LocalCluster):
                self.cluster.close()

    def interrupt(self, evaluation_id: str) -> None:
        """Cancel an evaluation on Ctrl-C. Raise RetryError if the journal cannot take it, so that no job runs unseen."""
        try:
            self.evaluations.cancel(evaluation_id, "interrupted")
        except (OSError, KeyError) as error:
            local = isinstance(self.cluster, LocalCluster)
            jobs = "its jobs end too" if local else f"its jobs go on (`evalspan cancel {evaluation_id}`)"
            raise RetryError(
                f"{evaluation_id} is not cancelled, {jobs}: {self.evaluations.trouble or error}; the same command resumes it"
            ) from error

    def until_ended(self, evaluation_id: str, on_tick: Callable[[], object]) -> State:
        """Tick until this evaluation has ended. Raise OperatorError if it is given up."""

        def over() -> bool:
            if why := self.evaluations.lost(evaluation_id):
                raise OperatorError(f"{evaluation_id} was given up: {why}")
            running = self.evaluations.running.get(evaluation_id)
            return running is not None and running.state.ended_at is not None

        self.run(over, on_tick)
        return self.evaluations.running[evaluation_id].state


def _passed_over(file: InboxFile, error: Exception) -> None:
    why = one_line(error)
    if not isinstance(error, (KeyError, OperatorError)):
        log.warning("%s", file.path, exc_info=error)
    _warn(f"the command in {file.path} is skipped: {why}")
    with isolate_errors(lambda full: _warn(f"{file.path} cannot be moved: {full}")):
        refuse_notice(file, why, clock.now())


def _warn(text: str) -> None:
    warn_once(log, one_line(text))
