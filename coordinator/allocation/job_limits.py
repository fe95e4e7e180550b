"""What gives way where a limit on this user's jobs keeps jobs of the daemon out. Pure. Called by the loop and `detect`.

Rule: the first evaluation in turn whose jobs wait for a limit goes first. Evaluations behind it get no further node and
give up those where they run nothing; nothing is prefetched, and what is prefetched is given up. What an evaluation gives
up of its own is `coordinator.evaluation.limits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from coordinator.allocation.allocate import Demand
from coordinator.allocation.demand import IN_USE, in_turn, turn_of
from coordinator.cluster import JobState, slurm_limits
from coordinator.evaluation.state import JobInfo, Phase, State

WORK = ("build", "convert", "trial", "host")  # purposes of jobs that an evaluation cannot do without


def kept_out(listing: Iterable[JobState]) -> dict[str, str]:
    """Job -> the limit on all of this user's jobs that it waits for."""
    pending = (row for row in listing if row.phase == "pending")
    return {row.name: row.reason for row in pending if slurm_limits.of_all_jobs(row.reason)}


def waits_for(state: State, limited: Mapping[str, str]) -> str:
    """The limit that keeps out a job which the evaluation cannot go on without; "" where none does. `limited`: `kept_out`."""
    held = state.jobs.held
    for name in state.jobs.live:
        info = state.jobs.by_name[name]
        why = held[name].why if name in held else limited.get(name, "")
        if why and info.released_at is None and _needed(state, info):
            return why
    return ""


def _needed(state: State, info: JobInfo) -> bool:
    """Does the evaluation wait for this job? For the first of its precursors and workers, and for any other job."""
    purpose = info.job.purpose
    if purpose == "stage":
        return info.job.node not in state.nodes.prefetches and not state.index.staged
    if purpose == "metric":
        running = any("running" in i.members.values() for i in state.live_jobs("metric"))
        return bool(state.scoring.outstanding) and not running
    return purpose in WORK


def running(state: State) -> set[str]:
    """Purposes of the evaluation's jobs that run, or are about to end."""
    return {
        info.job.purpose
        for info in map(state.jobs.by_name.__getitem__, state.jobs.live)
        if "running" in info.members.values() or (info.phase == "submitted" and info.released_at)
    }


def works(state: State) -> bool:
    """Does a job of the evaluation run that ends by itself? Precursors do not, nor workers without a metric job."""
    return not running(state) <= ({"stage"} if state.scoring.outstanding else {"stage", "metric"})


def first_kept_out(states: Iterable[State], limited: Mapping[str, str]) -> tuple[State, str] | None:
    """The first evaluation in turn that waits for a limit, and the limit."""
    ready = in_turn(s for s in states if s.ending.phase == Phase.RUNNING)
    return next(((state, why) for state in ready if (why := waits_for(state, limited))), None)


def not_behind(demands: Sequence[Demand], first: tuple[State, str] | None) -> Sequence[Demand]:
    """Those of evaluations that go before the one that waits for a limit."""
    if first is None:
        return demands
    turn = turn_of(first[0])
    return [d for d in demands if d.turn < turn]


def given_up(states: Iterable[State], first: tuple[State, str] | None) -> Iterator[tuple[str, str, str]]:
    """(evaluation id, node, why) of places that hold jobs in vain: all prefetches, and idle nodes of those behind `first`."""
    if first is None:
        return
    found, limit = first
    why = f"a limit on jobs is reached, and {found.evaluation_id} goes first: {limit}"
    turn = turn_of(found)
    for state in states:
        idle = [p.name for p in state.nodes.prefetches.values() if p.status in ("staging", "ready")]
        if turn_of(state) > turn and state.ending.phase == Phase.RUNNING:
            idle += [
                node.name
                for node in state.nodes.by_name.values()
                if node.status in IN_USE
                and not (node.hosted or node.rung == "host" or state.running_lanes(node.name))
            ]
        yield from ((state.evaluation_id, name, why) for name in idle)
