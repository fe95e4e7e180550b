"""What the evaluations of a work folder need of the cluster, and what they have of it, for allocation. Pure.

Rule: read from the evaluations' states and nothing else, so whatever was promised to one is known after a restart too.
It does not know: what is free, or who is served first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from coordinator.allocation.allocate import Demand
from coordinator.allocation.prefetch import Candidate, Held
from coordinator.cluster import NodeState
from coordinator.evaluation.specs import holder_memory_mb
from coordinator.evaluation.state import NodeUse, State

IN_USE = ("offered", "staging", "ready")
LOSS = {"aside": 0, "offered": 0, "staging": 1, "ready": 2}  # what a node has cost so far, by its status
NO_LIMIT = 1 << 20
PATIENCE_SECONDS = 30.0  # three looks: jobs and nodes are not listed at the same moment
TAKEN_SECONDS = 120.0  # that jobs wait for what somebody else has on their node, while another node is free


def demands(states: Iterable[State]) -> list[Demand]:
    """GPUs that evaluations could use beyond what they have."""
    found = []
    for state in _open(states):
        options = state.record.options
        in_use = _in_use(state)
        have = sum(n.lanes for n in in_use)
        most = options.max_trials if options.max_trials is not None else NO_LIMIT
        if state.leaves:
            # without stealing, the shards were dealt to the lanes that there were
            most = min(most, max(state.todo, 0)) if options.steal or not have else have
        if most <= have:
            continue
        # a job that hosts trials holds what it has from its start
        hosted = {n.name for n in in_use if n.hosted or n.rung == "host" or options.host_trials}
        found.append(
            Demand(
                evaluation_id=state.evaluation_id,
                priority=state.record.priority,
                accepted_at=state.record.accepted_at,
                gpus=(most - have) * options.gpus_per_trial,
                gpus_per_trial=options.gpus_per_trial,
                in_use={n.name: n.lanes * options.gpus_per_trial for n in in_use},
                avoid=frozenset(hosted | {n.name for n in state.nodes.values() if n.status == "aside"}),
                holder_mb=_once_mb(state),
                trial_mb=options.trial_memory_mb,
            )
        )
    return found


def promised(states: Iterable[State]) -> dict[str, int]:
    """GPUs of each node that an evaluation was offered and that no running job of it holds: free only to look at."""
    gpus: dict[str, int] = {}
    for state in _open(states):
        for node, lanes in _promised_lanes(state):
            gpus[node.name] = gpus.get(node.name, 0) + lanes * state.record.options.gpus_per_trial
    return gpus


def promised_mb(states: Iterable[State]) -> dict[str, int]:
    """MiB of each node that jobs of offers will take and do not hold yet, less what is staged ahead there: that makes way
    for the evaluation that is given the GPUs (`in_the_way`).
    """
    megabytes: dict[str, int] = {}
    for state in _open(states):
        for node, lanes in _promised_lanes(state):
            once = 0 if node.status == "ready" or _held_mb(state, node) else _once_mb(state)
            more = once + lanes * state.record.options.trial_memory_mb
            megabytes[node.name] = megabytes.get(node.name, 0) + more
        for node in state.nodes.values():
            if not node.lanes:
                megabytes[node.name] = megabytes.get(node.name, 0) - _held_mb(state, node)
    return megabytes


def _promised_lanes(state: State) -> Iterator[tuple[NodeUse, int]]:
    """Nodes in use, each with its lanes that were offered and run no trial."""
    in_use = _in_use(state)
    busy = {n.name: state.running_lanes(n.name) for n in in_use}
    # towards its end an evaluation has more lanes than shards: those serve the next one
    wanted = state.todo - sum(busy.values()) if state.leaves else sum(n.lanes for n in in_use)
    for node in in_use:
        lanes = max(0, min(node.lanes - busy[node.name], wanted))
        wanted -= lanes
        yield node, lanes


def _once_mb(state: State) -> int:
    """Memory that an evaluation needs once a node, beside its trials: of its precursor, or of the job that hosts them."""
    options = state.record.options
    return holder_memory_mb(state.record) if options.stage or options.host_trials else 0


def gpus_in_use(states: Iterable[State]) -> int:
    """GPUs on nodes that are staged or being staged: what the limit on GPUs counts."""
    return sum(
        n.lanes * state.record.options.gpus_per_trial
        for state in states
        for n in state.nodes.values()
        if n.status in ("staging", "ready")
    )


def nodes_in_use(states: Iterable[State]) -> set[str]:
    """Nodes that evaluations have GPUs of, or were offered and have work for: what the limit on nodes counts."""
    return {
        n.name
        for state in _open(states)
        for n in _in_use(state)
        if n.status != "offered" or state.todo or not state.leaves
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What an evaluation has on a node: `gpus` that it may run trials on (none while it is set aside), `trials` that live."""

    evaluation_id: str
    node: str
    status: str
    gpus: int
    trials: int


def uses(states: Iterable[State]) -> list[Use]:
    """Every node that is not given up, once for each evaluation that has it."""
    return [
        Use(
            evaluation_id=state.evaluation_id,
            node=node.name,
            status=node.status,
            gpus=node.lanes * state.record.options.gpus_per_trial if node.status in IN_USE else 0,
            trials=len(state.live_lanes(node.name)),
        )
        for state in states
        for node in state.nodes.values()
        if node.status != "withdrawn"
    ]


def to_give_back(used: Iterable[Use], gpus: int) -> tuple[str, ...]:
    """As many nodes as hold `gpus` GPUs (all, where they hold fewer), those on which the least is lost first: nothing
    staged yet before staged weights, few trials before many.
    """
    by_node: dict[str, list[Use]] = {}
    for use in used:
        by_node.setdefault(use.node, []).append(use)

    def loss(node: str) -> tuple[int, int, str]:
        there = by_node[node]
        return max(LOSS[u.status] for u in there), sum(u.trials for u in there), node

    chosen: list[str] = []
    freed = 0
    for node in sorted(by_node, key=loss):
        here = sum(u.gpus for u in by_node[node])
        if here and freed < gpus:
            chosen.append(node)
            freed += here
    return tuple(chosen)


def waiting(states: Iterable[State], demanded: Sequence[Demand]) -> list[Candidate]:
    """Evaluations that wait for their first GPU and would be served by a precursor, in the order of `demanded`."""
    known = {state.evaluation_id: state for state in states}
    candidates = []
    for demand in demanded:
        state = known.get(demand.evaluation_id)
        if state is None or state.record.options.host_trials or not state.record.options.stage:
            continue
        ready = state.looked_up and state.conversion in ("none", "done")
        if ready and not any(n.lanes for n in state.nodes.values()):
            candidates.append(
                Candidate(
                    demand=demand,
                    digest=state.record.checkpoint.digest,
                    memory_mb=holder_memory_mb(state.record),
                    known=frozenset(state.nodes),
                )
            )
    return candidates


def in_the_way(states: Iterable[State], nodes: Iterable[NodeState], now: float) -> list[tuple[str, str]]:
    """(evaluation id, node) of checkpoints staged ahead that must go: another evaluation was given the GPUs there, and its
    precursor has waited for their memory for a while, so both would wait for ever. The last to be served goes first;
    none, where all of them together would not be enough.
    """
    served = sorted(_open(states), key=lambda s: s.turn)
    gone: list[tuple[str, str]] = []
    for node in nodes:
        here = [(s, s.nodes[node.name]) for s in served if node.name in s.nodes]
        wanted = max((_waits_for_mb(s, use, now) for s, use in here if use.lanes), default=0)
        ahead = [(s, mb) for s, use in here if not use.lanes and (mb := _held_mb(s, use))]
        free = node.memory_free_mb
        if wanted <= free or free + sum(mb for _, mb in ahead) < wanted:
            continue
        while free < wanted:
            state, megabytes = ahead.pop()
            gone.append((state.evaluation_id, node.name))
            free += megabytes
    return gone


def taken(states: Iterable[State], nodes: Iterable[NodeState], now: float) -> list[tuple[str, str]]:
    """(evaluation id, node) of nodes whose GPUs or memory went to somebody else before our jobs there began, though another
    node is free: given up, since an evaluation of which nothing runs would wait for as long as theirs does.
    """
    known = {node.name: node for node in nodes}
    states = list(states)
    spoken_for = promised(states)
    found: list[tuple[str, str]] = []
    for state in _open(states):
        options = state.record.options
        per_trial = options.gpus_per_trial
        if not state.todo or any(state.running_lanes(n.name) for n in _in_use(state)):
            continue  # who runs takes over what is left
        free = [
            n.name
            for n in known.values()
            if n.usable
            and n.gpus_free - spoken_for.get(n.name, 0) >= per_trial
            and (not n.counts_memory or n.memory_free_mb >= _once_mb(state) + options.trial_memory_mb)
            and (n.name not in state.nodes or state.nodes[n.name].status in ("offered", "withdrawn"))
        ]
        for use in _in_use(state):
            there = known.get(use.name)
            others = any(name != use.name for name in free)
            if others and there is not None and _shut_out(state, use, there, now):
                found.append((state.evaluation_id, use.name))
    return found


def _shut_out(state: State, use: NodeUse, node: NodeState, now: float) -> bool:
    """All that waits there has waited for long, and for want of what a job of it needs."""
    jobs = [i for i in state.index.jobs_on.get(use.name, {}).values() if i.released_at is None]
    waiting = [i for i in jobs if i.phase == "submitted" and "pending" in i.members.values()]
    if any(now - i.changed_at < TAKEN_SECONDS for i in waiting):
        return False
    return any(i.job.gpus > node.gpus_free or i.job.memory_mb > node.memory_free_mb for i in waiting)


def _waits_for_mb(state: State, use: NodeUse, now: float) -> int:
    """Memory that the job which is to stage there has waited for so long that no look at jobs or nodes is older; else 0."""
    info = state.jobs.get(use.holder or "")
    if info is None or info.phase != "submitted" or now - info.changed_at < PATIENCE_SECONDS:
        return 0
    return info.job.memory_mb if "pending" in info.members.values() else 0


def _held_mb(state: State, use: NodeUse) -> int:
    info = state.jobs.get(use.holder or "")
    return info.job.memory_mb if info is not None and "running" in info.members.values() else 0


def held(states: Iterable[State]) -> dict[str, Held]:
    """By node, the checkpoints that are in its memory for us or on their way there."""
    found: dict[str, Held] = {}
    for state in states:
        for node in state.nodes.values():
            there = found.setdefault(node.name, Held())
            if node.lanes and node.status == "ready" and node.rung in ("shm", "disk"):
                there.inferring.add(state.record.checkpoint.digest)
            elif not node.lanes and node.holder is not None:
                there.ahead.add(state.record.checkpoint.digest)
    return found


def _open(states: Iterable[State]) -> Iterator[State]:
    """Those that still have something to run."""
    for state in states:
        if not (state.ended_at is not None or state.winding_down or state.fatal or state.cancelled):
            yield state


def _in_use(state: State) -> list[NodeUse]:
    return [n for n in state.nodes.values() if n.lanes and n.status in IN_USE]
