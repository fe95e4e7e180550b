"""Events derived from a listing of jobs or a snapshot of a queue. Pure.

Rule: a failed look means nothing. A job is lost once it is missing from two successful listings and for a grace time; one in
an unknown state still exists (law 8). A job is identified by its name, unique per attempt. Its id is only used to cancel it,
since a restarted controller may reuse ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import median

from coordinator.decide.allocation import job_limits
from coordinator.decide.evaluation import jobs
from coordinator.decide.evaluation.ending import RELEASED_PURPOSES
from coordinator.decide.evaluation.events import (
    AnyEvent,
    BackOffOver,
    JobEnded,
    JobNotSubmitted,
    JobStarted,
    JobSubmitted,
    LimitReached,
    OutcomeSeen,
    TrialHung,
)
from coordinator.decide.evaluation.state import JobInfo, MetricState, Phase, State, Tries
from coordinator.site.cluster import COORDINATOR_ENDED, Job, JobState, slurm_limits
from coordinator.site.diagnosis.diagnose import Diagnosis
from evaljobs.contract.outcomes import Failed

FORGOTTEN_JOB_TRIES = Tries(limit=11, first=5.0, longest=600.0)
"""Losses of a metric job by RQ, over more than an hour, until it counts as failed."""
LIMITED_LOOKS = (
    30  # times `Grace.limited` that a limit keeps out all jobs of an evaluation before it requests less
)


@dataclass(slots=True, kw_only=True)
class Grace:
    """Seconds for which a job or its progress must be missing before that becomes an event."""

    lost: float = 30.0  # a submitted job missing from listings
    uncertain: float = 10.0  # a submission that may have succeeded
    hung: float = 900.0  # a running trial without progress
    limited: float = 20.0  # jobs that a limit keeps out, while only idle jobs of the evaluation run
    overdue: float = 60.0  # a cancelled or released job
    # an ended job whose outcome may still appear: on NFS, after the listing shows its end
    outcome: float = 0.0


@dataclass(slots=True)
class Sightings:
    """Observations so far. Kept in memory only: after a restart, counting starts over."""

    missing_since: dict[tuple[str, int], float] = field(default_factory=dict)
    missing_count: dict[tuple[str, int], int] = field(default_factory=dict)
    ended_since: dict[tuple[str, int], float] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)  # pending reason of a member
    limited_since: float | None = None  # unix seconds
    moved: dict[str, tuple[float, float]] = field(default_factory=dict)  # trial -> (its progress, since when)
    reported: dict[str, float] = field(default_factory=dict)  # hung trial -> time of the last event about it
    cancelled: dict[str, float] = field(default_factory=dict)  # overdue job -> time of the last cancellation
    gone: set[str] = field(default_factory=set)  # metric jobs missing from RQ at the last look
    forgotten: dict[str, Tries] = field(default_factory=dict)  # metric job -> times that RQ lost it


def job_events(
    state: State, listing: Iterable[JobState], seen: Sightings, grace: Grace, now: float
) -> tuple[list[AnyEvent], list[str]]:
    """Return the events of one successful listing, and the ids of duplicate jobs (one name submitted twice) to cancel."""
    by_name: dict[str, list[JobState]] = {}
    for job in listing:
        by_name.setdefault(job.name, []).append(job)
    events: list[AnyEvent] = []
    twins: list[str] = []
    for name, info in sorted(state.jobs.live.items()):
        members = by_name.get(name, [])
        events += _one_job(state, info, members, seen, grace=grace, now=now)
        own = info.job_id or (members[0].job_id if members else "")
        twins += sorted({m.job_id for m in members if m.job_id != own and m.phase != "ended"})
    return events, twins


def _one_job(
    state: State, info: JobInfo, members: Sequence[JobState], seen: Sightings, *, grace: Grace, now: float
) -> list[AnyEvent]:
    name = info.job.name
    if not members and info.phase in ("uncertain", "intended"):
        if (
            info.phase == "uncertain"
            and now - max(info.changed_at, _first_missing(seen, (name, -1), now)) > grace.uncertain
        ):
            seen.missing_since.pop((name, -1), None)
            return [JobNotSubmitted(at=now, job=name, error="no listing shows it")]
        return []
    events: list[AnyEvent] = []
    job_id = info.job_id
    if members and info.phase != "submitted":
        job_id = members[0].job_id
        events.append(JobSubmitted(at=now, job=name, job_id=job_id))
    by_index = {m.index: m for m in members if m.job_id == job_id}
    reasons = [m.reason for m in members if m.phase == "pending"]
    never = next((reason for reason in reasons if slurm_limits.never_starts(reason)), None)
    if never is not None:
        error = f"it would never start: {slurm_limits.limit_in_words(never)}"
        reason = "refused-on-node" if slurm_limits.of_a_node(never) else "refused"
        return [*events, JobNotSubmitted(at=now, job=name, error=error, reason=reason)]
    for index, phase in info.members.items():
        if phase == "ended":
            continue
        leaves_none = info.released_at is not None and info.job.purpose in RELEASED_PURPOSES
        at_once = leaves_none or jobs.has_all_outcomes(state, info, index)
        own = replace(grace, outcome=0.0) if at_once else grace
        events += _one_member(name, index, phase, by_index.get(index), seen=seen, grace=own, now=now)
    return events


def _one_member(
    name: str, index: int, phase: str, found: JobState | None, *, seen: Sightings, grace: Grace, now: float
) -> list[AnyEvent]:
    key = (name, index)
    if found is None:
        since = _first_missing(seen, key, now)
        seen.missing_count[key] = seen.missing_count.get(key, 0) + 1
        if seen.missing_count[key] >= 2 and now - since >= grace.lost:
            return [JobEnded(at=now, job=name, index=index, state="VANISHED", lost=True)]
        return []
    seen.missing_since.pop(key, None)
    seen.missing_count.pop(key, None)
    if found.phase == "pending" and found.reason:
        seen.reasons[key] = found.reason
    if found.phase == "ended":
        if now - seen.ended_since.setdefault(key, now) < grace.outcome:
            return []
        return [JobEnded(at=now, job=name, index=index, state=found.state)]
    if found.phase == "running" and phase == "pending":
        return [
            JobStarted(
                at=now,
                job=name,
                index=index,
                node=found.node,
                started_at=found.started_at,
                submitted_at=found.submitted_at,
                waited_for=seen.reasons.pop(key, ""),
            )
        ]
    return []


def started_trials(state: State, known: Iterable[str], seen: Sightings, now: float) -> list[AnyEvent]:
    """Return JobStarted for members that no listing has shown as running, though the work queue knows their trials (`known`)."""
    there = [state.trials.live[name] for name in known if name in state.trials.live]
    return [
        JobStarted(at=now, job=t.job, index=t.member, waited_for=seen.reasons.pop((t.job, t.member), ""))
        for t in there
        if state.jobs.by_name[t.job].members.get(t.member) == "pending"
    ]


def _first_missing(seen: Sightings, key: tuple[str, int], now: float) -> float:
    return seen.missing_since.setdefault(key, now)


def with_causes(
    state: State,
    events: Iterable[AnyEvent],
    listing: Iterable[JobState],
    claims: Mapping[str, str],
    *,
    began: Callable[[Job, int], bool],
    cause: Callable[[Job, int, str], Diagnosis],
    enough: Callable[[], bool] = lambda: False,
) -> list[AnyEvent]:
    """Return `events` with causes: why a job died; for a trial also its shard, for others the node that could not launch
    them.

    `claims`: shard -> trial; `began`: whether the member has a log; `cause`: from its log and end state. `enough`: after the
    first log, leave further ends to the next listing, which reports them again.
    """
    places = {(row.name, row.index): row.node for row in listing}
    in_hand = {trial: shard for shard, trial in claims.items()}
    found: list[AnyEvent] = []
    read = False
    for event in events:
        if isinstance(event, JobEnded):
            info = state.jobs.by_name[event.job]
            died = _died(state, info, event)
            if died and read and enough():
                continue
            read |= died
            shard = in_hand.get(info.trials[event.index]) if info.job.purpose == "trial" else None
            node = places.get((event.job, event.index))
            wanted = info.job.node is None and info.released_at is None and event.state != "COMPLETED"
            failed = info.job.purpose == "metric" and event.state == "FAILED"  # no Redis there
            unlaunched = node if node and wanted and (failed or not began(info.job, event.index)) else ""
            why = cause(info.job, event.index, event.state) if died else None
            more = {"shard": shard, "unlaunched": unlaunched, "cause": why}
            found.append(event.model_copy(update=more))
        else:
            found.append(event)
    return found


def _died(state: State, info: JobInfo, event: JobEnded) -> bool:
    """Return whether a job ended without an outcome, neither ended by the coordinator nor as planned."""
    if event.state in ("COMPLETED", COORDINATOR_ENDED) or info.released_at is not None:
        return False
    if info.job.purpose != "trial":
        return info.job.purpose != "metric" and ("failed", info.job.name) not in state.seen
    trial = state.trials.live.get(info.trials[event.index])
    return trial is not None and not trial.cancelled


def limit_events(
    state: State,
    limited: Mapping[str, str],
    seen: Sightings,
    grace: Grace,
    now: float,
    *,
    others: bool = False,
) -> list[AnyEvent]:
    """Return at most one event: work waits for a limit while this evaluation only runs idle jobs, or none for a long time.

    `limited`: `job_limits.kept_out`. `others`: other evaluations of this daemon run jobs that will end. The evaluation waits
    for those, and only gives up nodes beyond its first.
    """
    why, runs = job_limits.waits_for(state, limited), job_limits.running_purposes(state)
    waits_in_vain = len(state.held_nodes) > 1 if others else True
    if not why or job_limits.has_working_job(state) or not waits_in_vain:
        seen.limited_since = None
        return []
    seen.limited_since = seen.limited_since or now
    if now - seen.limited_since < (grace.limited if runs else LIMITED_LOOKS * grace.limited):
        return []
    seen.limited_since = None
    return [LimitReached(at=now, why=why, others=others)]


def overdue_jobs(state: State, seen: Sightings, grace: Grace, now: float) -> list[str]:
    """Return the ids of jobs that should have ended but exist: released precursors, and all jobs after the results.

    Each is repeated every `grace.overdue` seconds while it exists.
    """
    ids = []
    for name, info in sorted(state.jobs.live.items()):
        since = info.released_at
        if since is None and state.ending.phase >= Phase.LEAVING:
            since = max(info.changed_at, seen.missing_since.setdefault((name, -2), now))
        if since is None or not info.job_id:
            continue
        # repeated, since any cancellation may fail
        if now - max(since, seen.cancelled.get(name, since)) > grace.overdue:
            seen.cancelled[name] = now
            ids.append(info.job_id)
    return ids


def hung_trials(
    state: State,
    progress: Mapping[str, tuple[float, str | None]] | None,
    seen: Sightings,
    grace: Grace,
    now: float,
) -> list[AnyEvent]:
    """Return events for running trials without progress, repeated after `grace.overdue`.

    `progress`: trial -> (time stamp of its last progress, its shard); None: Redis is unreachable, which says nothing about
    trials. Measured is how long a stamp has not changed, by the coordinator's clock.
    """
    if progress is None:
        seen.moved.clear()
        return []
    events: list[AnyEvent] = []
    for trial in state.running_trials:
        again = trial in seen.reported
        if now - seen.reported.get(trial, now - 2 * grace.overdue) < grace.overdue:
            continue
        known = seen.moved.get(trial, (0.0, now))
        stamp, shard = progress.get(trial, (known[0], None))
        since = known[1] if stamp == known[0] else now
        seen.moved[trial] = (stamp, since)
        silent = now - since
        if silent > grace.hung:
            seen.reported[trial] = now
            # a repeated event cancels the trial again; it names no shard, since the shard ended one trial, not two
            events.append(TrialHung(at=now, trial=trial, shard=None if again else shard, seconds=silent))
    return events


def waits_over(state: State, now: float) -> list[AnyEvent]:
    """Return at most one event, for back-offs and pauses that are over. The rules act on it, so the next look finds none."""
    over = tuple(
        n.name
        for n in state.nodes.by_name.values()
        if state.can_work and n.status == "back-off" and now >= (n.back_off_until or 0)
    )
    return [BackOffOver(at=now, nodes=over)] if over or state.wakes(now) else []


def stray_shards(state: State, unclaimed: Iterable[str], claims: Mapping[str, str]) -> tuple[str, ...]:
    """Return shards to do that are neither queued nor claimed by a living trial. `claims`: shard -> trial."""
    queued = set(unclaimed)
    return tuple(
        name
        for name, shard in state.shards.by_name.items()
        if shard.is_to_do and name not in queued and claims.get(name) not in state.trials.live
    )


def dumped_shards(state: State, unclaimed: Iterable[str]) -> tuple[str, ...]:
    """Return queued shards that must not run: their records are on disk, or they are not in the plan."""
    known = state.shards.by_name
    return tuple(name for name in unclaimed if name not in known or known[name].frame is not None)


def metric_events(
    state: State, gone: Mapping[str, str], seen: Sightings, now: float
) -> tuple[list[AnyEvent], list[MetricState]]:
    """Return events for metric jobs that failed, and the jobs to give to RQ again. Both concern jobs without an outcome that
    RQ neither queues nor runs, at this look and the last, some time after they were enqueued (at first five seconds, doubled
    with each loss).

    `gone`: name -> why RQ gave it up, "" if it lost the job, with or without its worker.
    """
    twice = [name for name in sorted(gone) if name in seen.gone and name in state.scoring.outstanding]
    seen.gone = set(gone)
    died: list[AnyEvent] = []
    again = []
    for metric in (state.scoring.metrics[name] for name in twice):
        tries = seen.forgotten.get(metric.name, FORGOTTEN_JOB_TRIES)
        if now <= max(tries.due_at, metric.enqueued_at + tries.first):
            continue
        tries = seen.forgotten[metric.name] = tries.failed(now)
        if not gone[metric.name] and not tries.given_up:
            again.append(metric)
            continue
        error = f"{metric.name}: {gone[metric.name] or f'the queue forgot it {tries.failures} times'}"
        outcome = Failed(name=metric.name, job=metric.kind, blame="retry", error=error, entry=metric.entry)
        died.append(OutcomeSeen(at=now, outcome=outcome))
    return died, again


# --- stragglers --------------------------------------------------------------------------------------------------------

SIGMAS = 3.0
LEAST_SIGMA = 0.1  # spread of log seconds of one set's shards on one GPU (priors.estimate.SIGMA_RUN)
LEAST_SHARDS = 2  # shards needed to judge a trial: a single one may be an outlier
LEAST_SECONDS = 10.0  # seconds of shards needed to judge a trial: less is noise
LEAST_OTHERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Pace of one trial: seconds its shards took, seconds predicted, number of shards."""

    took: float = 0.0
    predicted: float = 0.0
    shards: int = 0

    def and_done(self, took: float, predicted: float) -> Pace:
        """Return the pace with one more shard."""
        return Pace(took=self.took + took, predicted=self.predicted + predicted, shards=self.shards + 1)

    def and_in_hand(self, elapsed: float, predicted: float, done: int, batches: int) -> Pace:
        """Return the pace with the running shard, if late: `elapsed` seconds for `done` batches and a part."""
        due = predicted * min(1.0, (done + 1) / batches) if batches else predicted
        return self.and_done(elapsed, due) if elapsed > due else self

    @property
    def tells(self) -> bool:
        """Whether there is enough to judge by."""
        return self.shards >= LEAST_SHARDS and self.took >= LEAST_SECONDS and self.predicted > 0

    @property
    def log(self) -> float:
        return log(self.took / self.predicted)


def find_stragglers(paces: Mapping[str, Pace], sigma: float) -> dict[str, float]:
    """Return straggler -> slowdown: trials three sigma slower than the prior while the others are not.

    `sigma`: the prior's, of log seconds. A deviation common to all trials is the prior's error, so a trial is compared with
    the median of the others, in units of the prior's spread or theirs, whichever is wider. A second trial copies the shard
    that delays the end (`evaljobs.queue.lua`, `copy`).
    """
    logs = {trial: pace.log for trial, pace in paces.items() if pace.tells}
    found = {}
    for trial, own in logs.items():
        others = [other for name, other in logs.items() if name != trial]
        if len(others) < LEAST_OTHERS:
            continue
        middle = median(others)
        # sigma from the median deviation: another straggler hardly widens it
        theirs = 1.4826 * median(abs(other - middle) for other in others)
        if own - middle > SIGMAS * max(sigma, theirs, LEAST_SIGMA):
            found[trial] = exp(own - middle)
    return found
