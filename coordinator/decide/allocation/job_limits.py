"""What to give up if a limit on this user's jobs keeps jobs of the daemon out. Pure. Called by the loop and `detect`.

Rule: the first evaluation in turn whose jobs wait for a limit takes precedence. Evaluations behind it get no further node and
give up those where they run nothing; nothing is prefetched, and existing prefetches are given up. What an evaluation gives up
for itself is decided in `coordinator.decide.evaluation.nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from coordinator.decide.allocation.allocate import Demand
from coordinator.decide.allocation.demand import in_turn, turn_of
from coordinator.decide.evaluation.state import IN_USE, JobInfo, State
from coordinator.site.cluster import JobState, slurm_limits

WORK_PURPOSES = ("build", "convert", "trial", "host")  # purposes of jobs that an evaluation cannot do without


def kept_out(listing: Iterable[JobState]) -> dict[str, str]:
    """Return job -> the limit on all of this user's jobs that keeps it out."""
    pending = (row for row in listing if row.phase == "pending")
    return {row.name: row.reason for row in pending if slurm_limits.of_all_jobs(row.reason)}


def waits_for(state: State, limited: Mapping[str, str]) -> str:
    """Return the limit that keeps out a job which the evaluation needs to continue; "" if none does. `limited`: `kept_out`."""
    held = state.jobs.held
    for name, info in state.jobs.live.items():
        why = held.get(name) or limited.get(name, "")
        if why and info.released_at is None and _needed(state, info):
            return why
    return ""


def _needed(state: State, info: JobInfo) -> bool:
    """Return whether the evaluation waits for this job: the first of its precursors and workers, and any other job."""
    purpose = info.job.purpose
    if purpose == "stage":
        return not any(node.lanes and node.precursor for node in state.nodes.by_name.values())
    if purpose == "metric":
        running = any("running" in i.members.values() for i in state.scoring.workers.values())
        return bool(state.scoring.outstanding) and not running
    return purpose in WORK_PURPOSES


def running_purposes(state: State) -> set[str]:
    """Return the purposes of the evaluation's jobs that run, or are about to end."""
    return {
        info.job.purpose
        for info in state.jobs.live.values()
        if "running" in info.members.values() or (info.phase == "submitted" and info.released_at)
    }


def has_working_job(state: State) -> bool:
    """Return whether a job runs that ends by itself. Precursors do not, nor do workers without a metric job."""
    return not running_purposes(state) <= ({"stage"} if state.scoring.outstanding else {"stage", "metric"})


def first_kept_out(states: Iterable[State], limited: Mapping[str, str]) -> tuple[State, str] | None:
    """Return the first evaluation in turn that waits for a limit, and the limit."""
    ready = in_turn(s for s in states if s.may_use_nodes)
    return next(((state, why) for state in ready if (why := waits_for(state, limited))), None)


def not_behind(demands: Sequence[Demand], first: tuple[State, str] | None) -> Sequence[Demand]:
    """Return demands of evaluations that precede the one waiting for a limit."""
    if first is None:
        return demands
    turn = turn_of(first[0])
    return [d for d in demands if d.turn < turn]


def given_up_nodes(
    states: Iterable[State], first: tuple[State, str] | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (evaluation id, node, why) of places to give up: all prefetches, and idle nodes of evaluations behind `first`."""
    if first is None:
        return
    found, limit = first
    why = f"a limit on jobs is reached, and {found.evaluation_id} goes first: {limit}"
    turn = turn_of(found)
    for state in states:
        behind = turn_of(state) > turn and state.may_use_nodes
        for node in state.nodes.by_name.values():
            hosts = node.hosted or node.rung == "host"
            idle = behind and not hosts and not node.running_lanes
            if node.status in IN_USE and (not node.lanes or idle):
                yield state.evaluation_id, node.name, why
