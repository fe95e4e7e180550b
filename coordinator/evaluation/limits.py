"""Limits on this user's jobs that an evaluation's own idle jobs fill: what it gives up then, so that work goes on.

Rule: precursors and idle metric workers hold places of a limit (MaxJobs, GrpTRES, MaxSubmit) that builds and trials need.
Where nothing of it that works is left to end, the evaluation keeps as many nodes as those places serve with all their
trials, half of them at most. Where no other evaluation's work is left to end either, it gives up the precursor of its last
node, and one job there stages and hosts the trials. Where that job alone is too large, it has half the lanes. What
evaluations give up for each other: `coordinator.allocation.job_limits`.
Called from: `step`.
"""

from __future__ import annotations

from coordinator.evaluation import indexes, jobs, nodes
from coordinator.evaluation.actions import Action, StopWorkers
from coordinator.evaluation.events import LimitReached
from coordinator.evaluation.state import NodeUse, State

FEWER_SECONDS = 1800.0  # for which an evaluation that a limit kept out uses fewer nodes; doubled each time
MAX_FEWER_SECONDS = 8 * 3600.0  # the longest such time


def reached(state: State, event: LimitReached) -> list[Action]:
    """Jobs wait for a limit, and no job of this evaluation that would end by itself runs."""
    if not state.can_work:
        return []
    idle = sorted(idle_nodes(state), key=lambda n: (n.status == "ready", n.name))
    in_use = len(state.index.in_use)
    # the jobs that run now have its places: each node that is kept needs one for its precursor and one a trial
    lives = [phase for name in state.jobs.live for phase in state.jobs.by_name[name].members.values()]
    served = lives.count("running") // (1 + state.index.lanes_in_use // max(1, in_use))
    if spare := idle[: in_use - max(1, min(served, in_use // 2))]:
        why = f"a limit on jobs is reached: {event.why}"
        actions = [action for node in spare for action in nodes.withdraw(state, node.name, why, event.at)]
        _use_no_more(state, event.at)
        names = ", ".join(node.name for node in spare)
        verb = "are" if len(spare) > 1 else "is"
        state.warnings.append(f"{names} {verb} given up for a while, so that other jobs start: {event.why}")
        return actions
    if event.others:
        return []
    if "metric" in state.index.jobs and not state.scoring.outstanding:
        workers = [info for info in state.live_jobs("metric") if info.released_at is None]
        released = [action for info in workers for action in jobs.release(state, info, event.at)]
        return [StopWorkers(), *released] if workers else []
    if idle:
        return nodes.host(state, idle[0], event.why, event.at)
    return _fewer_lanes(state, event)


def _use_no_more(state: State, now: float) -> None:
    """No more nodes than now, for a while: each further one would stage the weights in vain."""
    use = state.nodes
    use.most_times += now >= use.most_until
    use.most = len(state.index.in_use)
    use.most_until = now + min(FEWER_SECONDS * 2.0 ** (use.most_times - 1), MAX_FEWER_SECONDS)


def _fewer_lanes(state: State, event: LimitReached) -> list[Action]:
    """A job that would host trials asks for more than the limit leaves: half of its lanes. Limits on the number of jobs stay."""
    if "Job" in event.why:
        return []
    for info in state.live_jobs("host"):
        node = state.nodes.by_name[info.job.node or ""]
        if "running" not in info.members.values() and info.released_at is None and node.lanes > 1:
            actions = nodes.host(state, node, event.why, event.at)
            node.lanes //= 2
            indexes.file_node(state, node)
            return actions
    return []


def idle_nodes(state: State) -> list[NodeUse]:
    """Nodes in use without a running trial; none where none of their precursors runs, and so holds a place of the limit."""
    staged = (node for name, node in state.index.staged.items() if name in state.index.in_use)
    found = [n for n in staged if not n.hosted and n.rung != "host" and not state.running_lanes(n.name)]
    precursors = (state.jobs.by_name[n.precursor or ""] for n in found)
    return found if any("running" in info.members.values() for info in precursors) else []
