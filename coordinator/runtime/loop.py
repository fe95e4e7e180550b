"""The loop: observe -> step -> log -> perform, for every evaluation of one work folder.

Rule: there is one runner. `evalspan eval` runs it until its evaluation has ended, `evalspan daemon` until it is told
to stop. Killed at any instruction and run again, it resumes from the journals.
What each evaluation does, and what is done with one that cannot go on, is `coordinator.runtime.registry`'.
It does not know: what the evaluations are made of, how a cluster is asked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.allocation import cordons, demand, prefetch
from coordinator.allocation.allocate import Demand, Limits, allocate
from coordinator.base import clock
from coordinator.cluster import Cluster, ClusterError, JobState, NodeState
from coordinator.errors import OperatorError, RetryError
from coordinator.evaluation.events import MemoryOffered, NodesOffered, NodeWithdrawn
from coordinator.runtime.detect import Grace
from coordinator.runtime.effects import Performer
from coordinator.runtime.registry import Evaluations

log = logging.getLogger(__name__)


class Keeper(Protocol):
    """Whatever keeps Redis there: our embedded server, or a check of the site's."""

    def ensure(self) -> object:
        """Redis answers, or is being started; the address file is up to date."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between looks. A Slurm controller is asked at most 0.2 times a second in all."""

    tick: float = 0.2
    jobs: float = 10.0
    nodes: float = 10.0
    redis: float = 2.0
    lease: float = 30.0
    submit: float = 1.0  # that a tick submits jobs for at most, if more than one command


@dataclass(slots=True)
class _Due:
    """When something was last done; -inf: never."""

    last: dict[str, float] = field(default_factory=dict)

    def __call__(self, what: str, every: float, now: float) -> bool:
        if now - self.last.get(what, float("-inf")) < every:
            return False
        self.last[what] = now
        return True


def _redis_trouble(error: Exception) -> str:
    text = str(error)
    return text if text.startswith("Redis") else f"Redis: {text}"


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
        self._due = _Due()

    @contextmanager
    def in_charge(
        self, command: str = "evalspan", patient: Callable[[], bool] = lambda: False
    ) -> Iterator[None]:
        """Hold the work folder's lock for `command` and keep Redis up. OperatorError where another coordinator holds it and
        `patient()`, asked each second, is False (by default: at once).
        """
        while True:
            try:
                self._lock.acquire(command)
                break
            except OperatorError:
                if not patient():
                    raise
                time.sleep(1.0)
        try:
            self._touch_lease()
            try:
                self.keeper.ensure()
            # the loop asks again; whoever restarted us may do so once only
            except (RetryError, OSError) as error:
                self.trouble = _redis_trouble(error)
                log.warning("%s", self.trouble)
            yield
        finally:
            if not self._waiting_asides() and not any(r.state.jobs.live for r in self.running.values()):
                self.keeper.stop()
            self._lock.release()

    def release(self, nodes: Sequence[str], until: float) -> None:
        """Give these nodes back and take none of them again before `until` (unix seconds); a time that is over means that
        they may be taken. OSError where the disk refuses to note it: nothing is given back then.
        """
        now = clock.now()
        cordons.keep(self.performer.site.paths.kept_back, nodes, until, now)
        self._give_back(now)

    def _give_back(self, now: float) -> None:
        """Whatever evaluations have on nodes that a person asked back; also one that was not at hand at that time."""
        kept = self._kept_back(now)
        open_ones = [state for state in self._states() if state.ended_at is None]
        self._withdraw(
            (
                (use.evaluation_id, use.node, "it was asked back")
                for use in demand.uses(open_ones)
                if use.node in kept
            ),
            now,
        )

    # --- one tick --------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at everything that is due to be looked at, once."""
        now = clock.now()
        if self._due("lease", self.pace.lease, now):
            self._touch_lease()
        if self._due("redis", self.pace.redis, now):
            self._keep_redis()
        listing = self._listing(now)
        for evaluation_id in list(self.running):
            self._guarded(evaluation_id, lambda r: r.observe(listing, clock.now()))
        if listing is not None:
            self._end_jobs(listing)
        self._offer(now)
        self._submit()
        self._mend(now)
        for running in self.running.values():
            if running.state.ended_at is not None:
                self._clear_converted(running)

    def _submit(self) -> None:
        """Jobs that evaluations have called for, in the order in which they are served."""
        deadline = time.monotonic() + self.pace.submit
        for state in sorted(self._states(), key=lambda s: s.turn):
            self._guarded(state.evaluation_id, lambda r: r.submit(deadline))

    def _touch_lease(self) -> None:
        path = self.performer.site.paths.lease
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:  # a full disk: holders have patience for many touches
            self.trouble = f"the lease: {error}"
            log.warning("%s", self.trouble)

    def _keep_redis(self) -> None:
        try:
            self.keeper.ensure()
        except Exception as error:  # noqa: BLE001 (whatever is wrong with Redis, the loop goes on and says so)
            self.trouble = _redis_trouble(error)
            log.warning("%s", self.trouble)

    def _listing(self, now: float) -> list[JobState] | None:
        # while the last jobs end, somebody waits for it; of many evaluations one is always ending
        ending = all(r.state.winding_down for r in self.running.values())
        every = min(self.pace.jobs, 2.0) if ending else self.pace.jobs
        left = any(aside.ending for aside in self._asides.by_id.values())
        if not (self.running or left) or not self._due("jobs", every, now):
            return None
        try:
            listing = self.cluster.jobs()
            self.performer.cancel_again()
        except ClusterError as error:
            self.trouble = f"no news of jobs: {error}"
            log.warning("%s", self.trouble)
            return None
        self.trouble = ""
        return listing

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _kept_back(self, now: float) -> set[str]:
        try:
            return set(cordons.read(self.performer.site.paths.kept_back, now))
        except OSError:  # storage that is away: nothing can be journalled, so nothing is taken either
            return set()

    def _offer(self, now: float) -> None:
        states = self._states()
        in_use = any(state.nodes.by_name for state in states)
        demands = demand.demands(states)
        if not (demands or in_use) or not self._due(
            "nodes", self.pace.nodes if demands else 6 * self.pace.nodes, now
        ):
            return
        try:
            self.nodes = self.cluster.nodes()
        except ClusterError as error:
            self.trouble = f"no news of nodes: {error}"
            log.warning("%s", self.trouble)
            return
        self._give_back(now)
        self._withdraw(self._unusable(now), now)
        states = self._states()  # those that the disk refused are gone
        kept = self._kept_back(now)
        free = [replace(n, usable=n.usable and n.name not in kept) for n in self.nodes]
        offered = allocate(
            free,
            demands,
            self.limits,
            gpus_in_use=demand.gpus_in_use(states),
            nodes_in_use=demand.nodes_in_use(states),
            promised=demand.promised(states),
            promised_mb=demand.promised_mb(states),
        )
        for evaluation_id, offers in offered.items():
            if offers:
                self._tell(evaluation_id, NodesOffered(at=now, offers=offers))
        self._stage_ahead(demands, now)

    def _unusable(self, now: float) -> Iterator[tuple[str, str, str]]:
        """(evaluation id, node, why) of nodes that it can no longer use, or whose memory it must leave to another."""
        unusable = {n.name for n in self.nodes if not n.usable}
        for use in demand.uses(self._states()):
            if use.status in demand.IN_USE and use.node in unusable:
                yield use.evaluation_id, use.node, "the cluster says it is down or drained"
        kept = self._kept_back(now)
        may = [n for n in self.nodes if n.name not in kept]
        for evaluation_id, node in demand.taken(self._states(), may, now):
            yield evaluation_id, node, "somebody else has what our jobs wait for, and another node is free"
        for evaluation_id, node in demand.in_the_way(self._states(), self.nodes, now):
            yield evaluation_id, node, "its memory is needed by who has the GPUs"

    def _withdraw(self, lost: Iterable[tuple[str, str, str]], now: float) -> None:
        for evaluation_id, node, reason in list(lost):
            self._tell(evaluation_id, NodeWithdrawn(at=now, node=node, reason=reason))

    def _stage_ahead(self, demands: Sequence[Demand], now: float) -> None:
        """While GPUs are busy, the next checkpoint's weights may come to the nodes that will have them free."""
        candidates = demand.waiting(self._states(), demands)
        held = demand.held(self._states())
        share = self.performer.site.prefetch
        certain = [
            n for n in self.nodes if not n.best_effort
        ]  # weights that wait are not worth being preempted
        for evaluation_id, names in prefetch.choose(
            certain, candidates, held, self.limits, share=share, kept_back=self._kept_back(now)
        ).items():
            self._tell(evaluation_id, MemoryOffered(at=now, nodes=names))

    # --- run ---------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], on_tick: Callable[[], None] | None = None) -> None:
        """Tick until `until()`; `on_tick` draws whatever is to be seen."""
        while not until():
            started = time.monotonic()
            self.tick()
            if on_tick is not None:
                on_tick()
            time.sleep(max(0.0, self.pace.tick - (time.monotonic() - started)))
