"""Builds the `Summary` of an evaluation from its state: its stage, what it waits for, what it runs, the time left.

Rule: derived from the state, the cluster's listing of its jobs, and its work queue; `summary_now` adds what files say. Called
by `coordinator.runtime.runner`, and `find_by_journal` for an evaluation without a valid one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.decide.evaluation.state import EntryState, JobInfo, Phase, State
from coordinator.results.report.scores import ScoreValue, first_of_each, groups_of, scores_of, top_scores
from coordinator.runtime.journal import OtherFormatError, read_events, replayed_state
from coordinator.runtime.summary import (
    MAX_WARNINGS,
    NO_SLOT,
    PAUSED,
    Lane,
    Node,
    Summary,
    Task,
    TimedNote,
    failed_jobs,
    fields_of_record,
    read_json,
    summary_of_record,
    with_document,
)
from coordinator.site.cluster import JobState
from coordinator.site.cluster.slurm_limits import limit_in_words
from evaljobs.contract.archived_files import archive_of
from evaljobs.contract.names import ShardId
from evaljobs.contract.paths import EvaluationPaths

if TYPE_CHECKING:  # `submit` loads no Redis client
    from evaljobs.queue.work_queue import Progress, QueueSnapshot

WAITS_SECONDS = 15.0  # a job pending for less is only starting
LEAST_SECONDS = 1.0  # prediction while a shard is to do
MOST_LANES = 64  # listed individually; beyond it, trials are counted per node for MOST_NODES nodes
MOST_NODES = 16
MOST_KINDS = 4  # latest scored tasks with all their values in a summary
LATEST_TASKS = 12  # of each
SCORES_SHOWN = 4  # of each
LOADING = {"import", "load"}  # phases of a trial before its model can infer
PENDING = "pending"
IDLE_PHASE = "no shard"
PHASES = {"import": "importing", "load": "loading", "infer": "inferring", "wait": "waits for requests"}
OPEN_ENTRY_WORDS = {
    "scoring": "scoring",
    "built": "to infer",
    "building": "building requests",
    "unbuilt": "to build",
}
JOBS = {
    "build": "request-set job",
    "convert": "conversion job",
    "stage": "staging job",
    "trial": "trial",
    "host": "trial host",
    "metric": "metric-worker job",
}
OTHER_JOBS = "others"  # label of further kinds of open metric jobs
Values = Callable[[EntryState], Sequence[ScoreValue]]  # of a scored task; () if its file cannot be read


def summary_of(
    state: State,
    now: float,
    snapshot: QueueSnapshot | None = None,
    listed: Sequence[JobState] = (),
    scores: Values = lambda _: (),
) -> Summary:
    """Return the summary of a state. `snapshot`: its work queue; `listed`: the cluster's jobs; `now`: unix seconds."""
    shards = state.shards.by_name
    open_metrics = [state.scoring.metrics[name] for name in sorted(state.scoring.outstanding)]
    kinds = Counter(f"{m.kind} {m.task or state.entries[m.entry].name}" for m in open_metrics).most_common()
    waits_until = None if state.ended_at is not None else state.waits_until
    stage = stage_of(state, now, snapshot)
    return Summary(
        **fields_of_record(state.record),
        written_at=now,
        converted_digest=state.converted_digest,
        ended_at=state.ended_at,
        phase=state.ending.phase.name.lower(),
        stage=stage,
        cancelled=state.ending.cancelled,
        paused_at=state.nodes.paused_at if state.ending.phase == Phase.RUNNING else None,
        paused=state.nodes.paused,
        scored=sum(e.status == "scored" for e in state.entries),
        tasks=tuple(_tasks(state, scores)),
        shards=len(shards),
        shards_done=done_shards(state),
        # those of a screen that are not needed were withdrawn
        shards_quarantined=0
        if state.record.screening is not None
        else sum(shard.quarantined for shard in shards.values()),
        trials=len(state.trials.live),
        gpus=len(state.running_trials) * state.record.options.trial.gpus_per_trial,
        **_lanes(state, snapshot),
        nodes=tuple(_nodes(state)),
        nodes_by_status=Counter(n.status for n in state.nodes.by_name.values() if n.lanes),
        jobs=Counter(info.job.purpose for info in state.jobs.live.values()),
        metric_jobs=len(state.scoring.metrics),
        metric_jobs_open={
            **dict(kinds[:MOST_KINDS]),
            **({OTHER_JOBS: sum(n for _, n in kinds[MOST_KINDS:])} if len(kinds) > MOST_KINDS else {}),
        },
        done_at=None if (left := seconds_left(state, now)) is None else now + left,
        waits_until=waits_until,
        waits=tuple(_waits(state, now, listed, stage)),
        held=tuple(
            TimedNote(what=name, at=state.jobs.by_name[name].refusals.due_at, why=why)
            for name, why in sorted(state.jobs.held.items())
        ),
        stragglers={
            trial: f"takes {times:.1f} times as long as the others{'' if trial in state.trials.live else ' (it has ended)'}"
            for trial, times in state.trials.stragglers.items()
        },
        warnings=tuple(dict.fromkeys(state.warnings))[-MAX_WARNINGS:],
    )


def summary_now(
    state: State,
    paths: EvaluationPaths,
    now: float,
    snapshot: QueueSnapshot | None = None,
    listed: Sequence[JobState] = (),
    *,
    failed: Mapping[str, str] | None = None,
    read: Callable[[str, int], Sequence[ScoreValue]] | None = None,
) -> Summary:
    """Return `summary_of` with what its files say. `failed`: job or trial -> its error; None: read here. `read`: `values_in`."""
    made = summary_of(state, now, snapshot, listed, partial(_values, read or values_in))
    if state.ended_at is None:
        failed = failed_jobs(paths) if failed is None else failed
        return made.model_copy(update={"failed_jobs": dict(failed)})
    return with_document(made, paths).model_copy(update={"journal_bytes": paths.journal.stat().st_size})


def _values(read: Callable[[str, int], Sequence[ScoreValue]], entry: EntryState) -> Sequence[ScoreValue]:
    file = Path(entry.result_file)
    with suppress(OSError):  # a retry continues with scores that were archived before
        place = file if file.exists() else archive_of(file.parent.parent)
        return read(entry.result_file, place.stat().st_mtime_ns)
    return ()


def values_in(file: str, _written_at: int) -> Sequence[ScoreValue]:
    """Return the values in a score file."""
    results = read_json(Path(file))
    return top_scores(scores_of(results), groups_of(results))


def _tasks(state: State, scores: Values) -> Iterator[Task]:
    latest = [e.index for e in state.entries if e.status == "scored"][-LATEST_TASKS:]
    for entry in state.entries:
        found = scores(entry) if entry.status == "scored" else ()
        shown = tuple(found[:SCORES_SHOWN]) if entry.index in latest else first_of_each(found)
        yield Task(name=entry.name, state=_task_state(state, entry), error=entry.error, scores=shown)


def _task_state(state: State, entry: EntryState) -> str:
    """Return a task's state. Its programs run or are judged once all its responses are written."""
    leaves = [state.shards.leaves[name] for name in entry.leaves.values()]
    if entry.status == "built" and leaves and all(leaf.todo == 0 for leaf in leaves):
        return "executing"
    return OPEN_ENTRY_WORDS.get(entry.status, entry.status)


def _lanes(state: State, snapshot: QueueSnapshot | None) -> dict[str, Any]:
    """Return what each living trial does; if they are many, counts for the first nodes."""
    trials = {} if snapshot is None else snapshot.trials
    names = {trial.lane: name for name, trial in state.trials.live.items()}
    lanes = [_lane(state, lane, names[lane], trials.get(names[lane])) for lane in sorted(names, key=_natural)]
    if len(lanes) <= MOST_LANES:
        return {"lanes": tuple(lanes)}
    nodes: dict[str, Counter[str]] = {}
    for lane in lanes:
        nodes.setdefault(lane.lane.rpartition("/")[0], Counter())[lane.doing] += 1
    return {"lanes_by_node": dict(list(nodes.items())[:MOST_NODES])}


def _lane(state: State, lane: str, trial: str, progress: Progress | None) -> Lane:
    if progress is None:
        return Lane(lane=lane, doing="starting" if state.trials.live[trial].running else PENDING)
    doing = PHASES.get(progress.phase, progress.phase or "starting")
    if not progress.shard:
        return Lane(lane=lane, doing=IDLE_PHASE if progress.phase == "infer" else doing)
    batch = f"{progress.batches_done} of {progress.batches}" if progress.batches else ""
    return Lane(lane=lane, doing=doing, task=ShardId.parse(progress.shard).task, batch=batch)


def _natural(lane: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts n2 before n10."""
    parts = "".join(c if c.isdigit() else f"\0{c}\0" for c in lane).replace("\0\0", "").split("\0")
    return [(p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts if p]


def _nodes(state: State) -> Iterator[Node]:
    for node in state.nodes.by_name.values():
        if not node.lanes and node.status == "withdrawn":
            continue  # nothing of the prefetch is left
        yield Node(
            name=node.name,
            status=node.status,
            gpus=node.lanes * state.record.options.trial.gpus_per_trial if node.in_use else 0,
            trials=len(node.busy_lanes),
            why=node.why if node.lanes else "before its GPUs are free",
            until=node.back_off_until,
            times=node.back_offs,
        )


def stage_of(state: State, now: float, snapshot: QueueSnapshot | None = None) -> str:
    """Return the furthest stage in progress in one or two words; "waits" if none of its jobs runs or is starting.

    `snapshot`: its work queue, in which running trials report whether they load or infer; None: not read.
    """
    if state.ending.phase >= Phase.LEAVING:
        return "clearing" if state.ended_at is None else "cancelled" if state.ending.cancelled else "ended"
    if state.ending.cancelled or state.ending.reason:
        return "ending"
    if not state.shards.todo and not state.plans_later:
        return "scoring"
    if state.nodes.paused_at is not None:
        return PAUSED
    stage, jobs = _under_way(state)
    if stage == "inference":
        return _trials_stage(state, snapshot)
    pending = [is_pending(info, now) for info in jobs]
    return "waits" if pending and all(pending) else stage


def _under_way(state: State) -> tuple[str, list[JobInfo]]:
    """Return the stage before the last response, and the jobs whose start it needs."""
    unbuilt = any(e.status in ("unbuilt", "building") for e in state.entries)
    early = unbuilt and not state.shards.leaves  # trials load meanwhile
    if state.trials.live and (state.running_trials or done_shards(state)) and not early:
        return "inference", []
    if unbuilt:
        return "building requests", state.live_jobs("build")
    if state.trials.live:
        hosts = {t.job: state.jobs.by_name[t.job] for t in state.trials.live.values()}
        return "starting trials", list(hosts.values())
    if any(n.in_use for n in state.nodes.by_name.values()):
        return "staging", state.live_jobs("stage")
    return "waits", []


def _trials_stage(state: State, snapshot: QueueSnapshot | None) -> str:
    """Return what the running trials do: "inference" if one infers, or if some shards are done and no trial loads."""
    trials = {} if snapshot is None else snapshot.trials
    phases = {trials[name].phase for name in state.running_trials if name in trials}
    if "infer" not in phases and phases & LOADING:
        return "loading"
    return "inference" if "infer" in phases or done_shards(state) else "starting trials"


def done_shards(state: State) -> int:
    return len(state.shards.by_name) - state.shards.todo - state.shards.undecided


def is_pending(info: JobInfo, now: float) -> bool:
    """Return whether the job was submitted a while ago and the cluster has started none of its members."""
    return has_pending(info, now) and "running" not in info.members.values()


def has_pending(info: JobInfo, now: float) -> bool:
    """Return whether the job was submitted a while ago and the cluster has not started all of its members."""
    return (
        info.phase == "submitted"
        and now - info.changed_at >= WAITS_SECONDS
        and "pending" in info.members.values()
    )


def _waits(state: State, now: float, listed: Sequence[JobState], stage: str) -> Iterator[TimedNote]:
    """Yield what it waits for: each kind of pending job and each reason, or a free slot."""
    if state.ended_at is not None:
        return
    found = list(_pending_jobs(state, now, listed))
    yield from found
    if not found and stage == "waits" and state.waits_until is None and not state.jobs.held:
        yield TimedNote(what=NO_SLOT)


def _pending_jobs(state: State, now: float, listed: Sequence[JobState]) -> Iterator[TimedNote]:
    reasons = {(job.name, job.index): job.reason for job in listed if job.phase == "pending"}
    found: Counter[tuple[str, str]] = Counter()
    since: dict[tuple[str, str], float] = {}
    for name in sorted(state.jobs.live):
        info = state.jobs.by_name[name]
        if not has_pending(info, now):
            continue
        for member in (m for m, phase in info.members.items() if phase == "pending"):
            if listed and (name, member) not in reasons:
                continue  # it has started since the journal was written
            what = (
                JOBS.get(info.job.purpose, info.job.purpose),
                limit_in_words(reasons.get((name, member), "")),
            )
            found[what] += 1
            since[what] = min(since.get(what, now), info.changed_at)
    for (job, why), count in found.items():
        said = f"{count} {job}s are pending" if count > 1 else f"a {job} is pending"
        yield TimedNote(what=said, at=since[job, why], why=why)


def seconds_left(state: State, now: float) -> float | None:
    """Predict the seconds until the last score; None before the plan and when no work is left.

    Mixes the plan, which includes the load and the CPU tail, with the pace of the shards so far, weighted by the share of
    work done. The plan's time runs from the start of the first trial. Never below what the shards to do need.
    """
    if state.plan.made_at is None or not state.shards.by_name or state.ended_at is not None:
        return None
    tail = _tail_seconds(state)
    if state.shards.todo == 0:
        return tail or None
    total = left = 0.0
    planned = set()
    for shard in state.shards.by_name.values():
        total += shard.seconds
        planned.add(shard.lane)
        if shard.is_to_do and not shard.undecided:
            left += shard.seconds
    work = max(LEAST_SECONDS, left / max(1, state.lanes_in_use or len(planned)), tail)
    elapsed = _inference_seconds(state, now)
    by_plan = max(work, state.plan.predicted_makespan_seconds - elapsed)
    share = (total - left) / total if total > 0 else 0.0
    if share <= 0:
        return by_plan
    return max(work, share * elapsed * left / (total - left) + (1 - share) * by_plan)


def _inference_seconds(state: State, now: float) -> float:
    """Return the seconds since the first current trial started; 0 if none has."""
    assert state.plan.made_at is not None
    starts = [
        info.changed_at
        for info in {t.job: state.jobs.by_name.get(t.job) for t in state.trials.live.values()}.values()
        if info is not None and "running" in info.members.values()
    ]
    return max(0.0, now - max(state.plan.made_at, min(starts))) if starts else 0.0


def _tail_seconds(state: State) -> float:
    """Predict the seconds of the open metric jobs."""
    open_ones = [state.scoring.metrics[name].seconds for name in state.scoring.outstanding]
    return max([sum(open_ones) / state.cpu_slots, *open_ones], default=0.0)


def find_by_journal(paths: EvaluationPaths, now: float) -> Summary | None:
    """The summary of an evaluation without a valid one; None where its journal is empty, or a copy of another's."""
    try:
        if not paths.journal.stat().st_size:
            return None
        state = replayed_state(read_events(paths.journal))
        if state is None or state.evaluation_id != paths.root.name:
            return None
        return summary_now(state, paths, now)
    except Exception as error:  # noqa: BLE001 (one bad journal must not hide other evaluations)
        what = str(error) if isinstance(error, OtherFormatError) else f"its journal cannot be read: {error}"
        return summary_of_record(paths, what)
