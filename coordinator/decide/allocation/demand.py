"""Needs and use of nodes by a work folder's evaluations. Pure. Called by the loop and the CLI.

Rule: derived from the evaluations' states alone, so offers stay known after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.decide.allocation.allocate import Candidate, Demand, HeldCheckpoints, Limits, Turn, allocate
from coordinator.decide.allocation.cordons import Failure
from coordinator.decide.evaluation.events import Offer
from coordinator.decide.evaluation.footprint import gpu_need, precursor_memory_mb, trial_memory_mb
from coordinator.decide.evaluation.nodes import back_off_seconds
from coordinator.decide.evaluation.state import NodeUse, State
from coordinator.site.cluster import NodeState

NODE_LOSS = {"back-off": 0, "offered": 0, "staging": 1, "ready": 2}  # what a node has cost so far, by status
NO_LIMIT = 1 << 20
# how long a memory shortage is ignored: jobs and nodes are not listed at the same moment
PATIENCE_SECONDS = 30.0
TAKEN_SECONDS = 120.0  # how long to wait for a node busy with other users' jobs before using a free one


def turn_of(state: State) -> Turn:
    """Return the sort key of an evaluation, as in `Demand.turn`."""
    return -state.record.priority, state.record.accepted_at, state.evaluation_id


def in_turn(states: Iterable[State]) -> list[State]:
    """Return states in the order in which they are served."""
    return sorted(states, key=turn_of)


def gpu_demands(states: Iterable[State]) -> list[Demand]:
    """Return the GPUs that evaluations could use beyond what they have."""
    found = []
    for state in _open(states):
        options = state.record.options
        in_use = _in_use(state)
        have = sum(n.lanes for n in in_use)
        most = options.max_trials if options.max_trials is not None else NO_LIMIT
        if not state.plans_later:
            # without stealing, the shards were dealt to the lanes of that time
            todo = max(state.shards.todo, 0)
            most = min(most, todo) if options.plan.steals or not have else have
        if most <= have:
            continue
        # a job that hosts trials holds its GPUs from its start
        hosted = {n.name for n in in_use if n.hosted or n.rung == "host" or options.stage.hosts}
        found.append(
            Demand(
                evaluation_id=state.evaluation_id,
                priority=state.record.priority,
                accepted_at=state.record.accepted_at,
                gpus=(most - have) * options.trial.gpus_per_trial,
                gpus_per_trial=options.trial.gpus_per_trial,
                in_use={n.name: n.lanes * options.trial.gpus_per_trial for n in in_use},
                avoid=frozenset(
                    hosted | {n.name for n in state.nodes.by_name.values() if n.status == "back-off"}
                ),
                precursor_mb=_once_mb(state),
                trial_mb=trial_memory_mb(state.record),
                need=gpu_need(state.record),
            )
        )
    return found


def make_offers(
    states: Sequence[State],
    nodes: Iterable[NodeState],
    demanded: Sequence[Demand],
    limits: Limits,
    failures: Mapping[str, int],
) -> Mapping[str, tuple[Offer, ...]]:
    """Return evaluation id -> offers (`allocate`), given what all evaluations use and were promised."""
    return allocate(
        nodes,
        demanded,
        limits,
        gpus_in_use=gpus_in_use(states),
        nodes_in_use=nodes_in_use(states),
        promised=promised_resources(states),
        failures=failures,
    )


def promised_resources(states: Iterable[State]) -> dict[str, tuple[int, int]]:
    """Return node -> GPUs and MiB offered but not yet held by a job; the cluster lists them as free.

    Prefetched weights are subtracted, since they make way for the evaluation that gets the GPUs (`nodes_in_the_way`).
    """
    gpus: Counter[str] = Counter()
    megabytes: Counter[str] = Counter()
    for state in _open(states):
        for node, lanes in _promised_lanes(state):
            once = 0 if node.status == "ready" or _held_mb(state, node) else _once_mb(state)
            gpus[node.name] += lanes * state.record.options.trial.gpus_per_trial
            megabytes[node.name] += once + lanes * trial_memory_mb(state.record)
        for ahead in _prefetched(state):
            megabytes[ahead.name] -= _held_mb(state, ahead)
    return {name: (gpus[name], megabytes[name]) for name in megabytes}


def started_since(states: Iterable[State], asked_at: float) -> set[str]:
    """Return nodes where jobs changed after `asked_at` (unix seconds): a listing that old may show their GPUs as free."""
    return {
        info.job.node
        for state in states
        for info in state.jobs.live.values()
        if info.job.node is not None and info.changed_at > asked_at
    }


def _promised_lanes(state: State) -> Iterator[tuple[NodeUse, int]]:
    """Yield (node in use, number of its lanes that were offered and run no trial)."""
    in_use = _in_use(state)
    busy = {n.name: n.running_lanes for n in in_use}
    # near its end an evaluation has more lanes than shards: the next evaluation uses these
    lanes_in_use = sum(n.lanes for n in in_use)
    wanted = lanes_in_use if state.plans_later else state.shards.todo - sum(busy.values())
    for node in in_use:
        lanes = max(0, min(node.lanes - busy[node.name], wanted))
        wanted -= lanes
        yield node, lanes


def _once_mb(state: State) -> int:
    """Return the MiB that an evaluation needs once per node, for its precursor or host."""
    options = state.record.options
    return precursor_memory_mb(state.record) if options.stage.enabled or options.stage.hosts else 0


def nodes_at_fault(states: Iterable[State]) -> dict[str, float]:
    """Return node -> unix seconds until which it is in back-off for a fault that any evaluation would meet."""
    return {
        node.name: node.back_off_until
        for state in states
        for node in state.nodes.by_name.values()
        if node.at_fault and node.back_off_until is not None
    }


def failed_nodes(states: Iterable[State]) -> Iterator[tuple[str, Failure]]:
    """Yield nodes in back-off, with the failure that began it."""
    for state in states:
        for node in state.nodes.by_name.values():
            if node.status == "back-off" and node.back_off_until is not None:
                at = node.back_off_until - back_off_seconds(node.back_offs - 1)
                yield node.name, Failure(at=at, why=node.why, seen_by=state.evaluation_id)


def gpus_in_use(states: Iterable[State]) -> int:
    """Count the GPUs on staged and staging nodes, for the limit on GPUs."""
    return sum(
        n.lanes * state.record.options.trial.gpus_per_trial
        for state in states
        for n in state.nodes.by_name.values()
        if n.status in ("staging", "ready")
    )


def nodes_in_use(states: Iterable[State]) -> set[str]:
    """Return nodes with GPUs in use, or offered to an evaluation with work, for the limit on nodes."""
    return {
        n.name
        for state in _open(states)
        for n in _in_use(state)
        if n.status != "offered" or state.shards.todo or state.plans_later
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """An evaluation's use of a node: `gpus` for its trials (0 in back-off), and live `trials`."""

    evaluation_id: str
    node: str
    status: str
    gpus: int
    trials: int


def node_uses(states: Sequence[State]) -> list[Use]:
    """Return every node that is not given up, once per evaluation that uses it or has prefetched on it."""
    return [
        Use(
            evaluation_id=state.evaluation_id,
            node=node.name,
            status=node.status,
            gpus=node.lanes * state.record.options.trial.gpus_per_trial if node.in_use else 0,
            trials=len(node.busy_lanes),
        )
        for state in states
        for node in state.nodes.by_name.values()
        if node.status != "withdrawn"
    ]


def nodes_to_give_back(used: Iterable[Use], gpus: int) -> tuple[str, ...]:
    """Return nodes that together hold `gpus` GPUs (all nodes, if they hold fewer), least loss first.

    Nodes without staged weights are the smaller loss, then those with fewer trials.
    """
    by_node: dict[str, list[Use]] = {}
    for use in used:
        by_node.setdefault(use.node, []).append(use)

    def loss(node: str) -> tuple[int, int, str]:
        there = by_node[node]
        return max(NODE_LOSS[u.status] for u in there), sum(u.trials for u in there), node

    chosen: list[str] = []
    freed = 0
    for node in sorted(by_node, key=loss):
        here = sum(u.gpus for u in by_node[node])
        if here and freed < gpus:
            chosen.append(node)
            freed += here
    return tuple(chosen)


def prefetch_candidates(states: Iterable[State], demanded: Sequence[Demand]) -> list[Candidate]:
    """Return evaluations waiting for their first GPU that stage by precursor, in the order of `demanded`."""
    known = {state.evaluation_id: state for state in states}
    candidates = []
    for demand in demanded:
        state = known.get(demand.evaluation_id)
        if state is None or state.record.options.stage.hosts or not state.record.options.stage.enabled:
            continue
        ready = state.builds.looked_up and state.conversion.status in ("none", "done")
        if ready and not any(node.lanes for node in state.nodes.by_name.values()):
            candidates.append(
                Candidate(
                    demand=demand,
                    digest=state.record.checkpoint.digest,
                    memory_mb=precursor_memory_mb(state.record),
                    known=frozenset(state.nodes.by_name),
                )
            )
    return candidates


def nodes_in_the_way(
    states: Iterable[State], nodes: Iterable[NodeState], now: float
) -> list[tuple[str, str]]:
    """Return (evaluation id, node) of prefetched checkpoints to clear.

    Another evaluation got the node's GPUs, and its precursor has waited PATIENCE_SECONDS for memory. The prefetch of the
    lowest turn goes first; none goes if all of them would not free enough.
    """
    served = in_turn(_open(states))
    gone: list[tuple[str, str]] = []
    for node in nodes:
        uses = [(s, s.nodes.by_name[node.name]) for s in served if node.name in s.nodes.by_name]
        wanted = max((_waits_for_mb(s, use, now) for s, use in uses if use.lanes), default=0)
        ahead = [(s, mb) for s, use in uses if not use.lanes and (mb := _held_mb(s, use))]
        free = node.memory_free_mb
        if wanted <= free or free + sum(mb for _, mb in ahead) < wanted:
            continue
        while free < wanted:
            state, megabytes = ahead.pop()
            gone.append((state.evaluation_id, node.name))
            free += megabytes
    return gone


def nodes_taken_by_others(
    states: Iterable[State], nodes: Iterable[NodeState], now: float
) -> list[tuple[str, str]]:
    """Return (evaluation id, node) of nodes to give up, since other users' jobs took their GPUs or memory.

    Only if the evaluation runs nothing and another node is free; otherwise it would wait for those jobs to end.
    """
    known = {node.name: node for node in nodes}
    states = list(states)
    spoken_for = promised_resources(states)
    found: list[tuple[str, str]] = []
    for state in _open(states):
        options = state.record.options
        per_trial, need = options.trial.gpus_per_trial, gpu_need(state.record)
        if not state.shards.todo or any(n.running_lanes for n in _in_use(state)):
            continue  # a running evaluation leaves its shards to its other lanes
        free = [
            n.name
            for n in known.values()
            if n.usable
            and need.holds(n)
            and n.gpus_free - spoken_for.get(n.name, (0, 0))[0] >= per_trial
            and (not n.counts_memory or n.memory_free_mb >= _once_mb(state) + trial_memory_mb(state.record))
            and (
                n.name not in state.nodes.by_name
                or state.nodes.by_name[n.name].status in ("offered", "withdrawn")
            )
        ]
        for use in _in_use(state):
            there = known.get(use.name)
            others = any(name != use.name for name in free)
            if others and there is not None and _shut_out(state, use, there, now):
                found.append((state.evaluation_id, use.name))
    return found


def _shut_out(state: State, use: NodeUse, node: NodeState, now: float) -> bool:
    """Return whether its pending jobs there have waited TAKEN_SECONDS and the node lacks what one requests."""
    jobs = [i for i in state.jobs_on(use.name) if i.released_at is None]
    waiting = [i for i in jobs if i.phase == "submitted" and "pending" in i.members.values()]
    if any(now - i.changed_at < TAKEN_SECONDS for i in waiting):
        return False
    return any(i.job.gpus > node.gpus_free or i.job.memory_mb > node.memory_free_mb for i in waiting)


def _waits_for_mb(state: State, use: NodeUse, now: float) -> int:
    """Return the MiB that the node's precursor has waited for longer than PATIENCE_SECONDS; otherwise 0."""
    info = state.jobs.by_name.get(use.precursor or "")
    if info is None or info.phase != "submitted" or now - info.changed_at < PATIENCE_SECONDS:
        return 0
    return info.job.memory_mb if "pending" in info.members.values() else 0


def _held_mb(state: State, use: NodeUse) -> int:
    info = state.jobs.by_name.get(use.precursor or "")
    return info.job.memory_mb if info is not None and "running" in info.members.values() else 0


def held_checkpoints(states: Iterable[State]) -> dict[str, HeldCheckpoints]:
    """Return node -> checkpoints staged or being staged in its memory."""
    found: dict[str, HeldCheckpoints] = {}
    for state in states:
        for node in state.nodes.by_name.values():
            there = found.setdefault(node.name, HeldCheckpoints())
            if not node.lanes and node.precursor is not None:
                there.ahead.add(state.record.checkpoint.digest)
            elif node.lanes and node.status == "ready" and node.rung in ("shm", "disk"):
                there.inferring.add(state.record.checkpoint.digest)
    return found


def _open(states: Iterable[State]) -> Iterator[State]:
    """Yield evaluations that still have something to run, and may."""
    return (state for state in states if state.may_use_nodes)


def _in_use(state: State) -> list[NodeUse]:
    return [n for n in state.nodes.by_name.values() if n.in_use]


def _prefetched(state: State) -> list[NodeUse]:
    return [n for n in state.nodes.by_name.values() if not n.lanes]
