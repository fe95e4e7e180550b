"""Offers, withdrawals and prefetches of nodes for each evaluation. Called between two turns by `loop`.

Rule: `coordinator.decide.allocation` decides; this asks the cluster for its nodes and passes the decisions on as events.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.base import clock
from coordinator.base.clock import Throttle
from coordinator.decide.allocation import cordons, demand, job_limits
from coordinator.decide.allocation.allocate import Demand, Limits, choose_prefetches
from coordinator.decide.evaluation.events import MemoryOffered, NodesOffered, NodeWithdrawn, Offer
from coordinator.decide.evaluation.state import FEWER_SECONDS, State
from coordinator.runtime import gpu_names
from coordinator.runtime.detect import limit_events
from coordinator.runtime.registry import Evaluations
from coordinator.runtime.runner import Running
from coordinator.site.cluster import Cluster, ClusterError, JobState, NodeState

NODES_LISTING = "the listing of nodes"
"""Description of the question to the cluster, for users."""
NOT_CHECKED = 1 << 10
"""Failures that an unchecked node counts as: checked ones are offered first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds between two looks, each of which costs a Slurm controller two RPCs."""

    tick: float = 0.2
    jobs: float = 10.0
    last_jobs: float = 4.0  # while all evaluations end: most jobs end this long after the results
    nodes: float = 10.0
    redis: float = 2.0
    lease: float = 30.0
    # largest part of a tick for offers, and for submissions; at least one of each is made
    share: float = 0.25


class NodeOffers:
    """Offers of nodes to the evaluations of a work folder."""

    def __init__(self, evaluations: Evaluations, cluster: Cluster, limits: Limits, pace: Pace) -> None:
        self.limits = limits
        self.pace = pace
        self.nodes: list[NodeState] = []  # from the last listing
        self.checks_nodes = False  # set by the daemon's `NodeChecker`, which empties `to_check`
        self.to_check: frozenset[str] = frozenset()  # nodes that would be offered if they had been checked
        self._evaluations = evaluations
        self._cluster = cluster
        self._paths = evaluations.performer.site.paths
        self._throttle = Throttle()
        # nodes at fault that no evaluation is offered -> until unix seconds
        self._at_fault: dict[str, float] = {}
        self._offers: deque[tuple[str, tuple[Offer, ...]]] = deque()  # (evaluation id, nodes) to pass on
        # demands that those offers answer; None: all were passed on
        self._demands: Sequence[Demand] | None = None
        # from the last listing of jobs: job -> the limit on this user's jobs that keeps it out
        self._kept_out: Mapping[str, str] = {}
        self._few = (0, 0.0)  # nodes that such a limit allows, until unix seconds
        self._in_use = 0  # GPUs of all evaluations in the last turn

    def cordon(self, nodes: Sequence[str], until: float) -> None:
        """Cordon these nodes until `until` (unix seconds) and withdraw them; a time in the past lifts the cordon. Raise
        OSError if the disk refuses `nodes.json`; nothing is withdrawn then.
        """
        now = clock.now()
        cordons.cordon_nodes(self._paths.nodes, nodes, until, now)
        self._give_back(now)

    def make_way(self, listing: Iterable[JobState], now: float) -> None:
        """Give up idle jobs that count towards a limit while it keeps other jobs out."""
        self._kept_out = job_limits.kept_out(listing)
        states = self._evaluations.states()
        first = job_limits.first_kept_out(states, self._kept_out)
        self._withdraw(job_limits.given_up_nodes(states, first), now)
        working = {
            state.evaluation_id for state in self._evaluations.states() if job_limits.has_working_job(state)
        }
        for evaluation_id in list(self._evaluations.running):
            others = bool(working - {evaluation_id})
            self._evaluations.guarded(evaluation_id, partial(self._reached, others=others, now=now))

    def _reached(self, running: Running, *, others: bool, now: float) -> None:
        """Tell an evaluation that only runs idle jobs that a limit is reached, and take no more nodes for a while."""
        state, seen = running.state, running.seen
        events = limit_events(state, self._kept_out, seen, self._evaluations.grace, now, others=others)
        running.take(events)
        if events:
            self._few = (max(1, len(demand.nodes_in_use(self._evaluations.states()))), now + FEWER_SECONDS)

    def _fewer(self, now: float) -> Limits:
        """Return the settings' limits; for a while, no more nodes than a limit on jobs allowed."""
        most, until = self._few
        nodes = [n for n in (self.limits.max_nodes, most if now < until else None) if n is not None]
        return replace(self.limits, max_nodes=min(nodes, default=None))

    def _give_back(self, now: float) -> None:
        """Withdraw cordoned nodes from evaluations, including ones that were parked when the cordon was set."""
        self._offers.clear()
        cordoned = self._cordoned(now)
        open_ones = [state for state in self._evaluations.states() if state.ended_at is None]
        self._withdraw(
            (
                (use.evaluation_id, use.node, "it is cordoned")
                for use in demand.node_uses(open_ones)
                if use.node in cordoned
            ),
            now,
        )

    def look(self, now: float) -> None:
        states = self._evaluations.states()
        in_use = any(state.nodes.by_name for state in states)
        demands = demand.gpu_demands(states)
        # nodes that one evaluation gives back are offered at once, not at the next look
        in_use_before, self._in_use = self._in_use, demand.gpus_in_use(states)
        freed = self._in_use < in_use_before
        every = (0.0 if freed else self.pace.nodes) if demands else 6 * self.pace.nodes
        wanted = (demands or in_use) and self._throttle.due("nodes", every, now)
        call = (
            self._evaluations.performer.calls.ask(NODES_LISTING, self._cluster.nodes)
            if wanted or self._evaluations.performer.calls.asking(NODES_LISTING)
            else None
        )
        if call is None:
            return
        try:
            self.nodes = gpu_names.with_types(call.result(), self._gpu_names())
        except ClusterError as error:
            self._evaluations.show_trouble(f"no news of nodes: {error}", error)
            return
        self._give_back(now)
        self._withdraw(self._unusable(now), now)
        states = self._evaluations.states()  # without evaluations parked just now
        self._at_fault |= demand.nodes_at_fault(states)
        without = self._cordoned(now) | {node for node, until in self._at_fault.items() if until > now}
        without |= demand.started_since(states, call.asked_at)
        free = [replace(n, usable=n.usable and n.name not in without) for n in self.nodes]
        first = job_limits.first_kept_out(states, self._kept_out)
        may = job_limits.not_behind(demands, first)
        failures, unchecked = dict(self._failures(states, now)), self._unchecked(states, now)
        for node in unchecked:
            failures[node] = NOT_CHECKED + failures.get(node, 0)
        offers = demand.make_offers(states, free, may, self._fewer(now), failures)
        self.to_check = frozenset(o.node for nodes in offers.values() for o in nodes if o.node in unchecked)
        certain = {i: tuple(o for o in nodes if o.node not in unchecked) for i, nodes in offers.items()}
        self._offers = deque((evaluation_id, nodes) for evaluation_id, nodes in certain.items() if nodes)
        self._demands = None if first is not None or now < self._few[1] else demands

    def pass_on(self, now: float) -> None:
        """Pass offers on to evaluations. Each may then plan, which takes tenths of a second, so the rest may wait a turn."""
        until = time.monotonic() + self.pace.share
        while self._offers:
            evaluation_id, nodes = self._offers.popleft()
            running = self._evaluations.running.get(evaluation_id)
            if running is not None and running.state.may_use_nodes:
                self._evaluations.tell(evaluation_id, NodesOffered(at=now, offers=nodes))
            if time.monotonic() >= until:
                return
        if self._demands is not None:
            demands, self._demands = self._demands, None
            self._stage_ahead(demands, now)

    def _unusable(self, now: float) -> Iterator[tuple[str, str, str]]:
        """Yield (evaluation id, node, why) of nodes to withdraw from an evaluation."""
        unusable = {n.name: n.excluded for n in self.nodes if not n.usable}
        for use in demand.node_uses(self._evaluations.states()):
            if use.status != "back-off" and use.node in unusable:
                setting = unusable[use.node]
                why = f"{setting} excludes it" if setting else "the cluster says it is down or drained"
                yield use.evaluation_id, use.node, why
        cordoned = self._cordoned(now)
        may = [n for n in self.nodes if n.name not in cordoned]
        for evaluation_id, node in demand.nodes_taken_by_others(self._evaluations.states(), may, now):
            yield (
                evaluation_id,
                node,
                "its jobs wait for what other users have there, and another node is free",
            )
        for evaluation_id, node in demand.nodes_in_the_way(self._evaluations.states(), self.nodes, now):
            yield evaluation_id, node, "the evaluation that has its GPUs needs its memory"

    def _withdraw(self, lost: Iterable[tuple[str, str, str]], now: float) -> None:
        for evaluation_id, node, reason in list(lost):
            self._evaluations.tell(evaluation_id, NodeWithdrawn(at=now, node=node, reason=reason))

    def _stage_ahead(self, demands: Sequence[Demand], now: float) -> None:
        """Prefetch the next checkpoint's weights to nodes whose GPUs are busy."""
        candidates = demand.prefetch_candidates(self._evaluations.states(), demands)
        held = demand.held_checkpoints(self._evaluations.states())
        share = self._evaluations.performer.site.stage.prefetch
        certain = [n for n in self.nodes if not n.best_effort]  # a prefetch must not be preempted
        for evaluation_id, names in choose_prefetches(
            certain, candidates, held, self.limits, share=share, cordoned=self._cordoned(now)
        ).items():
            self._evaluations.tell(evaluation_id, MemoryOffered(at=now, nodes=names))

    def _cordoned(self, now: float) -> set[str]:
        try:
            return set(cordons.read_cordons(self._paths.nodes, now))
        except OSError:  # storage is unavailable: nothing can be journalled, so nothing is taken
            return set()

    def _failures(self, states: Sequence[State], now: float) -> Mapping[str, int]:
        """Return node -> its recent failures in all evaluations, including current ones."""
        place = self._paths.nodes
        try:
            cordons.record_node_failures(place, demand.failed_nodes(states), now)
            return {node: len(own) for node, own in cordons.read_node_failures(place, now).items()}
        except OSError:  # as above
            return {}

    def _unchecked(self, states: Sequence[State], now: float) -> set[str]:
        """Return unused nodes whose check is due, if the daemon checks nodes."""
        if not self.checks_nodes:
            return set()
        try:
            known = cordons.checked_nodes(self._paths.nodes, now)
        except OSError:  # as above
            return set()
        return {n.name for n in self.nodes} - demand.nodes_in_use(states) - known

    def _gpu_names(self) -> Mapping[str, str]:
        try:
            return gpu_names.read_gpu_names(self._paths.gpu_names)
        except OSError:  # as above
            return {}
