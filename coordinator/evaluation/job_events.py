"""What is learnt of a job of ours: submitted or not, started, ended, hung. Pure.

Rule: a job is known by our name for it; what is said of one that has ended already, or of a member that has, changes
nothing. A job without an account of its own was killed, and its trials with it.
It does not know: who asked the cluster, or when.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.cluster import COORDINATOR_ENDED
from coordinator.evaluation import blame, facts, indexes
from coordinator.evaluation.messages import (
    Action,
    CancelJob,
    JobEnded,
    JobNotSubmitted,
    JobStarted,
    JobSubmitted,
    ReleaseClaims,
    SubmitJob,
    TrialHung,
)
from coordinator.evaluation.state import IllegalEventError, JobInfo, State

NO_FAULT_OF_A_NODE = frozenset({"TIMEOUT", "PREEMPTED"})
"""Slurm's words for a job that its own limit or somebody's priority ended, should it not have told of itself in time."""


MAYBE_OF_ITS_SHARD = frozenset({"OUT_OF_MEMORY"})
"""Slurm's word for a job that took more memory than it asked for: what it was at may have been too much for any node."""


def _known_job(state: State, name: str) -> JobInfo:
    info = state.jobs.get(name)
    if info is None:
        raise IllegalEventError(f"no job {name} was ever intended")
    return info


def submitted(state: State, event: JobSubmitted) -> list[Action]:
    info = _known_job(state, event.job)
    state.held.pop(event.job, None)
    if info.phase == "ended":
        return [CancelJob(job_id=event.job_id)]
    if info.phase == "submitted" and info.job_id != event.job_id:
        # a submission that timed out had happened after all: the later twin goes
        return [CancelJob(job_id=event.job_id)]
    info.phase, info.job_id, info.changed_at = "submitted", event.job_id, event.at
    indexes.file_job(state, info)
    return facts.end_jobs(state, [info], event.at) if info.released_at is not None else []


def not_submitted(state: State, event: JobNotSubmitted) -> list[Action]:
    info = _known_job(state, event.job)
    if info.phase == "ended":
        return []
    info.changed_at = event.at
    state.held.pop(event.job, None)
    if event.limited and info.released_at is None and not facts.staged_ahead(state, info):
        info.phase = "intended"
        facts.hold_back(state, info, event.error, event.at)
        return []
    if event.maybe_done and not event.refused:
        info.phase = "uncertain"
        key = f"submit/{info.job.name}"
        state.counters[key] = state.counters.get(key, 0) + 1
        return []  # looked up by name first; `JobNotSubmitted(maybe_done=False)` follows if it is not there
    if facts.staged_ahead(state, info):
        # nothing hangs on it: the node's GPUs come later, and another try with them
        info.refused = event.error
    elif event.refused and info.released_at is None:
        info.refused = event.error
        _refused(state, info, event)
    elif info.released_at is None:
        info.phase, tries = "intended", state.counters.get(f"submit/{info.job.name}", 0)
        if tries < facts.MAX_SUBMISSIONS:
            return [SubmitJob(job=info.job, specs=info.specs)]
        state.fatal = state.fatal or f"{info.job.name} could not be submitted {tries} times: {event.error}"
    word = "REFUSED" if info.refused else "NOT_SUBMITTED"
    waits = [CancelJob(job_id=info.job_id)] if info.job_id else []
    return [*waits, *_end_members(state, info, list(info.members), word, event.at)]


def _refused(state: State, info: JobInfo, event: JobNotSubmitted) -> None:
    """What one node alone may be the reason for sets that node aside; anything else would be refused everywhere."""
    why = f"the cluster refused {info.job.name}: {event.error}"
    node = state.nodes.get(info.job.node or "")
    if event.of_node and node is not None:
        facts.set_aside(state, node, why)
    else:
        state.fatal = state.fatal or why


def started(state: State, event: JobStarted) -> list[Action]:
    info = _known_job(state, event.job)
    if info.members.get(event.index) == "pending":
        info.members[event.index] = "running"
        info.changed_at = event.at
        indexes.file_job(state, info)
    return []


def ended(state: State, event: JobEnded) -> list[Action]:
    info = _known_job(state, event.job)
    if event.index not in info.members:
        raise IllegalEventError(f"{event.job} has no member {event.index}")
    if info.members[event.index] == "ended":
        return []
    info.changed_at = event.at
    return _end_members(state, info, [event.index], event.state, event.at, shard=event.shard)


def _end_members(
    state: State, info: JobInfo, members: Iterable[int], word: str, now: float, *, shard: str | None = None
) -> list[Action]:
    """Members are over: their trials die with them, and the whole job once all are."""
    actions: list[Action] = []
    for member in members:
        info.members[member] = "ended"
        hosted = info.job.purpose == "host"
        trials = info.trials if hosted else info.trials[member : member + 1]
        # no account of their own: they were killed
        dead = [trial for trial in trials if indexes.end_trial(state, trial) is not None]
        actions += [ReleaseClaims(trial=trial) for trial in dead]
        if word == facts.TAKEN:
            actions += facts.gpus_taken(state, info, now)
        elif (
            dead
            and word != COORDINATOR_ENDED
            and not all(state.counters.get(f"cancel/{trial}") for trial in dead)
            and facts.staging_stands(state, info)
        ):
            # those of a host died one death; those that we cancelled died of us
            actions += _died(state, info, dead, word, shard)
    if all(phase == "ended" for phase in info.members.values()) and info.live:
        info.phase = "ended"
        indexes.file_job(state, info)
        facts.job_over(state, info, word)
    return actions


def _died(state: State, info: JobInfo, dead: Sequence[str], word: str, shard: str | None) -> list[Action]:
    why = f"{dead[0]} ended ({word}) without a word"
    if word in MAYBE_OF_ITS_SHARD and shard is not None:
        return blame.count_kill(state, info.job.node, shard, why, lane=state.trial_lane[dead[0]])
    blamed = None if word in NO_FAULT_OF_A_NODE else info.job.node
    if facts.count_trial_death(state, blamed, why) and len(dead) == 1:
        state.counters[blame.held_against_its_node(dead[0])] = 1
    return []


def hung(state: State, event: TrialHung) -> list[Action]:
    where = state.live_trials.get(event.trial)
    if where is None:
        return []
    job, member = where
    info = state.jobs[job]
    actions: list[Action] = []
    if event.shard is not None:  # its node has the trial's end counted, should it come without a word
        why = f"{event.trial} made no progress for {event.seconds:.0f} s"
        actions = blame.count_kill(state, info.job.node, event.shard, why)
    state.warnings.append(f"{event.trial} made no progress for {event.seconds:.0f} s and was ended")
    if info.job_id:
        actions.append(CancelJob(job_id=info.job_id, index=member if info.job.count > 1 else None))
    return actions
