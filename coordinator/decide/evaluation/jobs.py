"""Jobs, part one: a job from its intent to its release or cancellation. `job_ends` handles their ends.

Rule: a job is identified by the name we give it, unique per attempt. An intent is journalled before the job is submitted;
after a crash or a submission in doubt the job is looked up by name first. Called from: `step`, and the subjects that own
jobs.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.decide.evaluation.actions import Action, CancelJob, ReleasePrecursor, SubmitJob
from coordinator.decide.evaluation.events import AnyEvent, JobIntended, JobStarted, JobSubmitted
from coordinator.decide.evaluation.records import JobName
from coordinator.decide.evaluation.state import IllegalEventError, JobInfo, State, Trial
from coordinator.site.cluster import COORDINATOR_ENDED
from evaljobs.contract.names import LaneId

Due = Iterable[Action | AnyEvent]
"""Return value of a handler or a rule: actions, and events that the evaluation decided, which `step` journals."""

SERVED_STATES = frozenset(
    {"COMPLETED", "TIMEOUT"}
)  # end states of a precursor that held weights until its time limit
PREEMPTED = "PREEMPTED"  # the clusters' state of a job that lost its place to a higher priority
# end states that are not the job's fault
NO_FAULT_OF_A_JOB = frozenset({PREEMPTED, "NODE_FAIL", COORDINATOR_ENDED})


def known_job(state: State, name: str) -> JobInfo:
    """Return the job of this name. Raise IllegalEventError if it was never intended."""
    info = state.jobs.by_name.get(name)
    if info is None:
        raise IllegalEventError(f"no job {name} was ever intended")
    return info


def job_intended(state: State, event: JobIntended) -> None:
    """Record that the job exists, in the state if not yet on the cluster; its trials live, each on its lane."""
    name = JobName.parse(event.job.name)
    kind = (name.kind, name.detail)
    state.jobs.attempts[kind] = max(state.jobs.attempts.get(kind, 0), name.attempt + 1)
    info = JobInfo(
        job=event.job,
        entries=event.entries,
        lanes=event.lanes,
        trials=event.trials,
        precursor=event.precursor,
        changed_at=event.at,
    )
    info.members = dict.fromkeys(range(info.job.count), "pending")
    state.jobs.by_name[info.job.name] = state.jobs.live[info.job.name] = info
    _begin_trials(state, info)


def _begin_trials(state: State, info: JobInfo) -> None:
    """Start the trials of a job; they live from its intent, each on its lane."""
    hosted = info.job.purpose == "host"
    for number, (name, lane) in enumerate(zip(info.trials, info.lanes, strict=True)):
        trial = Trial(name=name, job=info.job.name, member=0 if hosted else number, lane=lane)
        state.trials.by_name[name] = state.trials.live[name] = state.trials.idle[name] = trial
        state.trials.on_lane[lane] = state.trials.on_lane.get(lane, 0) + 1
        state.nodes.by_name[LaneId.parse(lane).node].trials[name] = trial


def end_trial(state: State, name: str) -> Trial | None:
    """End a trial and free its lane. Return None if it had already ended."""
    trial = state.trials.live.pop(name, None)
    state.trials.idle.pop(name, None)
    if trial is not None:
        del state.nodes.by_name[LaneId.parse(trial.lane).node].trials[name]
    return trial


def cancel_trial(state: State, name: str) -> None:
    """The coordinator ends a trial; it keeps its lane until its end is seen."""
    trial = state.trials.by_name[name]
    trial.cancelled = True
    if name in state.trials.live:
        state.trials.idle[name] = trial


def trials_of(info: JobInfo, member: int) -> tuple[str, ...]:
    """Return the trials that a member of a job runs; the one member of a host runs all of them."""
    return info.trials if info.job.purpose == "host" else info.trials[member : member + 1]


def job_submitted(state: State, event: JobSubmitted) -> list[Action]:
    info = known_job(state, event.job)
    state.jobs.held.pop(event.job, None)
    if info.phase == "ended":
        return [CancelJob(job_id=event.job_id)]
    if info.phase == "submitted" and info.job_id != event.job_id:
        # a submission that timed out had succeeded after all: cancel the later duplicate
        return [CancelJob(job_id=event.job_id)]
    info.phase, info.job_id, info.changed_at = "submitted", event.job_id, event.at
    return end_jobs(state, [info], event.at) if info.released_at is not None else []


def job_started(state: State, event: JobStarted) -> list[Action]:
    member_runs(state, known_job(state, event.job), event.index, event.at)
    return []


def member_runs(state: State, info: JobInfo, member: int, now: float) -> None:
    """The cluster has started a member of a job."""
    if info.members.get(member) == "pending":
        info.members[member] = "running"
        info.changed_at = now
        for name in trials_of(info, member):
            trial = state.trials.by_name[name]
            trial.running = True
            if not trial.cancelled:
                state.trials.idle.pop(name, None)


def hold_job(state: State, info: JobInfo, why: str, now: float) -> None:
    """Hold a job that a limit on jobs keeps out, and submit it again after a pause."""
    info.phase = "intended"
    info.refusals = info.refusals.failed(now)
    state.jobs.held[info.job.name] = why


def held_job_over(state: State, now: float) -> list[Action]:
    """Submit held jobs whose pause is over."""
    return _again(state, [name for name in state.jobs.held if state.jobs.by_name[name].refusals.due(now)])


def _again(state: State, names: Iterable[str]) -> list[Action]:
    held = [name for name in names if state.jobs.held.pop(name, None) is not None]
    return [SubmitJob(job=state.jobs.by_name[name].job) for name in held]


def end_jobs(state: State, jobs: Iterable[JobInfo], now: float) -> list[Action]:
    """Cancel these jobs. A job whose submission is in doubt is cancelled once it is known to exist: on a drained node it
    would pend for ever. Members whose trials have left their outcomes exit by themselves and are not cancelled, since a
    cancelled job looks failed in the site's accounting. Whatever is left after `Grace.overdue` is cancelled then.
    """
    actions: list[Action] = []
    for info in jobs:
        info.released_at = now if info.released_at is None else info.released_at
        actions += _again(state, [info.job.name])  # the submission is answered with "nothing needs it"
        for trial in info.trials:
            cancel_trial(state, trial)
        if not info.job_id:
            continue
        left = [member for member in info.members if not has_all_outcomes(state, info, member)]
        if len(left) == len(info.members):
            actions.append(CancelJob(job_id=info.job_id))
        else:
            actions += [CancelJob(job_id=info.job_id, index=member) for member in left]
    return actions


def has_all_outcomes(state: State, info: JobInfo, member: int) -> bool:
    """Return whether all trials of this member have left their outcomes."""
    trials = trials_of(info, member)
    return bool(trials) and not any(trial in state.trials.live for trial in trials)


def release_job(state: State, info: JobInfo, now: float) -> list[Action]:
    """Release a precursor or a job of workers. Running members exit by themselves; pending ones are cancelled."""
    info.released_at = now if info.released_at is None else info.released_at
    actions = _again(state, [info.job.name])
    if info.job.purpose == "stage":
        actions.append(ReleasePrecursor(job=info.job.name))
    if ("staged", info.job.name) in state.seen:
        return actions  # it runs, whether or not a listing has shown it
    waiting = [member for member, phase in info.members.items() if phase == "pending"]
    if info.job_id and len(waiting) == len(info.members):
        actions.append(CancelJob(job_id=info.job_id))
    elif info.job_id:
        actions += [CancelJob(job_id=info.job_id, index=member) for member in waiting]
    return actions


def jobs_restarted(state: State, now: float) -> None:
    """Mark unanswered submissions as in doubt, and correct times if the clock was set back."""
    for name, info in state.jobs.live.items():
        if info.phase == "intended" and name not in state.jobs.held:
            info.phase, info.changed_at = "uncertain", 0.0
        info.changed_at = min(info.changed_at, now)
        info.released_at = info.released_at and min(info.released_at, now)
