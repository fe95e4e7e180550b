"""Jobs, second part: a job was not submitted, or a member of it ended; what that means for its subject.

Rule: what is said of a job that has ended already, or of a member that has, changes nothing. A trial without an outcome
was killed with its job. Called from: `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinator.cluster import COORDINATOR_ENDED, Purpose
from coordinator.evaluation import builds, conversion, fault_attribution, indexes, jobs, nodes, trials
from coordinator.evaluation.actions import Action, CancelJob, ReleaseClaims, SubmitJob
from coordinator.evaluation.events import JobEnded, JobNotSubmitted
from coordinator.evaluation.state import IllegalEventError, JobInfo, State, Trial

MAX_SUBMISSIONS = 8  # of one job that were in doubt and had not happened
NO_FAULT_OF_A_NODE = frozenset({"TIMEOUT", jobs.PREEMPTED})
"""Slurm's words for a job that its limit or another job's priority ended before its trials could leave outcomes."""
MAYBE_OF_ITS_SHARD = frozenset({"OUT_OF_MEMORY"})
"""Slurm's word for a job that took more memory than it asked for: its shard may be too much for any node."""

_OVER: dict[Purpose, Callable[[State, JobInfo, str], None]] = {
    "build": builds.job_over,
    "convert": conversion.job_over,
    "stage": nodes.job_over,
    "host": nodes.job_over,
}


def not_submitted(state: State, event: JobNotSubmitted) -> list[Action]:
    info = jobs.known(state, event.job)
    if info.phase == "ended":
        return []
    info.changed_at = event.at
    state.jobs.held.pop(event.job, None)
    prefetch = info.job.purpose == "stage" and info.job.node in state.nodes.prefetches
    if event.limited and info.released_at is None and not prefetch:
        jobs.hold(state, info, event.error, event.at)
        return []
    if event.maybe_done and not event.refused:
        info.phase = "uncertain"
        info.submissions += 1
        return []  # looked up by name first; `JobNotSubmitted(maybe_done=False)` follows if it is not there
    if prefetch:
        info.refused = (
            event.error
        )  # nothing hangs on it: the node's GPUs come later, and another attempt with them
    elif event.refused and info.released_at is None:
        info.refused = event.error
        _refused(state, info, event)
    elif info.released_at is None:
        info.phase = "intended"
        if info.submissions < MAX_SUBMISSIONS:
            return [SubmitJob(job=info.job)]
        why = f"{info.job.name} could not be submitted {info.submissions} times: {event.error}"
        state.ending.close(why)
    word = "REFUSED" if info.refused else "NOT_SUBMITTED"
    waits: list[Action] = [CancelJob(job_id=info.job_id)] if info.job_id else []
    return [*waits, *_end_members(state, info, list(info.members), word, event.at)]


def _refused(state: State, info: JobInfo, event: JobNotSubmitted) -> None:
    """What one node alone may be the reason for puts that node in back-off; anything else would be refused everywhere."""
    why = f"the cluster refused {info.job.name}: {event.error}"
    node = state.nodes.by_name.get(info.job.node or "")
    if event.of_node and node is not None:
        nodes.back_off(state, node, why)
    else:
        state.ending.close(why)


def ended(state: State, event: JobEnded) -> list[Action]:
    info = jobs.known(state, event.job)
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
        names = info.trials if info.job.purpose == "host" else info.trials[member : member + 1]
        dead = [trial for name in names if (trial := indexes.end_trial(state, name)) is not None]
        actions += [ReleaseClaims(trial=trial.name) for trial in dead]
        if word == jobs.PREEMPTED:
            actions += nodes.preempted(state, info, now)
        elif dead and _news(state, dead, word):
            actions += _died(state, info, dead, word, shard)
    if all(phase == "ended" for phase in info.members.values()) and info.live:
        info.phase = "ended"
        indexes.file_job(state, info)
        if info.job.purpose in _OVER:
            _OVER[info.job.purpose](state, info, word)
    return actions


def _news(state: State, dead: list[Trial], word: str) -> bool:
    """Does the death of these trials say anything of a node or a shard? Trials of a host died one death."""
    ours = word == COORDINATOR_ENDED or all(trial.cancelled for trial in dead)
    return not ours and trials.staging_stands(state, dead[0])


def _died(state: State, info: JobInfo, dead: list[Trial], word: str, shard: str | None) -> list[Action]:
    why = f"{dead[0].name} ended ({word}) without a word"
    if word in MAYBE_OF_ITS_SHARD and shard is not None:
        return fault_attribution.count_kill(state, info.job.node, shard, why, lane=dead[0].lane)
    blamed = None if word in NO_FAULT_OF_A_NODE else info.job.node
    if fault_attribution.trial_died(state, blamed, why) and len(dead) == 1:
        dead[0].counted = True
    return []
