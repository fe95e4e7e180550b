"""The loop: observe -> step -> log -> perform, for every evaluation of one work folder.

Rule: there is one runner. `evalspan eval` runs it until its evaluation has ended, `evalspan daemon` until it is told
to stop. Killed at any instruction and run again, it resumes from the journals.
It does not know: what the evaluations are made of, how a cluster is asked.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from coordinator import ahead, clock, kept_back, needs
from coordinator.allocation import Demand, Limits, allocate
from coordinator.cluster import Cluster, ClusterError, JobState, NodeState
from coordinator.errors import EvalspanError, OperatorError, RetryError
from coordinator.messages import (
    AnyEvent,
    CancelAsked,
    MemoryOffered,
    NodesOffered,
    NodeWithdrawn,
    PriorityAsked,
    RetryAsked,
)
from coordinator.observe import Grace
from coordinator.perform import Performer
from coordinator.records import EvaluationRecord
from coordinator.running import Running
from coordinator.specs import holder_memory_mb
from coordinator.state import State
from coordinator.store import Journal, WorkLock

log = logging.getLogger(__name__)

# seconds after which an evaluation that could not be taken up is tried again
DISK_REST = 2.0
PERSON_REST = 30.0


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


class Coordinator:
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
        self.performer = performer
        self.cluster = cluster
        self.keeper = keeper
        self.limits = limits
        self.pace = pace
        self.grace = grace
        self.running: dict[str, Running] = {}
        self.nodes: list[NodeState] = []
        self.trouble: str = ""  # the last thing that was away; shown to whoever watches
        self._due = _Due()
        self._broken: dict[str, Path] = {}
        self._mend_every: dict[str, float] = {}  # seconds
        self._lock = WorkLock(performer.site.paths.lock)
        performer.linger = self._linger

    @contextmanager
    def in_charge(self, patient: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Hold the work folder's lock and keep Redis up. OperatorError where another coordinator holds it and `patient()`,
        asked each second, is False (by default: at once).
        """
        while True:
            try:
                self._lock.acquire()
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
            if not self._broken and not any(r.state.live for r in self.running.values()):
                self.keeper.stop()
            self._lock.release()

    # --- evaluations ---------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Is there an evaluation that has not ended, also one whose journal the disk refuses just now?"""
        refused = any(self._mend_every[name] == DISK_REST for name in self._broken)
        return refused or any(r.state.ended_at is None for r in self.running.values())

    def accept(self, record: EvaluationRecord) -> Running:
        """Take an evaluation on, or go on with it where an earlier coordinator left it."""
        known = self.running.get(record.evaluation_id)
        if known is not None:
            return known
        root = self.performer.site.paths.evaluation(record.evaluation_id).root
        running = None
        if (root / "journal.jsonl").exists():
            running = Running.resume(root, self.performer, self.grace)
        if running is None:
            running = Running.accept(record, self.performer, self.grace)
        self.running[record.evaluation_id] = running
        return running

    def accept_or_wait(self, record: EvaluationRecord) -> None:
        """`accept`; one that has begun and that the disk refuses just now is taken up by a later tick."""
        paths = self.performer.site.paths.evaluation(record.evaluation_id)
        try:
            self.accept(record)
        except OSError as error:
            if not Journal.begun(paths.journal):
                raise
            self._set_aside(paths.root, error)

    def resume_all(self) -> None:
        """Every evaluation of the work folder that has not ended."""
        ended: list[Running] = []
        for journal in sorted(Path(self.performer.site.work_dir).glob("*/journal.jsonl")):
            try:
                running = Running.resume(journal.parent, self.performer, self.grace)
            except (OSError, EvalspanError) as error:  # it costs no other evaluation
                self._set_aside(journal.parent, error)
                continue
            if running is not None and running.state.ended_at is None:
                self.running[running.state.evaluation_id] = running
            elif running is not None:
                running.journal.close()
                ended.append(running)
        for running in ended:
            self._clear_converted(running)

    def cancel(self, evaluation_id: str, reason: str) -> None:
        self.running[evaluation_id].take([CancelAsked(at=clock.now(), reason=reason)])

    def retry(self, evaluation_id: str) -> None:
        running = self.running[evaluation_id]
        for note in running.paths.verdicts.glob(
            "*.hand"
        ):  # what died with an item: somebody has mended something
            note.unlink(missing_ok=True)
        running.take([RetryAsked(at=clock.now())])

    def prioritize(self, evaluation_id: str, priority: int) -> None:
        self.running[evaluation_id].take([PriorityAsked(at=clock.now(), priority=priority)])

    def revive(self, evaluation_id: str) -> None:
        """Take up an evaluation of this folder again, also one that has ended. KeyError where there is none."""
        if evaluation_id in self.running:
            return
        root = self.performer.site.paths.evaluation(evaluation_id).root
        running = (
            Running.resume(root, self.performer, self.grace) if (root / "journal.jsonl").exists() else None
        )
        if running is None:
            raise KeyError(evaluation_id)
        self.running[evaluation_id] = running

    def release(self, nodes: Sequence[str], until: float) -> None:
        """Give these nodes back and take none of them again before `until` (unix seconds); a time that is over means that
        they may be taken. OSError where the disk refuses to note it: nothing is given back then.
        """
        now = clock.now()
        kept_back.keep(self.performer.site.paths.kept_back, nodes, until, now)
        self._give_back(now)

    def _give_back(self, now: float) -> None:
        """Whatever evaluations have on nodes that a person asked back; also one that was not at hand at that time."""
        kept = self._kept_back(now)
        open_ones = [state for state in self._states() if state.ended_at is None]
        self._withdraw(
            (
                (use.evaluation_id, use.node, "it was asked back")
                for use in needs.uses(open_ones)
                if use.node in kept
            ),
            now,
        )

    def _clear_converted(self, ended: Running) -> None:
        """What was converted for an evaluation that is over, unless another one of the same checkpoint needs it."""
        announced = ended.state.announced
        if announced is None:
            return
        others = (r.state for r in self.running.values() if r.state.ended_at is None)
        if any(s.announced is not None and s.announced.digest == announced.digest for s in others):
            return
        folder = self.performer.site.paths.converted
        if folder.is_dir():
            for left in folder.glob(f"{announced.digest}*"):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)

    def forget_ended(self) -> None:
        """Let go of evaluations that are over: a daemon lives for months."""
        for evaluation_id, running in list(self.running.items()):
            if running.state.ended_at is not None:
                running.journal.close()
                del self.running[evaluation_id]

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
        self._offer(now)
        self._submit()
        self._mend()
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
        if not self.running or not self._due("jobs", every, now):
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

    def _guarded(self, evaluation_id: str, what: Callable[[Running], None]) -> None:
        """Do it; where the disk refuses, forget the half-known state and read it back from the journal later."""
        running = self.running[evaluation_id]
        try:
            what(running)
        except OSError as error:
            self._set_aside(running.paths.root, error)
            running.journal.close()
            del self.running[evaluation_id]
        except ClusterError as error:
            self.trouble = str(error)
            log.warning("%s", self.trouble)

    def _tell(self, evaluation_id: str, event: AnyEvent) -> None:
        """One event; an evaluation that the disk has refused meanwhile hears it, or its like, when it is back."""
        if evaluation_id in self.running:
            self._guarded(evaluation_id, lambda r: r.take([event]))

    def _set_aside(self, root: Path, error: OSError | EvalspanError) -> None:
        """A full disk refused this evaluation's journal, or the site what it needs to begin: `_mend` tries again."""
        self.trouble = f"{root.name}: {error}; trying again"
        log.warning("%s", self.trouble)
        self._broken[root.name] = root
        # what a person must change is not asked for as often as whether a disk has room
        self._mend_every[root.name] = DISK_REST if isinstance(error, OSError) else PERSON_REST

    def _mend(self) -> None:
        for evaluation_id, root in list(self._broken.items()):
            if not self._due(f"mend/{evaluation_id}", self._mend_every[evaluation_id], clock.now()):
                continue
            try:
                running = Running.resume(root, self.performer, self.grace)
            except OSError:
                continue
            except EvalspanError as error:
                self._set_aside(root, error)
                continue
            del self._broken[evaluation_id]
            if running is not None:
                self.running[evaluation_id] = running

    # --- nodes -----------------------------------------------------------------------------------------------------

    def _states(self) -> list[State]:
        return [running.state for running in self.running.values()]

    def _kept_back(self, now: float) -> set[str]:
        try:
            return set(kept_back.read(self.performer.site.paths.kept_back, now))
        except OSError:  # storage that is away: nothing can be journalled, so nothing is taken either
            return set()

    def _offer(self, now: float) -> None:
        states = self._states()
        in_use = any(state.nodes for state in states)
        demands = needs.demands(states)
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
        free = [n for n in self.nodes if n.name not in kept]
        offered = allocate(
            free,
            demands,
            self.limits,
            gpus_in_use=needs.gpus_in_use(states),
            nodes_in_use=needs.nodes_in_use(states),
            promised=needs.promised(states),
        )
        for evaluation_id, offers in offered.items():
            if offers:
                self._tell(evaluation_id, NodesOffered(at=now, offers=offers))
        self._stage_ahead(demands, now)

    def _unusable(self, now: float) -> Iterator[tuple[str, str, str]]:
        """(evaluation id, node, why) of nodes that it can no longer use, or whose memory it must leave to another."""
        unusable = {n.name for n in self.nodes if not n.usable}
        for use in needs.uses(self._states()):
            if use.status in needs.IN_USE and use.node in unusable:
                yield use.evaluation_id, use.node, "the cluster says it is down or drained"
        for evaluation_id, node in needs.in_the_way(self._states(), self.nodes, now):
            yield evaluation_id, node, "its memory is needed by who has the GPUs"

    def _withdraw(self, lost: Iterable[tuple[str, str, str]], now: float) -> None:
        for evaluation_id, node, reason in list(lost):
            self._tell(evaluation_id, NodeWithdrawn(at=now, node=node, reason=reason))

    def _stage_ahead(self, demands: Sequence[Demand], now: float) -> None:
        """While GPUs are busy, the next checkpoint's weights may come to the nodes that will have them free."""
        candidates = needs.waiting(self._states(), demands)
        held = needs.held(self._states())
        share = self.performer.site.prefetch
        certain = [
            n for n in self.nodes if not n.best_effort
        ]  # weights that wait are not worth being preempted
        for evaluation_id, names in ahead.choose(
            certain, candidates, held, self.limits, share=share, kept_back=self._kept_back(now)
        ).items():
            self._tell(evaluation_id, MemoryOffered(at=now, nodes=names))

    def _linger(self, state: State, node: str) -> float:
        """Seconds that a holder released there keeps its pages: some, where one waits that may write them over."""
        seconds, record = self.performer.site.linger_seconds, state.record
        if not seconds or node in self._kept_back(clock.now()):
            return 0.0
        there = next((n for n in self.nodes if n.name == node), None)
        waiting = needs.waiting(self._states(), needs.demands(self._states()))
        digest, memory_mb = record.checkpoint.digest, holder_memory_mb(record)
        return seconds if ahead.heir(there, digest, memory_mb, waiting, self.limits) else 0.0

    # --- run ---------------------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], on_tick: Callable[[], None] | None = None) -> None:
        """Tick until `until()`; `on_tick` draws whatever is to be seen."""
        while not until():
            started = time.monotonic()
            self.tick()
            if on_tick is not None:
                on_tick()
            time.sleep(max(0.0, self.pace.tick - (time.monotonic() - started)))
