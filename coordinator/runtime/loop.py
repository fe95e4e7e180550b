"""The loop of the coordinator: observe -> step -> log -> perform, for every evaluation of one work folder.

Rule: `evalspan eval` runs it until its evaluation has ended, `evalspan daemon` until a signal. Killed at any instruction
and run again, it resumes from the journals. `coordinator.runtime.registry` keeps the evaluations.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn, Protocol

from coordinator.allocation import cordons, demand, job_limits, prefetch
from coordinator.allocation.allocate import Demand, Limits
from coordinator.base import clock
from coordinator.base.disk_space import shortage
from coordinator.base.isolate import isolated, warn_once
from coordinator.base.throttle import Throttle
from coordinator.base.words import one_line
from coordinator.cluster import Cluster, ClusterError, JobState, NodeState
from coordinator.cluster.node_choice import none_usable
from coordinator.errors import OperatorError, RetryError, TakenOverError
from coordinator.evaluation.events import MemoryOffered, NodesOffered, NodeWithdrawn, Offer
from coordinator.evaluation.limits import FEWER_SECONDS
from coordinator.evaluation.state import Phase, State
from coordinator.intake.inbox import InboxFile, Notice, done, refuse
from coordinator.runtime import gpu_names
from coordinator.runtime.detect import Grace, limit_events
from coordinator.runtime.effects import Performer
from coordinator.runtime.registry import Evaluations
from coordinator.runtime.runner import Running
from coordinator.runtime.work_lock import InUseError
from evaljobs.contract.storage import make_file, make_folder

JOBS, NODES = "the listing of jobs", "the listing of nodes"
"""The loop's two questions to the cluster, as people read them."""
NOT_CHECKED = 1 << 10
"""Failures that a node which is to be checked counts as: checked ones are offered first."""
log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Keeps Redis running: the embedded server, or a check of the site's server."""

    def ensure(self) -> object:
        """Redis answers, or is being started; the address file is up to date."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two looks, each of which is two RPCs of a Slurm controller."""

    tick: float = 0.2
    jobs: float = 10.0
    last_jobs: float = 4.0  # where all evaluations end: most jobs have ended so long after the results
    nodes: float = 10.0
    redis: float = 2.0
    lease: float = 30.0
    share: float = (
        0.25  # most seconds of a tick for offers of nodes, and as many for submissions; one of each is made
    )


class Coordinator(Evaluations):
    """All evaluations of a work folder. One per folder at a time (`WorkLock`)."""

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
        super().__init__(performer, grace)
        self.cluster = cluster
        self.keeper = keeper
        self.limits = limits
        self.pace = pace
        self.nodes: list[NodeState] = []
        self.calls = performer.calls
        # nodes with a fault that one evaluation found, which no evaluation is offered: until unix seconds
        self._at_fault: dict[str, float] = {}
        self._offers: deque[tuple[str, tuple[Offer, ...]]] = (
            deque()
        )  # (evaluation id, nodes), not passed on yet
        self._demands: Sequence[Demand] | None = None  # what those offers answer; None: all were passed on
        self._throttle = Throttle()
        # of the last listing: job -> the limit on this user's jobs that it waits for
        self._kept_out: Mapping[str, str] = {}
        self._ending = False  # at the last turn: are the last jobs of all evaluations to end?
        self._few = (0, 0.0)  # nodes that such a limit left, until unix seconds
        self._in_use = 0  # GPUs of all evaluations, in the last turn
        self.checks_nodes = False  # set by the daemon's `NodeChecker`, which empties `to_check`
        self.to_check: frozenset[str] = frozenset()  # nodes that would be offered, had they been checked
        self.turn_seconds = 0.0  # of the last turn

    @contextmanager
    def in_charge(
        self, command: str = "evalspan", patient: Callable[[str], bool] = lambda _holder: False
    ) -> Iterator[None]:
        """Hold the work folder's lock for `command` and keep Redis up. InUseError where another coordinator holds it and
        `patient(holder)`, asked each second, is False (by default: at once).
        """
        while True:
            try:
                self._lock.acquire(command)
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
                if not shortage(error):  # what follows meets a full disk, too, and says so
                    self._redis_away(error)
            yield
        finally:
            with suppress(TakenOverError):  # else they are another one's
                self._lock.check()
                self.write_summaries()
            self.keeper.stop()
            self._lock.release()

    def cordon(self, nodes: Sequence[str], until: float) -> None:
        """Cordon these nodes until `until` (unix seconds) and give them back; a time that is over ends their cordon.
        OSError where the disk refuses `nodes.json`: nothing is given back then.
        """
        now = clock.now()
        cordons.cordon(self.performer.site.paths.nodes, nodes, until, now)
        self._give_back(now)

    def _make_way(self, listing: Iterable[JobState], now: float) -> None:
        """Where a limit keeps jobs out, give up what holds places of it in vain."""
        self._kept_out = job_limits.kept_out(listing)
        states = self._states()
        first = job_limits.first_kept_out(states, self._kept_out)
        self._withdraw(job_limits.given_up(states, first), now)
        working = {state.evaluation_id for state in self._states() if job_limits.works(state)}
        for evaluation_id in list(self.running):
            others = bool(working - {evaluation_id})
            self._guarded(evaluation_id, partial(self._reached, others=others, now=now))

    def _reached(self, running: Running, *, others: bool, now: float) -> None:
        """Tell an evaluation that a limit is reached where only idle jobs of it run; take no more nodes for a while then."""
        state, seen = running.state, running.seen
        events = limit_events(state, self._kept_out, seen, self.grace, now, others=others)
        running.take(events)
        if events:
            self._few = (max(1, len(demand.nodes_in_use(self._states()))), now + FEWER_SECONDS)

    def _fewer(self, now: float) -> Limits:
        """The settings' limits, and for a while no more nodes than a limit on jobs left."""
        most, until = self._few
        nodes = [n for n in (self.limits.max_nodes, most if now < until else None) if n is not None]
        return replace(self.limits, max_nodes=min(nodes, default=None))

    def _give_back(self, now: float) -> None:
        """Withdraw cordoned nodes from evaluations; also from one that was parked when the cordon was set."""
        self._offers.clear()
        cordoned = self._cordoned(now)
        open_ones = [state for state in self._states() if state.ended_at is None]
        self._withdraw(
            (
                (use.evaluation_id, use.node, "it is cordoned")
                for use in demand.uses(open_ones)
                if use.node in cordoned
            ),
            now,
        )

    # --- one tick --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Do once everything that is due. RetryError where the work folder was removed; TakenOverError."""
        if self._lock.removed:
            self._leave_removed()
        now = clock.now()
        self.calls.new_turn()
        if self._throttle.due("lease", self.pace.lease, now):
            self._touch_lease()
        if self._throttle.due("redis", self.pace.redis, now):
            self._lock.check()
            self._keep_redis()
        listing = self._listing(now)
        for evaluation_id in list(self.running):
            self._guarded(evaluation_id, lambda r: r.observe(listing, clock.now()))
        if listing is not None:
            self._end_jobs(listing)
            self._make_way(listing, now)
        self._offer(now)
        self._pass_on(now)
        self._submit()
        self._say_late()
        self._return_parked(now)
        self._lock.show_trouble(self.trouble if self.running or self.parked else "")
        for running in self.running.values():
            if running.state.ended_at is not None:
                self._clear_converted(running.state.converted_digest)

    def _leave_removed(self) -> NoReturn:
        """Cancel all jobs, which can leave nothing any more; RetryError."""
        live = [state.jobs.by_name[name] for state in self._states() for name in state.jobs.live]
        self.performer.cancel([info.job_id for info in live if info.job_id])
        work = self.performer.site.work_dir
        raise RetryError(
            f"the work folder {work} was removed: its jobs are cancelled; the same command begins anew"
        )

    def _submit(self) -> None:
        """Submit the jobs that evaluations asked for, in the order in which evaluations are served."""
        deadline = time.monotonic() + self.pace.share
        for state in demand.in_turn(self._states()):
            self._guarded(state.evaluation_id, lambda r: r.submit(deadline))

    def _touch_lease(self) -> None:
        path = self.performer.site.paths.lease
        try:
            make_folder(path.parent)
            os.close(make_file(path))
            os.utime(path, (clock.now(), clock.now()))  # of our clock, as the signs in journals
        except OSError as error:  # a full disk: a precursor waits for several touches
            self._troubled(f"the lease: {error}", error)

    def _keep_redis(self) -> None:
        with isolated(self._redis_away):
            self.keeper.ensure()

    def _redis_away(self, error: Exception) -> None:
        text = str(error)
        self._troubled(text if text.startswith("Redis") else f"Redis: {text}", error)

    def _listing(self, now: float) -> list[JobState] | None:
        # while all evaluations end, a command waits for the last jobs; of many evaluations one always ends
        ending = all(r.state.winding_down for r in self.running.values())
        every = min(self.pace.jobs, self.pace.last_jobs) if ending else self.pace.jobs
        left = any(parked.ending for parked in self.parked.values())
        idle = not (self.running or left)
        if idle or (
            ending and not self._ending
        ):  # jobs just submitted or released: a look would show nothing
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
            listing = call.answer()
        except ClusterError as error:
            self._troubled(f"no news of jobs: {error}", error)
            return None
        self.trouble = ""
        if (why := none_usable(self.nodes)) and demand.demands(self._states()):
            self._troubled(why, ClusterError(why), "; it waits")
        self._name_unknown(listing)
        self.performer.cancel_again(listing)
        return listing

    def _say_late(self) -> None:
        late = self.calls.late()
        if late is not None:
            what, seconds = late
            error = ClusterError(what)
            self._troubled(f"the cluster has not answered {what} yet", error, f", for {seconds:.0f} s")

    def _name_unknown(self, listing: Iterable[JobState]) -> None:
        """Log each state that is in no table, once: its jobs count as still there."""
        for job in listing:
            if job.phase == "unknown":
                warn_once(
                    log,
                    f"{job.state} is a state of jobs that is unknown here: such jobs count as still there",
                )

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _cordoned(self, now: float) -> set[str]:
        try:
            return set(cordons.read(self.performer.site.paths.nodes, now))
        except OSError:  # storage that is away: nothing can be journalled, so nothing is taken either
            return set()

    def _failures(self, states: Sequence[State], now: float) -> Mapping[str, int]:
        """Node -> its recent failures in all evaluations, those that these have just met included."""
        place = self.performer.site.paths.nodes
        try:
            cordons.remember(place, demand.failed(states), now)
            return {node: len(own) for node, own in cordons.failures(place, now).items()}
        except OSError:  # as above
            return {}

    def _unchecked(self, states: Sequence[State], now: float) -> set[str]:
        """Nodes without a use whose check is due, where the daemon checks nodes."""
        if not self.checks_nodes:
            return set()
        try:
            known = cordons.checked(self.performer.site.paths.nodes, now)
        except OSError:  # as above
            return set()
        return {n.name for n in self.nodes} - demand.nodes_in_use(states) - known

    def _gpu_names(self) -> Mapping[str, str]:
        try:
            return gpu_names.read(self.performer.site.paths.gpu_names)
        except OSError:  # as above
            return {}

    def _offer(self, now: float) -> None:
        states = self._states()
        in_use = any(state.nodes.by_name for state in states)
        demands = demand.demands(states)
        # what one evaluation gives back is offered at once, not at the next look
        in_use_before, self._in_use = self._in_use, demand.gpus_in_use(states)
        freed = self._in_use < in_use_before
        every = (0.0 if freed else self.pace.nodes) if demands else 6 * self.pace.nodes
        wanted = (demands or in_use) and self._throttle.due("nodes", every, now)
        call = self.calls.ask(NODES, self.cluster.nodes) if wanted or self.calls.asking(NODES) else None
        if call is None:
            return
        try:
            self.nodes = gpu_names.with_types(call.answer(), self._gpu_names())
        except ClusterError as error:
            self._troubled(f"no news of nodes: {error}", error)
            return
        self._give_back(now)
        self._withdraw(self._unusable(now), now)
        states = self._states()  # without those that were parked just now
        self._at_fault |= demand.at_fault(states)
        without = self._cordoned(now) | {node for node, until in self._at_fault.items() if until > now}
        without |= demand.started_since(states, call.asked_at)
        free = [replace(n, usable=n.usable and n.name not in without) for n in self.nodes]
        first = job_limits.first_kept_out(states, self._kept_out)
        may = job_limits.not_behind(demands, first)
        failures, unchecked = dict(self._failures(states, now)), self._unchecked(states, now)
        for node in unchecked:
            failures[node] = NOT_CHECKED + failures.get(node, 0)
        offers = demand.offers(states, free, may, self._fewer(now), failures)
        self.to_check = frozenset(o.node for nodes in offers.values() for o in nodes if o.node in unchecked)
        certain = {i: tuple(o for o in nodes if o.node not in unchecked) for i, nodes in offers.items()}
        self._offers = deque((evaluation_id, nodes) for evaluation_id, nodes in certain.items() if nodes)
        self._demands = None if first is not None or now < self._few[1] else demands

    def _pass_on(self, now: float) -> None:
        """Pass offers on to evaluations. Each may plan then, which takes tenths of a second, so the rest may wait a turn."""
        until = time.monotonic() + self.pace.share
        while self._offers:
            evaluation_id, nodes = self._offers.popleft()
            running = self.running.get(evaluation_id)
            if running is not None and running.state.ending.phase == Phase.RUNNING:
                self._tell(evaluation_id, NodesOffered(at=now, offers=nodes))
            if time.monotonic() >= until:
                return
        if self._demands is not None:
            demands, self._demands = self._demands, None
            self._stage_ahead(demands, now)

    def _unusable(self, now: float) -> Iterator[tuple[str, str, str]]:
        """(evaluation id, node, why) of nodes that are to be withdrawn from an evaluation."""
        unusable = {n.name: n.excluded for n in self.nodes if not n.usable}
        for use in demand.uses(self._states()):
            if use.status in demand.IN_USE and use.node in unusable:
                setting = unusable[use.node]
                why = f"{setting} excludes it" if setting else "the cluster says it is down or drained"
                yield use.evaluation_id, use.node, why
        cordoned = self._cordoned(now)
        may = [n for n in self.nodes if n.name not in cordoned]
        for evaluation_id, node in demand.taken(self._states(), may, now):
            yield (
                evaluation_id,
                node,
                "its jobs wait for what other users have there, and another node is free",
            )
        for evaluation_id, node in demand.in_the_way(self._states(), self.nodes, now):
            yield evaluation_id, node, "the evaluation that has its GPUs needs its memory"

    def _withdraw(self, lost: Iterable[tuple[str, str, str]], now: float) -> None:
        for evaluation_id, node, reason in list(lost):
            self._tell(evaluation_id, NodeWithdrawn(at=now, node=node, reason=reason))

    def _stage_ahead(self, demands: Sequence[Demand], now: float) -> None:
        """Prefetch the next checkpoint's weights to nodes whose GPUs are busy."""
        candidates = demand.waiting(self._states(), demands)
        held = demand.held(self._states())
        share = self.performer.site.prefetch
        certain = [n for n in self.nodes if not n.best_effort]  # not where the prefetch may be preempted
        for evaluation_id, names in prefetch.choose(
            certain, candidates, held, self.limits, share=share, cordoned=self._cordoned(now)
        ).items():
            self._tell(evaluation_id, MemoryOffered(at=now, nodes=names))

    # --- commands --------------------------------------------------------------------------------------------------

    def obey(self, files: Iterable[InboxFile], only: str | None = None) -> None:
        """Obey the commands among the files of a look at the inbox, each at least once, then remove its file. One that cannot
        be obeyed now stays; one that never can be is refused, with the reason in the log.

        `only`: those to this evaluation, and to nodes; the others stay for the daemon.
        """
        for file in files:
            notice = file.notice
            theirs = only is not None and (file.wrong or notice.evaluation_id not in ("", only))
            if notice.command == "evaluate" or theirs:
                continue
            with isolated(partial(_passed_over, file)):
                if file.wrong:
                    raise OperatorError(file.wrong)
                try:
                    self._obey(notice)
                except (OSError, RetryError) as error:
                    # EAGAIN: the evaluation is parked, and the log says so already
                    if not (isinstance(error, OSError) and error.errno == errno.EAGAIN):
                        _warn(f"the command in {file.path} cannot be obeyed yet: {error}")
                    continue
                done(file)

    def _obey(self, notice: Notice) -> None:
        name = notice.evaluation_id
        if notice.command == "cancel":
            self.cancel(name, notice.reason)
        elif notice.command == "retry":
            self.revive(name)
            self.retry(name)
        elif notice.command == "release":
            self.cordon(notice.nodes, clock.now() + notice.seconds)
        elif notice.record is not None:  # `rescore`, which is refused without one
            self.accept_or_wait(notice.record)

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

    def until_ended(self, evaluation_id: str, on_tick: Callable[[], object]) -> State:
        """Tick until this evaluation has ended. OperatorError where it is given up."""

        def over() -> bool:
            if why := self.lost(evaluation_id):
                raise OperatorError(f"{evaluation_id} was given up: {why}")
            running = self.running.get(evaluation_id)
            return running is not None and running.state.ended_at is not None

        self.run(over, on_tick)
        return self.running[evaluation_id].state


def _passed_over(file: InboxFile, error: Exception) -> None:
    why = one_line(error)
    if not isinstance(error, (KeyError, OperatorError)):
        log.warning("%s", file.path, exc_info=error)
    _warn(f"the command in {file.path} is passed over: {why}")
    with isolated(lambda full: _warn(f"{file.path} cannot be moved: {full}")):
        refuse(file, why, clock.now())


def _warn(text: str) -> None:
    warn_once(log, one_line(text))
